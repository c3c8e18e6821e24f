"""Training scripts of examples/ that are killed with SIGKILL in mid-run and started again, and what they logged.

Their ranks are forked from one interpreter (warm.py) that has imported the script, and get the variables that torchrun
would set. A script logs a line of JSON for each step and rank, to OUT/*.jsonl. These logs are named pipes with room for
few lines: a run that is not heard waits, so one that is to be killed in the middle has not come to its end before.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from warm import Forked, Outcome, fork

__all__ = ["Line", "Lines", "Training"]

IMPORTED = (
    "torch._dynamo",  # which FSDP2, DDP and optimizers import when they are used, in each rank
    "torch.distributed.checkpoint.state_dict",
    "penstock.client.checkpoint",
    "penstock.data",
)
DEADLINE_S = 120.0

Line = dict[str, Any]
Lines = dict[str, list[Line]]
"""Lines of each rank's log, by the log's name."""


class Training:
    """A script in a folder of its own, which is started any number of times."""

    def __init__(self, module: str, out: Path, environment: Mapping[str, str]) -> None:
        """`environment`: what it gets besides torchrun's variables."""
        self.module, self.out = module, out
        self.environment = environment
        out.mkdir(parents=True)

    def to_the_end(self, ranks: int, *options: str, steps: int) -> Lines:
        """Run the job once, up to step `steps`; return what it logged."""
        heard, launched = self._launch(ranks, *options, "--steps", str(steps))
        try:
            deadline = time.monotonic() + DEADLINE_S
            while (running := [one for one in launched if not one.is_over]) and time.monotonic() < deadline:
                heard.listen(running)
            said = [one.outcome(deadline) for one in launched]
        finally:
            self._kill(launched)
        assert said == [Outcome()] * ranks, said
        return heard.all()

    def killed(self, ranks: int, *options: str, steps: int, at: int) -> Lines:
        """Run the job once, up to `steps`, and kill it when each rank has logged step `at`. Returns what it had logged
        by then, which may be up to 25 lines more."""
        heard, launched = self._launch(ranks, *options, "--steps", str(steps))
        try:
            deadline = time.monotonic() + DEADLINE_S
            while any(not log or log[-1]["step"] < at for log in heard.lines.values()):
                over = [one.outcome(deadline) for one in launched if one.is_over]
                assert not over, over
                assert time.monotonic() < deadline, f"{self.module} is at {heard.lines}"
                heard.listen(launched)
        finally:
            self._kill(launched)
        assert [one.outcome(deadline).raised for one in launched] == ["killed"] * ranks
        return heard.all()

    def _names(self, ranks: int) -> list[str]:
        return [f"rank{rank}.jsonl" for rank in range(ranks)]

    def _launch(self, ranks: int, *options: str) -> tuple[_Heard, list[Forked]]:
        heard = _Heard(self.out, self._names(ranks))
        arguments = [*options, "--out", str(self.out)]
        shared = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
        shared |= {"MASTER_PORT": str(_free_port()), "GLOO_SOCKET_IFNAME": "lo", **self.environment}
        several = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
        imports = (*IMPORTED, self.module)
        return heard, [
            fork(
                "kill_and_resume:run",
                self.module,
                arguments,
                imports=imports,
                environment=variables if ranks > 1 else self.environment,
            )
            for variables in several
        ]

    @staticmethod
    def _kill(launched: Sequence[Forked]) -> None:
        for one in launched:
            one.kill()


def run(module: str, arguments: Sequence[str]) -> None:
    """Run a module's main function, as each rank does."""
    sys.argv = [module, *arguments]
    sys.modules[module].main()


class _Heard:
    """The logs of one start."""

    def __init__(self, out: Path, names: Sequence[str]) -> None:
        self.lines: Lines = {name: [] for name in names}
        self._rest = dict.fromkeys(names, b"")
        self._pipes = {_pipe(out / name): name for name in names}

    def listen(self, ends: Sequence[Forked], timeout_s: float = 1.0) -> bool:
        """Wait for something to be said, or somebody's end. False if nothing was said."""
        watched: list[int | Forked] = [*self._pipes, *ends]
        ready = select.select(watched, [], [], timeout_s)[0]
        said = False
        for pipe in [pipe for pipe in ready if pipe in self._pipes]:
            name, data = self._pipes[pipe], os.read(pipe, 256)
            if not data:
                del self._pipes[pipe]
                os.close(pipe)
                continue
            said = True
            *lines, self._rest[name] = (self._rest[name] + data).split(b"\n")
            self.lines[name] += [json.loads(line) for line in lines]
        return said

    def all(self) -> Lines:
        """Return all lines, once no process writes any more. A line that a kill cut off is left out."""
        while self.listen([], 0):
            pass
        for pipe in self._pipes:
            os.close(pipe)
        return self.lines


def _pipe(path: Path) -> int:
    """A named pipe with room for one page."""
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    pipe = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, 4096)
    return pipe


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
