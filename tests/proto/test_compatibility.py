"""The .proto files keep what they promised, and the check that holds them to it sees each way to break it."""

from __future__ import annotations

import copy
import json

from wire_contract import BASELINE, breaks, described, public

P = "penstock.proto.v1."
STATUS, HELLO = f"{P}StatusReply", f"{P}Hello"


def test_programs_built_on_the_baseline_work() -> None:
    assert not breaks(json.loads(BASELINE.read_text()), described()), (
        "reserve what goes, leave what others read, or change the protocol's number; then `make proto-baseline`"
    )


def test_what_is_read_reaches_from_the_calls_down() -> None:
    assert {f"{P}StatePart", f"{P}BoxPosition", f"{P}SlotPhase"} <= public(described())
    assert HELLO not in public(described())


def test_what_others_read_cannot_change() -> None:
    before = described()
    now = copy.deepcopy(before)
    now["messages"][STATUS]["fields"]["99"] = "string more"
    assert not breaks(before, now)
    now["messages"][STATUS]["fields"]["2"] = "uint64 uptime_s"
    assert len(breaks(before, now)) == 1
