"""The operator's command for the ends of runs (`penstock coordinator --on-end`), which gets each as JSON on its
standard input. It is run without a shell, one at a time, and at most once for each end: those that wait when the
coordinator dies are lost. If it fails, the log has the last line that it printed."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import queue
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Sequence

from penstock.proto.errors import InvalidArgumentError
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.runtime.process.line_reader import READ_BYTES
from penstock.runtime.process.watch import Process, readable, wait_for_any
from penstock.runtime.telemetry.cluster_view import end_record
from penstock.runtime.telemetry.logs import about, plain

log = logging.getLogger("penstock.appliance")

LONGEST_S = 60.0
"""Seconds after which a command is killed, because the next one waits for it."""
CLOSE_S = 5.0
"""Seconds that a coordinator which stops gives the commands for the last ends."""
MOST = 1024
"""Most ends that wait for their turn."""
_LOOK_S = 0.5
"""Seconds after which a running command notices that the coordinator stops."""
_LAST_LINE = 400
"""Most characters of that line."""


def parsed(command: str) -> list[str]:
    """Return the program and its arguments. Raises InvalidArgumentError if the program cannot be run."""
    try:
        parts = shlex.split(command)
    except ValueError as error:
        raise InvalidArgumentError(f"--on-end {command}: {error}. Close the quotation mark") from error
    if not parts or shutil.which(parts[0]) is None:
        program = parts[0] if parts else ""
        raise InvalidArgumentError(f"--on-end {command}: {program!r} is no program that may be run. Give its path")
    return parts


class EndHook:
    """Runs the command in a thread of its own, so that the coordinator never waits for it."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._closes_at = math.inf
        self._ends: queue.Queue[tuple[str, pb.RunEnd] | None] = queue.Queue(MOST)
        self._thread = threading.Thread(target=self._run, name="penstock-on-end", daemon=True)
        self._thread.start()

    def add(self, run: str, end: pb.RunEnd) -> None:
        try:
            self._ends.put_nowait((run, end))
        except queue.Full:
            log.warning("%s: the command of --on-end is not run, because %d ends wait", run, MOST, extra=about(run=run))

    def _run(self) -> None:
        while (item := self._ends.get()) is not None and self._left_s() > 0:
            run, end = item
            wrong = self._call(json.dumps(end_record(run, end)).encode() + b"\n")
            if wrong:
                log.warning("%s: the command of --on-end %s", run, wrong, extra=about(run=run, attempt=end.attempt))

    def _left_s(self) -> float:
        return self._closes_at - time.monotonic()

    def _call(self, record: bytes) -> str:
        """Run the command to its end. Return what went wrong, or ""."""
        try:
            # A process group of its own: Ctrl-C at the coordinator's terminal is not meant for it.
            command = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        except OSError as error:
            return f"could not be started: {error.strerror}"
        began = time.monotonic()
        status, printed = self._watched(command, record)
        if status is None:
            return f"was killed, because it still ran after {time.monotonic() - began:.0f} s"
        if not status:
            return ""
        lines = printed.decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")
        return f"ended with status {status}: {plain(last, _LAST_LINE)}"

    def _watched(self, command: subprocess.Popen[bytes], record: bytes) -> tuple[int | None, bytes]:
        """Give it the record. Return its exit status, None if it had to be killed, and the end of what it printed.
        What it has started may go on, and hold its pipe."""
        assert command.stdin is not None
        assert command.stdout is not None
        until, printed, output = time.monotonic() + LONGEST_S, b"", command.stdout.fileno()
        with command.stdout, Process(command.pid) as watched:
            with contextlib.suppress(BrokenPipeError):  # it does not read it
                command.stdin.write(record)
                command.stdin.close()
            fds = {watched.fileno(), output}
            while not (ended := watched.ended) and (left_s := min(until - time.monotonic(), self._left_s())) > 0:
                if output in wait_for_any(fds, min(left_s, _LOOK_S)):
                    data = os.read(output, READ_BYTES)
                    printed = (printed + data)[-READ_BYTES:]
                    fds -= set() if data else {output}
            if not ended:
                os.killpg(command.pid, signal.SIGKILL)
                command.wait()
                return None, printed
            if output in fds and readable(output, 0):
                printed += os.read(output, READ_BYTES)
            return command.wait(), printed

    def close(self) -> None:
        """Wait about CLOSE_S seconds for the commands of all ends so far, and kill one that still runs."""
        self._closes_at = time.monotonic() + CLOSE_S
        with contextlib.suppress(queue.Full):
            self._ends.put_nowait(None)
        self._thread.join(CLOSE_S + 2 * _LOOK_S)
