"""The operator's command for the ends of runs (`penstock coordinator --on-end`), which gets each as JSON on its
standard input. It is run without a shell, one at a time, and at most once for each end: those that wait when the
coordinator dies are lost. If it fails, the log has the last line that it printed."""

from __future__ import annotations

import json
import logging
import queue
import shlex
import shutil
import subprocess
import threading
from collections.abc import Sequence

from penstock.proto.errors import InvalidArgumentError
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.runtime.telemetry.cluster_view import end_record
from penstock.runtime.telemetry.logs import about, plain

log = logging.getLogger("penstock.appliance")

LONGEST_S = 60.0
"""Seconds after which a command is killed, because the next one waits for it."""
CLOSE_S = 5.0
"""Seconds that a coordinator which stops gives the commands for the last ends."""
MOST = 1024
"""Most ends that wait for their turn."""
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
        self._ends: queue.Queue[tuple[str, pb.RunEnd] | None] = queue.Queue(MOST)
        self._thread = threading.Thread(target=self._run, name="penstock-on-end", daemon=True)
        self._thread.start()

    def add(self, run: str, end: pb.RunEnd) -> None:
        try:
            self._ends.put_nowait((run, end))
        except queue.Full:
            log.warning("%s: the command of --on-end is not run, because %d ends wait", run, MOST, extra=about(run=run))

    def _run(self) -> None:
        while (item := self._ends.get()) is not None:
            run, end = item
            wrong = self._call(json.dumps(end_record(run, end)).encode() + b"\n")
            if wrong:
                log.warning("%s: the command of --on-end %s", run, wrong, extra=about(run=run, attempt=end.attempt))

    def _call(self, record: bytes) -> str:
        """Run the command to its end. Return what went wrong, or ""."""
        try:
            # A process group of its own: Ctrl-C at the coordinator's terminal is not meant for it.
            done = subprocess.run(
                self._command,
                input=record,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                process_group=0,
                timeout=LONGEST_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"was killed, because it had not ended after {LONGEST_S:g} s"
        except OSError as error:
            return f"could not be started: {error.strerror}"
        if not done.returncode:
            return ""
        lines = done.stdout.decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")
        return f"ended with status {done.returncode}: {plain(last, _LAST_LINE)}"

    def close(self) -> None:
        """Wait at most CLOSE_S seconds for the commands of all ends so far."""
        try:
            self._ends.put(None, timeout=CLOSE_S)
        except queue.Full:
            return
        self._thread.join(CLOSE_S)
