"""Runs of an example of a framework, that can be killed and started again, and are heard step by step.

Importing a framework takes seconds of a core. So one interpreter imports the example once (this file, run as a script)
and forks a process for each rank of each run; nothing of ours is running in it at that time. What a rank gets from
torchrun, its variables, it gets here too.

The example's logs are named pipes, with room for few lines: a run that is not heard waits, so one that is to be killed
in the middle has not come to its end before.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cluster import Cluster, running

__all__ = ["Framework", "Line", "Run", "framework", "killed_and_resumed"]

EXAMPLES = str(Path(__file__).parents[2] / "examples")
SEED = 7
DEADLINE_S = 90.0
STEPS, EVERY, KILL_AT = 72, 8, 20
"""A pass has 14 steps, or 7 of two ranks; a pipe has room for 45 lines."""

Line = dict[str, Any]
"""What an example logs of a step: step, loss, digest."""


class Run:
    """One run, of one process or several."""

    def __init__(self, server: Framework, job: str, out: Path, steps: int, every: int, ranks: int) -> None:
        self.lines: list[list[Line]] = [[] for _ in range(ranks)]
        """Of each rank, what was heard."""
        self._server = server
        self._out = out
        out.mkdir(exist_ok=True)
        self._pipes = {_pipe(out / f"rank{rank}.jsonl"): rank for rank in range(ranks)}
        self._rest = [b""] * ranks
        self._pids = [0] * ranks
        self._ends: dict[int, int] = {}
        """pidfd -> pid, of those that still run."""
        arguments = ["--steps", str(steps), "--checkpoint-every", str(every), "--out", str(out)]
        port = _free_port() if ranks > 1 else 0
        for rank in range(ranks):
            environment = {"PENSTOCK_JOB": job, "PENSTOCK_SEED": str(SEED)}
            if ranks > 1:
                environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
                environment |= {"LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            request = {"arguments": arguments, "environment": environment, "group": self._pids[0]}
            self._pids[rank] = server.ask({**request, "said": str(out / f"said{rank}.txt")})
            self._ends[os.pidfd_open(self._pids[rank])] = self._pids[rank]

    def _hear(self, timeout_s: float) -> bool:
        """False if nothing was said within so long, and nobody has ended."""
        ready = select.select([*self._pipes, *self._ends], [], [], timeout_s)[0]
        for fd in ready:
            if fd in self._ends:
                del self._ends[fd]
                os.close(fd)
                continue
            rank, data = self._pipes[fd], os.read(fd, 1 << 16)
            if not data:
                del self._pipes[fd]
                os.close(fd)
            *lines, self._rest[rank] = (self._rest[rank] + data).split(b"\n")
            self.lines[rank] += [json.loads(line) for line in lines]
        return bool(ready)

    @property
    def said(self) -> str:
        """What its processes wrote to stdout and stderr."""
        return "\n".join(path.read_text()[-3000:] for path in sorted(self._out.glob("said*.txt")))

    def reach(self, step: int) -> None:
        """Hear it until each rank is at this step."""
        until = time.monotonic() + DEADLINE_S
        while min(lines[-1]["step"] if lines else 0 for lines in self.lines) < step:
            assert len(self._ends) == len(self._pids), self.said
            assert time.monotonic() < until, f"not at step {step} yet\n{self.said}"
            self._hear(1.0)

    def kill(self) -> None:
        """SIGKILL to the process group, in the middle of the run."""
        os.killpg(self._pids[0], signal.SIGKILL)
        assert self._end() == [-signal.SIGKILL] * len(self._pids), self.said

    def finish(self) -> list[dict[int, Line]]:
        """Hear it to its end. Of each rank step -> line."""
        assert self._end() == [0] * len(self._pids), self.said
        return [{line["step"]: line for line in lines} for lines in self.lines]

    def _end(self) -> list[int]:
        """Hear all that it says until its processes have ended. Their exit status."""
        until = time.monotonic() + DEADLINE_S
        while self._ends or self._pipes:
            assert time.monotonic() < until, f"not at its end\n{self.said}"
            self._hear(1.0)
        return [self._server.ask({"wait": pid}) for pid in self._pids]


class Framework:
    """The interpreter that has imported an example, and the workers that feed its runs."""

    def __init__(self, module: str, cluster: Cluster, folder: Path) -> None:
        self._folder = folder
        environment = {**cluster.environment, "PENSTOCK_COORDINATOR": cluster.address, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, __file__, module], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def ask(self, request: dict[str, Any]) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()  # the first comes after the import
        assert answer, "the interpreter with the example is gone"
        return int(answer)

    def start(self, name: str, steps: int, every: int, ranks: int = 1) -> Run:
        """Start a run, or start it again."""
        return Run(self, name, self._folder / name, steps, every, ranks)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()


def killed_and_resumed(example: Framework, ranks: int = 1) -> None:
    """The claim of every example: killed in the middle and started again, it has the batches and the losses of a run
    that nobody killed, to the last bit."""
    whole = example.start("whole", STEPS, EVERY, ranks).finish()
    killed = example.start("killed", STEPS, EVERY, ranks)
    killed.reach(KILL_AT)
    killed.kill()
    resumed = example.start("killed", STEPS, EVERY, ranks)
    for rank, after in enumerate(resumed.finish()):
        before = {line["step"]: line for line in killed.lines[rank]}
        assert sorted(whole[rank]) == list(range(1, STEPS + 1))
        assert len({line["digest"] for line in whole[rank].values()}) == STEPS
        assert max(before) < STEPS, "it was not killed in the middle"
        assert EVERY < min(after) <= max(before) + 1, "it did not go on from a checkpoint"
        assert sorted(after) == list(range(min(after), STEPS + 1))
        assert before == {step: whole[rank][step] for step in before}
        assert after == {step: whole[rank][step] for step in after}


@contextmanager
def framework(module: str, folder: Path, slots: int = 4) -> Iterator[Framework]:
    """An example's framework and its workers, for as long as the block."""
    with running(folder / "books", PYTHONPATH=EXAMPLES) as cluster:
        cluster.add_worker(slots, allow="integrations")
        example = Framework(module, cluster, folder)
        try:
            yield example
        finally:
            example.close()


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


def _fork(module: Any, request: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.setpgid(0, request["group"])
    with open(request["said"], "a") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    os.environ.update(request["environment"])
    sys.argv = [module.__file__, *request["arguments"]]
    module.main()
    raise SystemExit(0)


def _serve(name: str) -> None:
    module = importlib.import_module(name)
    started: set[int] = set()
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
            started.discard(request["wait"])
        else:
            answer = _fork(module, request)
            started.add(answer)
        print(answer, flush=True)
    for pid in started:  # of a test that failed
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    os._exit(0)  # a framework's modules take seconds to be taken down


if __name__ == "__main__":
    _serve(sys.argv[1])
