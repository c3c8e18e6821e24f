"""Sizes of a slot's reports about its runner: user code decides them, and they must not cost the worker its
heartbeats."""

from __future__ import annotations

import pytest

from penstock.proto.rpc.channel import REQUEST_MAX
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.worker.daemon.heartbeats import REPORTS_MAX, fitted


def report(slot: int, size: int) -> pb.SlotReport:
    one = pb.SlotReport(run="job/0", slot=slot, generation=2**63, phase=pb.FAILED, doing="d" * size, stack="é" * size)
    one.error.name, one.error.message, one.error.remote_traceback = "InputFnError", "m" * size, "é" * size
    one.capabilities.advances_state = one.capabilities.not_used = "t" * (size // 8)
    return one


@pytest.mark.parametrize(("count", "size"), [(1, 5 << 20), (100, 32 << 10), (4096, 8 << 10)])
def test_reports_fit_into_a_heartbeat(count: int, size: int) -> None:
    reports = fitted([report(slot, size) for slot in range(count)])
    assert sum(one.ByteSize() for one in reports) <= REPORTS_MAX < REQUEST_MAX
    assert [one.slot for one in reports] == [*range(count)]
    assert {one.error.name for one in reports} == {"InputFnError"}


def test_small_reports_stay_as_they_are() -> None:
    reports = [report(slot, 1000) for slot in range(300)]
    assert fitted(reports) is reports


def test_one_long_report_leaves_the_others() -> None:
    small = [report(slot, 100) for slot in range(9)]
    short = fitted([*small, report(9, 1 << 20)])
    assert short[:9] == small
    assert "bytes left out" in short[9].error.message
