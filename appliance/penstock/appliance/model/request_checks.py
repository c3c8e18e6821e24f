"""What the numbers and names of requests may be. Protobuf lets through what no clock and no count says: NaN, 2**64-1.

They would not be wrong answers to the one who sent them but harm to all others: a hold of NaN seconds is a loop without
a pause, a total of 2**64 - 1 overflows the next message that is made of it, and SQLite's integers have a sign. A name
stands in everybody's logs, tables and errors, where one that is no plain text could pass for another's.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.proto.errors import InvalidArgumentError
from penstock.proto.state.position import MOST
from penstock.proto.v1 import coordinator_pb2 as pb

LONGEST_S = 1e9
"""Thirty years: longer than anybody means."""
LONGEST_NAME = 200
"""Characters of a job's or worker's name, which stands in logs, metrics and every message about it."""


def check_measures(**values: float) -> None:
    """Seconds, or whatever else is measured. Raises InvalidArgumentError for what no clock has said."""
    for name, value in values.items():
        if not 0.0 <= value <= LONGEST_S:  # false for NaN, too
            raise InvalidArgumentError(f"{name}={value}: it lies between 0 and {LONGEST_S:g}")


def check_reports(reports: Iterable[pb.SlotReport], traits_max: int) -> None:
    """Raises InvalidArgumentError for what no worker can have measured of a runner, or tells of a loader."""
    for report in reports:
        if report.HasField("capabilities") and (size := report.capabilities.ByteSize()) > traits_max:
            raise InvalidArgumentError(f"traits of a slot must have at most {traits_max} bytes, got {size}")
        check_measures(
            batches_per_s=report.batches_per_s,
            batch_s=report.batch_s,
            batch_cpu_s=report.batch_cpu_s,
            batch_delay_s=report.batch_delay_s,
        )


def check_counts(**values: int) -> None:
    """Steps, epochs, batches. Raises InvalidArgumentError for what cannot be counted on from."""
    for name, value in values.items():
        if not 0 <= value <= MOST:
            raise InvalidArgumentError(f"{name}={value}: it lies between 0 and {MOST}")


def check_name(what: str, name: str) -> None:
    """Raises InvalidArgumentError for what is no printable text of one line, has blanks at its ends, or is too long."""
    if len(name) > LONGEST_NAME:
        raise InvalidArgumentError(f"{what}: a name must have at most {LONGEST_NAME} characters, got {len(name)}")
    if name != name.strip() or not name.isprintable():
        raise InvalidArgumentError(f"{what} {name!a}: a name is printable text without blanks at its ends")
