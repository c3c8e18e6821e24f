"""Ranks of a training job: processes of one gloo group that run a function of tests/inputs, each with its rank.

They are forked from one interpreter that has imported torch and has one thread, for the import takes three seconds of a
core. Forked before anything of gRPC or of a checkpointer is used, they may use both.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

__all__ = ["Outcome", "run"]

_server: tuple[subprocess.Popen[bytes], socket.socket] | None = None


@dataclass(frozen=True)
class Outcome:
    """What became of one rank."""

    value: Any = None
    """What the function returned, as JSON has it."""
    raised: str = ""
    """The name of the class of what it raised; "killed" for a process that ended without a word."""
    message: str = ""


def run(size: int, function: str, *arguments: Any, timeout_s: float = 90) -> list[Outcome]:
    """Run a function on so many ranks.

    function: "module:name", called with `arguments`, which are JSON, when torch.distributed is initialised.
    """
    control = _start()
    with tempfile.TemporaryDirectory() as folder:
        reads = []
        for rank in range(size):
            read, write = os.pipe()
            request = {
                "function": function,
                "arguments": arguments,
                "rank": rank,
                "size": size,
                "store": f"{folder}/store",
            }
            socket.send_fds(control, [json.dumps(request).encode()], [write])
            os.close(write)
            reads.append(read)
        return [_outcome(read, time.monotonic() + timeout_s) for read in reads]


def _outcome(read: int, deadline: float) -> Outcome:
    data = b""
    with os.fdopen(read, "rb", buffering=0) as pipe:
        while select.select([pipe], [], [], max(deadline - time.monotonic(), 0))[0]:
            piece = pipe.read(1 << 16)
            if not piece:
                return Outcome(**json.loads(data)) if data else Outcome(raised="killed")
            data += piece
    raise TimeoutError("a rank did not end in time")


def _start() -> socket.socket:
    global _server
    if _server is None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        here = Path(__file__).parent
        paths = [str(here), str(here.parent / "inputs"), *filter(None, [os.environ.get("PYTHONPATH")])]
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "ranked", str(theirs.fileno())],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
                pass_fds=[theirs.fileno()],
                process_group=0,
            )
        _server = process, ours
    return _server[1]


@atexit.register
def _stop() -> None:
    if _server is not None:
        _server[1].close()
        _server[0].wait(10)


def _serve(control: socket.socket) -> None:
    import torch.distributed

    import penstock.client.checkpoint  # noqa: F401  # imported once, for all

    assert torch.distributed.is_available()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them: they say themselves how it went
    while True:
        data, handles, _, _ = socket.recv_fds(control, 1 << 20, 1)
        if not data:
            return
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            control.close()
            _work(json.loads(data), handles[0])
        os.close(handles[0])


def _work(request: dict[str, Any], write: int) -> None:
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    status = 1
    try:
        rank, size = request["rank"], request["size"]
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
        store = FileStore(request["store"], size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
        module, _, name = request["function"].partition(":")
        found = {"value": getattr(importlib.import_module(module), name)(*request["arguments"])}
        status = 0
    except BaseException as error:
        traceback.print_exc()
        found = {"raised": type(error).__name__, "message": str(error)}
    with os.fdopen(write, "wb") as pipe:
        pipe.write(json.dumps(found).encode())
    sys.stdout.flush()
    os._exit(status)  # the interpreter that was forked has nothing to put in order


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
