"""Reports of slots, cut to the size of a heartbeat: user code decides how long their texts are."""

from __future__ import annotations

from penstock.proto.rpc.wire_errors import cut
from penstock.proto.v1 import coordinator_pb2

REPORTS_MAX = 3 << 20
"""Total size of slot reports in one heartbeat, in bytes; the coordinator accepts messages of 4 MiB."""
BARE = 300
"""Bytes reserved in a shortened report for all but its texts and the run's name."""


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
