"""Check that an input_fn can be imported here. It runs in a child process with a deadline, because importing runs user
code.

The module is searched as in a worker's runner: in installed packages, PYTHONPATH, the working directory.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass

from penstock.proto.errors import DeadlineError, InvalidArgumentError, PenstockError, error_named
from penstock.runtime.process.end import exit_words, kill_group
from penstock.runtime.process.line_reader import LinePipe
from penstock.runtime.process.spawn import spawn
from penstock.worker.tools.loader_children import interpreter, load_input_fn

__all__ = ["ImportedLoader", "main", "try_import"]

TRACEBACK = 8 << 10
"""Largest number of characters of a traceback that the child sends; of a longer one, the end is kept. Traceback and
message must fit into the buffer of a pipe, because the command reads the pipe only after the child has ended."""


@dataclass(frozen=True)
class ImportedLoader:
    """Result of importing an input_fn without an error."""

    file: str
    """Path of the file of the input_fn's module; "" if it has no file."""


def try_import(input_fn: str, deadline_s: float) -> ImportedLoader:
    """Import "module:name" in a child process and return where it was found.

    Raises the same errors as a worker: InputFnNotFoundError, InputFnError with the end of its traceback. Also raises
    InvalidArgumentError for another text than "module:name", DeadlineError, and PenstockError if the child died.
    """
    module, _, name = input_fn.partition(":")
    if not module or not name:
        raise InvalidArgumentError(
            f"input_fn must be MODULE:NAME, such as mypackage.data:train_input, got {input_fn!r}. Name a function of "
            "an importable module"
        )
    with LinePipe() as answer:
        command = interpreter("penstock.deploy.doctor.import_check", input_fn, str(answer.theirs.fileno()))
        child = spawn(command, fds=[answer.theirs], stdout=sys.stderr.fileno())
        try:
            in_time = child.wait(deadline_s)
        finally:
            kill_group(child.pid)  # also ends its descendants
            status = child.result()
        if not in_time:
            raise DeadlineError(
                f"importing {module} took more than {deadline_s:g} s. Raise --deadline if the import needs longer"
            )
        answer.read()  # one read, not until end of file: a descendant in another process group may keep the pipe open
    if not answer.rest:
        raise PenstockError(f"the process that imported {module} {exit_words(status)}. See its output above")
    found = json.loads(answer.rest)
    if "error" in found:
        raise error_named(**found["error"])
    return ImportedLoader(found["file"])


def main() -> None:
    """Run the child process, which imports an input_fn. Its arguments are the input_fn's "module:name" and the
    descriptor of the pipe for the answer."""
    from penstock.proto.v1 import records_pb2

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
    os._exit(0)  # do not wait for threads that the module started
