"""Functions in processes of their own, which are forked from an interpreter that has imported torch."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import interpreters

__all__ = ["Forked", "Outcome", "fork"]


@dataclass(frozen=True)
class Outcome:
    """Outcome of a process."""

    value: Any = None
    """Return value of the process's function, as JSON."""
    raised: str = ""
    """The name of the class of what it raised; "killed" for a process that ended without a word."""
    message: str = ""


class Forked:
    """A process, which leads a group of its own."""

    def __init__(self, process: interpreters.Forked, end: int) -> None:
        """`end`: what it reads its outcome from."""
        self.pid = process.pid
        self._process, self._end = process, end
        self._outcome: Outcome | None = None

    def fileno(self) -> int:
        """Return a descriptor that becomes readable at the process's end, for select."""
        return self._end

    @property
    def is_over(self) -> bool:
        return self._outcome is not None or bool(select.select([self._end], [], [], 0)[0])

    def outcome(self, deadline: float) -> Outcome:
        """deadline: of time.monotonic(). Raises TimeoutError."""
        data = b""
        while self._outcome is None:
            if not select.select([self._end], [], [], max(deadline - time.monotonic(), 0))[0]:
                raise TimeoutError("a process did not end in time")
            piece = os.read(self._end, 1 << 16)
            data += piece
            if not piece:
                os.close(self._end)
                self._process.wait(interpreters.DEADLINE_S)
                self._outcome = Outcome(**json.loads(data)) if data else Outcome(raised="killed")
        return self._outcome

    def kill(self) -> None:
        """Kill the process and its group."""
        with contextlib.suppress(ProcessLookupError):  # it is over
            os.killpg(self.pid, signal.SIGKILL)


def fork(
    function: str, *arguments: Any, imports: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Forked:
    """A process that calls the function.

    function: "module:name", called with `arguments`, which are JSON. imports: modules that the interpreter imports
    before it forks, besides the function's. environment: that the process gets besides ours.
    """
    read, write = os.pipe()
    given = [json.dumps([function, arguments])]
    variables = {**os.environ, **(environment or {})}
    modules = [*imports, function.partition(":")[0]]
    try:
        return Forked(interpreters.start("warm", given, variables, imports=modules, ready=write), read)
    finally:
        os.close(write)


def main() -> int:
    """Call the function in the forked process, and write its outcome."""
    (function, arguments), end = json.loads(sys.argv[1]), int(sys.argv[3])
    module, _, name = function.partition(":")
    status = 0
    try:
        found = {"value": getattr(sys.modules[module], name)(*arguments)}
    except BaseException as error:
        traceback.print_exc()
        found, status = {"raised": type(error).__name__, "message": str(error)}, 1
    with os.fdopen(end, "wb") as pipe:
        pipe.write(json.dumps(found).encode())
    return status
