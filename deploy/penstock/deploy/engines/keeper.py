"""Keeper of one daemon: runs `penstock coordinator` or `penstock worker` as a child and starts it again if it dies.

The daemon ends with this process (`--parent-pid`), or when it is asked, so that the supervisor ends its daemons in the
right order, also if all of them get a signal. The pause before a new start doubles each time. A daemon is given up if
it dies several times soon after its start, cannot run with its settings, or dies before it was first ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.deploy.console.exit_codes import BUG, CommandError
from penstock.deploy.engines.fleet_folder import open_log
from penstock.runtime.process.end import exit_words
from penstock.runtime.process.line_reader import LinePipe
from penstock.runtime.process.spawn import Spawned, module, spawn
from penstock.runtime.telemetry.logs import printable

_log = logging.getLogger("penstock.deploy.engines")

PERMANENT_ERRORS = frozenset({2, 3, 12, 15, 16})
"""Exit codes after which a restart would fail too: usage, TLS, token, version, unsafe address (exit_codes.py)."""
MAX_FAILED_STARTS = 5
"""Starts in a row that end within STEADY_S after which a daemon is given up, with pauses of 7.5 s in all; one that was
never ready, after its first."""
STEADY_S = 30.0
"""Seconds that a daemon must run before its failed starts are forgotten."""
WORKER_GRACE_S = 20.0
"""Seconds until SIGKILL, in which a worker that was asked to end migrates its slots and ends its runners."""
COORDINATOR_GRACE_S = 10.0
PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
LOG_LINES = 5
"""Last lines of a daemon's log that an error shows."""


class FleetKeeper:
    """Keeper of one daemon, which starts it whenever it fails, until `stop`.

    `command` returns the arguments of the next start, from the first line of output of the last that was ready, or "".
    `restart_always`: also after an orderly end; not for workers, which an operator may end on purpose. `changed` is
    called when `pid`, `line`, `restarts` or `state` changes.
    """

    def __init__(
        self,
        title: str,
        command: Callable[[str], Sequence[str]],
        log: Path,
        *,
        restart_always: bool,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.title = title
        self.line = ""
        self.pid = 0
        self.restarts = 0
        self.state = "starting"
        """"starting", "ready", "waiting" (for the next start after a failure), "left" (ended without an error),
        "failed" (given up) or "ended" (after `stop`)."""
        self.ready = asyncio.Event()
        """Set once the daemon has printed its first line."""
        self._command, self._path, self._restart_always, self._changed = command, log, restart_always, changed
        self._stopping = asyncio.Event()
        self._child: Spawned | None = None

    async def run(self) -> None:
        """Run until `stop`, or an end without an error unless `restart_always`. Raises CommandError when given up."""
        quick, pause = 0, PAUSE_S
        while True:
            began = time.monotonic()
            try:
                code = await self._run_once()
                how = exit_words(code)
            except OSError as error:  # no process, memory or descriptor is left for it
                code, how = BUG, f"cannot be started ({error.strerror})"
            if self._stopping.is_set():
                self._become("ended")
                return
            if code == 0 and not self._restart_always:
                _log.info("%s stopped on request", self.title)
                self._become("left")
                return
            if time.monotonic() - began >= STEADY_S:
                quick, pause = 0, PAUSE_S
            quick += 1
            if code in PERMANENT_ERRORS or quick >= MAX_FAILED_STARTS or not self.ready.is_set():
                self._become("failed")
                again = f" ({quick} times in a row)" if quick > 1 else ""
                raise CommandError(f"the {self.title} {how}{again}: {log_end(self._path)}", code if code > 1 else BUG)
            self._become("waiting")
            _log.warning("%s %s; starting it again in %g s (log: %s)", self.title, how, pause, self._path)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)
                self._become("ended")
                return
            pause = min(2 * pause, LONGEST_PAUSE_S)
            self.restarts += 1

    @property
    def is_ending(self) -> bool:
        """True once `stop` was called."""
        return self._stopping.is_set()

    async def stop(self, grace_s: float) -> None:
        """Ask the daemon to end, and kill it after `grace_s` seconds."""
        self._stopping.set()
        if self._child is not None:
            self._child.ask_to_end()
        end = time.monotonic() + grace_s
        while self.pid and time.monotonic() < end:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._gone.wait(), end - time.monotonic())
        if self.pid:
            _log.warning("%s has not ended within %g s: killing it", self.title, grace_s)
            if self._child is not None:
                self._child.kill()
            await self._gone.wait()

    def _become(self, state: str) -> None:
        self.state = state
        self._changed()

    async def _run_once(self) -> int:
        loop = asyncio.get_running_loop()
        self._gone, ended = asyncio.Event(), asyncio.Event()

        def read_output() -> None:
            for line in out.read():
                if self.state != "ready":
                    self.line = line.decode(errors="replace").strip()
                    self._become("ready")
                    self.ready.set()
            if out.ended:
                loop.remove_reader(out.fileno())

        with LinePipe() as out:
            command = module("penstock.deploy", *self._command(self.line), "--parent-pid", str(os.getpid()))
            self._child = child = spawn(command, stdout=out.theirs, stderr=open_log(self._path), linked=True)
            loop.add_reader(out.fileno(), read_output)
            child.on_end(ended.set)
            self.pid = child.pid
            self._become("starting")
            if self._stopping.is_set():
                child.ask_to_end()
            try:
                await ended.wait()
            finally:
                loop.remove_reader(out.fileno())
                code = child.result()
                child.close()
                self.pid, self._child = 0, None
                self._gone.set()
        return code


def log_end(log: Path, lines: int = LOG_LINES) -> str:
    """Return a log's last line if it is an error of Penstock, else the last `lines`."""
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 8192))
            text = file.read().decode(errors="replace")
    except OSError as error:
        return f"its log {log} cannot be read: {error.strerror}"
    written = [printable(line) for line in text.splitlines() if line.strip()]
    if not written:
        return f"its log is empty ({log})"
    if written[-1].startswith("penstock: "):
        return f"{written[-1].removeprefix('penstock: ')} ({log})"
    return f"{' | '.join(written[-lines:])} ({log})"
