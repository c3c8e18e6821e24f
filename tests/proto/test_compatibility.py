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


CHANGES: dict[str, Callable[[Contract], object]] = {
    "drop": lambda now: now["messages"][STATUS]["fields"].pop("2"),
    "retype": lambda now: now["messages"][STATUS]["fields"].update({"2": "uint64 uptime_s"}),
    "rename": lambda now: now["messages"][STATUS]["fields"].update({"2": "double uptime"}),
    "repeat": lambda now: now["messages"][STATUS]["fields"].update({"2": "repeated double uptime_s"}),
    "drop the message": lambda now: now["messages"].pop(STATUS),
    "drop the method": lambda now: now["methods"].pop(f"{P}Coordinator/Status"),
    "stream": lambda now: now["methods"].update({f"{P}Coordinator/Status": [STATUS, f"stream {STATUS}"]}),
    "renumber": lambda now: now["enums"][f"{P}SlotPhase"].update({"3": "FAILED"}),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("reserved", [False, True])
@pytest.mark.parametrize("more", [0, 1])
def test_what_others_read_cannot_change(change: str, more: int, reserved: bool) -> None:
    """Whatever the protocol's number."""
    before = described()
    now = copy.deepcopy(before)
    now["protocol"] += more
    if reserved:
        now["messages"][STATUS]["reserved"] = [2, "uptime_s"]
    CHANGES[change](now)
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
