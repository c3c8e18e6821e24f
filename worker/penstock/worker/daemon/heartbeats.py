"""Heartbeats that do not wait for the daemon's event loop.

While the loop is busy, such as with hundreds of states at once, it sends none, and after the *lease* the coordinator
would move all slots. So a thread sends a bare heartbeat (without slot reports) over a connection of its own if the
coordinator's last answer is too old. It closes the connection once the loop gets answers again; otherwise each worker
would hold two after an outage.

It is no process, because heartbeats must stop when the daemon is stopped or killed. They also stop `HANGS_S` seconds
after the loop's last progress; other workers then get the slots.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from penstock.proto.errors import PenstockError
from penstock.proto.rpc.calls import CoordinatorClient
from penstock.proto.rpc.wire_errors import cut
from penstock.proto.v1 import coordinator_pb2

REPORTS_MAX = 3 << 20
"""Total size of slot reports in one heartbeat, in bytes; the coordinator accepts messages of 4 MiB."""
BARE = 300
"""Bytes reserved in a shortened report for all but its texts and the run's name."""

LATE = 0.5
"""Share of the lease without an answer after which the thread sends a heartbeat."""
LOOKS = 8
"""Looks within a lease, once the last answer is too old."""
HANGS_S = 60.0
"""Seconds without progress of the event loop after which it counts as hanging, not busy."""
SOON_S = 0.5


def fitted(reports: list[coordinator_pb2.SlotReport]) -> list[coordinator_pb2.SlotReport]:
    """Shorten the reports to fit one heartbeat: of 8 that are too large together, those above an eighth of REPORTS_MAX
    are cut."""
    if sum(report.ByteSize() for report in reports) <= REPORTS_MAX:
        return reports
    share = REPORTS_MAX // len(reports)
    return [_cut(report, share) if report.ByteSize() > share else report for report in reports]


def _cut(report: coordinator_pb2.SlotReport, share: int) -> coordinator_pb2.SlotReport:
    most = max(0, share - BARE - len(report.run.encode())) // 8
    short = coordinator_pb2.SlotReport()
    short.CopyFrom(report)
    short.doing, short.stack = report.doing[: most // 4], report.stack[: most // 4]  # a character has up to 4 bytes
    if report.HasField("error"):
        short.error.CopyFrom(cut(report.error, most))
    if short.ByteSize() > share:
        for name in ("not_restartable", "not_used", "no_length", "advances_state"):
            short.capabilities.ClearField(name)
    return short


class Heartbeats:
    """Thread that sends heartbeats while the event loop is too busy. bare: makes a heartbeat without slot reports.
    lease_s: returns the coordinator's last lease in seconds; 0 before the first."""

    def __init__(
        self,
        connect: Callable[[], CoordinatorClient],
        bare: Callable[[], coordinator_pb2.HeartbeatRequest],
        lease_s: Callable[[], float],
    ) -> None:
        self._connect, self._bare, self._lease_s = connect, bare, lease_s
        self._answered = self._turned = time.monotonic()
        self._loop_is_answered = True
        """False from the thread's first heartbeat until the event loop gets an answer again."""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-heart", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def note_answer(self) -> None:
        self._answered = self._turned = time.monotonic()
        self._loop_is_answered = True

    def turned(self) -> None:
        self._turned = time.monotonic()

    def is_due(self, now: float, lease_s: float) -> bool:
        """Return True if the last answer is too old at monotonic time `now`, and the event loop still makes
        progress."""
        return lease_s > 0 and now - self._answered > LATE * lease_s and now - self._turned < HANGS_S

    def pause_s(self, now: float, lease_s: float) -> float:
        """Return the seconds until the thread must look again, at monotonic time `now`."""
        return max(self._answered + LATE * lease_s - now, lease_s / LOOKS) or SOON_S

    def _run(self) -> None:
        client: CoordinatorClient | None = None
        while not self._stopped.wait(self.pause_s(time.monotonic(), self._lease_s())):
            if not self.is_due(time.monotonic(), self._lease_s()):
                if client is not None and self._loop_is_answered:
                    client.close()
                    client = None
                continue
            if client is None:
                client = self._connect()
            self._loop_is_answered = False
            try:
                client.heartbeat(self._bare())
            except PenstockError:
                continue  # the event loop meets the same error and reports it
            self._answered = time.monotonic()
        if client is not None:
            client.close()
