"""The .proto files keep what they promised, and the check that holds them to it sees each way to break it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable

import pytest
from wire_contract import BASELINE, Contract, breaks, described, public

P = "penstock.proto.v1."
STATUS, HELLO = f"{P}StatusReply", f"{P}Hello"


def test_programs_built_on_the_baseline_work() -> None:
    assert not breaks(json.loads(BASELINE.read_text()), described()), (
        "reserve what goes, leave what others read, or change the protocol's number; then `make proto-baseline`"
    )


def test_what_is_read_reaches_from_the_calls_down() -> None:
    assert {f"{P}StatePart", f"{P}BoxPosition", f"{P}SlotPhase"} <= public(described())
    assert HELLO not in public(described())


def _drop(now: Contract) -> None:
    del now["messages"][STATUS]["fields"]["2"]


def _drop_reserved(now: Contract) -> None:
    _drop(now)
    now["messages"][STATUS]["reserved"] = [2, "uptime_s"]


def _retype(now: Contract) -> None:
    now["messages"][STATUS]["fields"]["2"] = "uint64 uptime_s"


def _rename(now: Contract) -> None:
    now["messages"][STATUS]["fields"]["2"] = "double uptime"


def _repeat(now: Contract) -> None:
    now["messages"][STATUS]["fields"]["2"] = "repeated double uptime_s"


def _drop_message(now: Contract) -> None:
    del now["messages"][STATUS]


def _drop_method(now: Contract) -> None:
    del now["methods"][f"{P}Coordinator/Status"]


def _stream(now: Contract) -> None:
    now["methods"][f"{P}Coordinator/Status"][1] = f"stream {STATUS}"


def _renumber(now: Contract) -> None:
    now["enums"][f"{P}SlotPhase"]["3"] = "FAILED"


@pytest.mark.parametrize(
    "change", [_drop, _drop_reserved, _retype, _rename, _repeat, _drop_message, _drop_method, _stream, _renumber]
)
@pytest.mark.parametrize("more", [0, 1])
def test_what_others_read_cannot_change(change: Callable[[Contract], None], more: int) -> None:
    """Whatever the protocol's number."""
    before = described()
    now = copy.deepcopy(before)
    now["protocol"] += more
    change(now)
    assert len(breaks(before, now)) == 1


def test_messages_change_with_number_or_reserve() -> None:
    before = described()
    now = copy.deepcopy(before)
    hello = now["messages"][HELLO]
    del hello["fields"]["7"]
    assert breaks(before, now) == [f"message {HELLO}: field 7 was 'string ticket', is 'gone'"]
    now["lane_protocol"] += 1
    assert not breaks(before, now)
    now["lane_protocol"] -= 1
    hello["reserved"] += [7, "ticket"]
    assert not breaks(before, now)
    hello["reserved"].remove(11)
    assert breaks(before, now) == [f"message {HELLO}: 11 is no longer reserved"]


def test_additions_break_nothing() -> None:
    before = described()
    now = copy.deepcopy(before)
    now["messages"][STATUS]["fields"]["99"] = "string more"
    now["messages"][f"{P}More"] = {"fields": {}}
    now["methods"][f"{P}Coordinator/More"] = [STATUS, STATUS]
    assert not breaks(before, now)
