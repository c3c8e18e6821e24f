"""A saved state, built and read without any process; good ones, and every kind that is refused."""

from __future__ import annotations

import copy
import io
import pickle
from collections import OrderedDict
from dataclasses import replace
from typing import Any

import pytest
import torch

from penstock.client.states.saved_state import FORMAT, KEY, STATE, SavedState, WorkerPart, read
from penstock.proto.errors import StateCorruptError, StateMismatchError, StateVersionError, UnsupportedStateError
from penstock.proto.state.codec import decode_state, encode_state
from penstock.proto.state.position import Position


def make(methods: int = 4, *, boxes: int = 2, workers: int = 2, step: int = 5, aggregated: Any = None) -> SavedState:
    saved = SavedState(step, "streams:counter", methods, boxes, workers, 7)
    for box in range(boxes):
        position = Position.start(workers)
        for _ in range(step):
            position.deliver()
        saved.positions.append(position)
        for slot in range(workers):
            user = {"done": slot} if methods == 2 else None
            saved.parts.append(
                WorkerPart(
                    box, slot, position.total[slot], 8, 99, {"at": [0, 1, 1, 4], "rng": b"r", "of": [box, slot]}, user
                )
            )
    saved.aggregated = {"done": [3, 2]} if aggregated is None and methods == 4 else aggregated
    return saved


def through_a_file(value: Any) -> Any:
    """Return a state after it was written to a checkpoint and read back."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_a_state_prints_as_a_line_and_is_a_dict_to_others() -> None:
    state = SavedState(0, "streams:counter", 4, 0, 0, 7, aggregated={"table": list(range(9999))}).to_dict()
    shown = "[<State of streams:counter, step 0; dict() of it shows its 2 items>]"
    assert repr([copy.deepcopy(state)]) == repr([state]) == shown
    for back in (through_a_file(state), pickle.loads(pickle.dumps(state)), decode_state(encode_state(state))):
        assert back == state
        assert type(back) in (dict, OrderedDict)
        assert read(back).aggregated == {"table": state["table"]}


@pytest.mark.parametrize("methods", [0, 2, 4])
def test_what_is_saved_is_read(methods: int) -> None:
    saved = make(methods)
    assert read(through_a_file(saved.to_dict())) == saved


@pytest.mark.parametrize("aggregated", [{"a": 1, STATE: 2}, [1, 2], torch.tensor(3), 17, {}])
def test_any_aggregated_state_comes_back(aggregated: Any) -> None:
    value = make(aggregated=aggregated).to_dict()
    if isinstance(aggregated, dict):
        assert {key: item for key, item in value.items() if key != KEY} == aggregated
    else:
        assert value.keys() == {STATE, KEY}
    assert read(value).aggregated == aggregated


def test_the_reserved_key_is_ours() -> None:
    with pytest.raises(StateMismatchError, match=": rename it"):
        make(aggregated={KEY: 1}).to_dict()


def test_unrestorable_state_is_refused_at_save() -> None:
    with pytest.raises(UnsupportedStateError):
        make(aggregated={"x": object()}).to_dict()


# ---- starting from it


def test_same_topology_keeps_slots_and_positions() -> None:
    saved = make(2)
    for box in (0, 1):
        start = saved.start(box, 2, 2, strict=False)
        assert start.same_topology
        assert Position.from_proto(start.position) == saved.positions[box]
        parts = {part.slot: part for part in saved.parts if part.box == box}
        slots = {
            slot: {
                "user": part.user,
                "restart": part.restart,
                "digest": part.digest,
                "next_digest": part.next_digest,
                "next_epoch": False,
                "chain": 0,
                "samples": part.samples,
                "changed": False,
            }
            for slot, part in parts.items()
        }
        assert decode_state(start.blob) == {"aggregated": None, "strict": False, "slots": slots}


def test_chains_of_slots_go_on() -> None:
    saved = make(2)
    saved.parts = [replace(part, chain=7 + part.slot) for part in saved.parts]
    assert [slot.chain for slot in saved.start(1, 2, 2, strict=True).position.slots] == [7, 8]


def test_user_changed_state_is_reported() -> None:
    value = make(4).to_dict()
    assert not read(value).is_changed
    value["done"] = [1, 1]
    assert read(value).is_changed


def test_four_methods_keep_step_on_new_topology() -> None:
    start = make(4).start(0, 1, 3, strict=True)
    assert not start.same_topology
    assert (start.position.step, list(start.position.live), len(start.position.slots)) == (5, [0, 1, 2], 3)
    blob: Any = decode_state(start.blob)
    records = blob.pop("records")
    assert blob == {"aggregated": {"done": [3, 2]}, "strict": True, "slots": {}}
    assert [record["place"] for record in records.values()] == [[0, 0, 2, 2], [0, 1, 2, 2], [1, 0, 2, 2]]


@pytest.mark.parametrize("methods", [0, 2, 4])
def test_state_before_the_first_step_fits_any(methods: int) -> None:
    aggregated: Any = {} if methods == 4 else None
    saved = read(SavedState(0, "streams:counter", methods, 0, 0, None, aggregated=aggregated).to_dict())
    start = saved.start(2, 3, 4, strict=True)
    assert start.position.step == 0
    assert len(start.position.slots) == 4
    assert bool(start.blob) == (methods == 4)


# ---- what is refused


@pytest.mark.parametrize("value", [None, 3, {}, {"model": 1}, []])
def test_no_state_of_ours(value: Any) -> None:
    with pytest.raises(StateMismatchError, match=r"must be one that DataLoader\.state_dict"):
        read(value)


def test_a_newer_version_is_named() -> None:
    value = make().to_dict()
    value[KEY]["format"] = FORMAT + 1
    with pytest.raises(StateVersionError, match=f"must be {FORMAT}, got {FORMAT + 1}: load it"):
        read(value)


def damaged() -> dict[str, Any]:
    good = make().to_dict()
    record = good[KEY]["record"]
    inner: Any = decode_state(record)
    cases: dict[str, Any] = {
        "a flipped bit": record[: len(record) // 2]
        + bytes([record[len(record) // 2] ^ 1])
        + record[len(record) // 2 + 1 :],
        "a missing field": encode_state({key: item for key, item in inner.items() if key != "seed"}),
        "a missing worker": encode_state({**inner, "parts": inner["parts"][:-1]}),
        "a position that cannot be": encode_state({**inner, "positions": [b"", b""]}),
    }
    return {name: {**good, KEY: {**good[KEY], "record": case}} for name, case in cases.items()} | {
        "another step": {**good, KEY: {**good[KEY], "step": 6}},
        "bytes for a key": {**good, KEY: b"x"},
        "a lost state": {KEY: make(aggregated=3).to_dict()[KEY]},
    }


@pytest.mark.parametrize("name", damaged())
def test_damage_is_found(name: str) -> None:
    value = damaged()[name]
    before = copy.deepcopy(value)
    with pytest.raises(StateCorruptError):
        read(value)
    assert value == before
