"""Limits on the numbers and names in requests. Protobuf lets through values that no clock or counter gives: NaN,
2**64-1.

Such values harm every peer, not only their sender: a hold of NaN seconds is a loop without a pause, a total of 2**64 -
1 overflows the next message made of it, and SQLite's integers are signed. Names appear in logs, metrics and errors,
where text that is not plain could pass for another name.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.proto.errors import InvalidArgumentError
from penstock.proto.state.position import MOST
from penstock.proto.v1 import coordinator_pb2 as pb

LONGEST_S = 1e9
"""Largest duration in a request, in seconds: thirty years."""
LONGEST_NAME = 200
"""Longest name of a job or worker, in characters: it appears in logs, metrics and every message about it."""


def check_measures(**values: float) -> None:
    """Check seconds and other measurements. Raises InvalidArgumentError for values outside the limits, and for NaN."""
    for name, value in values.items():
        if not 0.0 <= value <= LONGEST_S:  # false for NaN, too
            raise InvalidArgumentError(f"{name} must be between 0 and {LONGEST_S:g}, got {value}")


def check_reports(reports: Iterable[pb.SlotReport], capabilities_max: int) -> None:
    """Raise InvalidArgumentError for invalid measurements of a runner or oversized capabilities of a loader."""
    for report in reports:
        check_capabilities(report, capabilities_max)
        check_measures(
            batches_per_s=report.batches_per_s,
            batch_s=report.batch_s,
            batch_cpu_s=report.batch_cpu_s,
            batch_delay_s=report.batch_delay_s,
        )


def check_capabilities(report: pb.SlotReport | pb.StateAnswer, most: int) -> None:
    """Raise InvalidArgumentError for capabilities of a loader with more bytes than `most`."""
    if report.HasField("capabilities") and (size := report.capabilities.ByteSize()) > most:
        raise InvalidArgumentError(
            f"the capabilities that a worker reports of a loader must have at most {most} bytes, got {size}"
        )


def check_counts(**values: int) -> None:
    """Check counts of steps, epochs and batches. Raises InvalidArgumentError for values outside the limits."""
    for name, value in values.items():
        if not 0 <= value <= MOST:
            raise InvalidArgumentError(f"{name} must be between 0 and {MOST}, got {value}")


def check_number(what: str, number: int, most: int) -> None:
    """Raise InvalidArgumentError for more elements of a request than `most`: each takes time of the event loop."""
    if number > most:
        raise InvalidArgumentError(f"{what} must be at most {most}, got {number}")


def check_name(what: str, name: str) -> None:
    """Raise InvalidArgumentError for a name that is too long, is not one printable line, or has blanks at its ends."""
    if len(name) > LONGEST_NAME:
        raise InvalidArgumentError(f"{what} must have at most {LONGEST_NAME} characters, got {len(name)}")
    if name != name.strip() or not name.isprintable():
        raise InvalidArgumentError(f"{what} must be printable text without blanks at its ends, got {name!a}")
