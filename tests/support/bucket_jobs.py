"""Training jobs of several ranks with checkpoints in a bucket, which a test tells what to do: real processes, forked
from an interpreter that has imported torch and s3fs."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from census import alive, children
from s3_server import AGENT
from warm import Forked, fork

__all__ = ["RANKS", "Answer", "BucketJob"]

RANKS = 4
DEADLINE_S = 120.0
IMPORTS = ["torch.distributed", "torch._dynamo", "s3fs", "penstock.client.checkpoint", "bucket_ranks"]


@dataclass(frozen=True)
class Answer:
    """A rank's answer."""

    value: Any = None
    raised: str = ""
    """Name of the class of what it raised; "killed" for a rank that ended."""
    said: str = ""


class BucketJob:
    """A job of RANKS ranks.

    environment: what its processes get besides ours, such as keys of the store. name: first part of the names under
    which the server counts requests ("NAME-RANK").
    """

    def __init__(self, environment: Mapping[str, str], name: str = "job", ranks: int = RANKS) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.ranks = ranks
        path = f"{self._folder.name}/socket"
        self._forked: list[Forked] = []
        self._ends: dict[int, _End] = {}
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(ranks)
            for rank in range(ranks):
                variables = {**environment, AGENT: f"{name}-{rank}", "OMP_NUM_THREADS": "1"}
                work = "bucket_ranks:serve", path, rank, ranks, f"{self._folder.name}/store"
                self._forked.append(fork(*work, imports=IMPORTS, environment=variables))
            for _ in range(ranks):
                ends = [listener.fileno(), *(one.fileno() for one in self._forked)]
                ready = select.select(ends, [], [], DEADLINE_S)[0]
                assert ready == ends[:1], "a rank has ended, or is too slow, before it could be told anything"
                connection = listener.accept()[0]
                end = _End(connection)
                self._ends[int(end.line(time.monotonic() + DEADLINE_S) or "-1")] = end

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def trainer(self, rank: int) -> int:
        """Return the pid of a rank's training process."""
        return self._forked[rank].pid

    @property
    def trainers(self) -> tuple[int, ...]:
        return tuple(one.pid for one in self._forked)

    def writer(self, rank: int) -> int:
        """Return the pid of a rank's writer process."""
        [pid] = children(self.trainer(rank))
        return pid

    def call(self, call: str, **arguments: Any) -> list[Answer]:
        """Have all ranks do something, and return their answers."""
        self.begin(call, **arguments)
        return self.answers()

    def begin(self, call: str, **arguments: Any) -> None:
        for rank in range(self.ranks):
            self._ends[rank].send(json.dumps([call, arguments]))

    def answers(self, timeout_s: float = DEADLINE_S) -> list[Answer]:
        """Return the ranks' answers. After a rank has ended the others have a second, as a launcher ends them."""
        until = time.monotonic() + timeout_s
        found: dict[int, Answer] = {}
        while len(found) < self.ranks:
            waiting = {self._ends[rank]: rank for rank in range(self.ranks) if rank not in found}
            ready = select.select(list(waiting), [], [], max(until - time.monotonic(), 0))[0]
            if not ready:
                if any(answer.raised == "killed" for answer in found.values()):
                    return [found.get(rank, Answer(raised="no answer")) for rank in range(self.ranks)]
                raise AssertionError(f"ranks {sorted(waiting.values())} do not answer in {timeout_s:g} s: {found}")
            for end in ready:
                line = end.line(until)
                found[waiting[end]] = Answer(**json.loads(line)) if line else Answer(raised="killed")
                if not line:
                    until = min(until, time.monotonic() + 1)
        return [found[rank] for rank in range(self.ranks)]

    def done(self, call: str, **arguments: Any) -> list[Any]:
        """Have all ranks do something that must not fail, and return what it returned."""
        answers = self.call(call, **arguments)
        assert not [one for one in answers if one.raised], f"{call}({arguments}): {answers}"
        return [one.value for one in answers]

    def kill(self, *, writers: bool = True) -> list[int]:
        """Kill all ranks, and their writers if these are not to go on. Return the pids of the writers."""
        pids = [child for pid in self.trainers for child in children(pid)]
        for pid in [*(pids if writers else []), *self.trainers]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for one in self._forked:
            one.outcome(time.monotonic() + DEADLINE_S)
        for end in self._ends.values():
            end.close()
        self._folder.cleanup()
        return alive(pids)


class _End:
    """Our end of a rank's socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = b""

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, line: str) -> None:
        with contextlib.suppress(OSError):  # its reader notices that it has ended
            self._connection.sendall(line.encode() + b"\n")

    def line(self, until: float) -> str:
        """Return the next line; empty after the rank's end."""
        while b"\n" not in self._buffer:
            assert select.select([self], [], [], max(until - time.monotonic(), 0))[0], "a rank does not answer"
            try:
                piece = self._connection.recv(1 << 16)
            except ConnectionResetError:
                piece = b""
            if not piece:
                return ""
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode()

    def close(self) -> None:
        self._connection.close()
