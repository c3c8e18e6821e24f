"""Can this input_fn be imported here? Tried in a process of its own with a deadline, for importing runs user code.

The module is found by the same rules as in a worker's runner: what is installed, PYTHONPATH, the working directory.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass

from penstock.proto.errors import DeadlineError, InvalidArgumentError, PenstockError, error_named
from penstock.worker.processes.user_path import interpreter

__all__ = ["ImportedLoader", "main", "try_import"]

TRACEBACK = 8 << 10
"""Characters: with the message, less than a pipe holds, for nobody reads before the end."""


@dataclass(frozen=True)
class ImportedLoader:
    """It can be."""

    file: str
    """Of the module."""


def try_import(input_fn: str, deadline_s: float) -> ImportedLoader:
    """Import "module:name" and look the name up.

    Raises what a worker would raise: InputFnNotFoundError, InputFnError with the traceback; DeadlineError.
    """
    module, _, name = input_fn.partition(":")
    if not module or not name:
        raise InvalidArgumentError(f"{input_fn!r} is not MODULE:NAME, such as mypackage.data:train_input")
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as answer:
        child = subprocess.Popen(
            interpreter("penstock.deploy.doctor.import_check", input_fn, str(writing)),
            pass_fds=[writing],
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno(),
            start_new_session=True,
        )
        os.close(writing)
        try:
            status = child.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise DeadlineError(f"importing {module} takes more than {deadline_s:g} s") from None
        finally:
            try:
                os.killpg(child.pid, signal.SIGKILL)  # what it left behind too
            except ProcessLookupError:
                pass
            child.wait()
        os.set_blocking(answer.fileno(), False)  # a process that it left behind elsewhere may hold the other end
        said = answer.read() or b""
    if not said:
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        raise PenstockError(f"the process that imported {module} ended with {how}")
    found = json.loads(said)
    if "error" in found:
        raise error_named(**found["error"])
    return ImportedLoader(found["file"])


def main() -> None:
    """In the child: arguments are the name, and the number of the pipe to answer on."""
    from penstock.proto.v1 import records_pb2
    from penstock.worker.processes.user_code import load_input_fn

    input_fn, pipe = sys.argv[1], int(sys.argv[2])
    os.set_inheritable(pipe, False)
    found: dict[str, object]
    try:
        load_input_fn(records_pb2.LoaderSpec(input_fn=input_fn))
        found = {"file": getattr(sys.modules[input_fn.partition(":")[0]], "__file__", None) or ""}
    except PenstockError as error:
        traceback = error.remote_traceback[-TRACEBACK:]
        found = {"error": {"name": type(error).__name__, "message": error.message, "remote_traceback": traceback}}
    os.write(pipe, json.dumps(found).encode())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # what the module started keeps nobody waiting
