"""Saved states that somebody else made, with checksums that fit: an error with a name at the load, and not a failure in
some worker's arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.client.states.saved_state import KEY, SavedState, WorkerPart, read
from penstock.proto.errors import StateCorruptError
from penstock.proto.state.codec import decode_state, encode_state
from penstock.proto.state.position import Position
from penstock.worker.loader.restart_points import RestartPoint, StreamPosition


def decoded(data: bytes) -> Any:
    return decode_state(data)


def state() -> dict[str, Any]:
    """Return a state of one box with one worker, at step 3."""
    base = RestartPoint(StreamPosition(0, 3, 3, 12), {"i": 3}, b"rng", digest=7)
    restart = decoded(base.encode())["restart"]
    position = Position.start(1, step=0, epoch=0)
    position.step = 3
    part = WorkerPart(0, 0, 3, 12, 7, restart, {"i": 3})
    return SavedState(3, "m:f", 2, 1, 1, 5, [position], parts=[part]).to_dict()


def changed(**fields: object) -> dict[str, Any]:
    """The same, with other fields in its part."""
    saved = state()
    record = decoded(saved[KEY]["record"])
    record["parts"][0] |= fields
    saved[KEY]["record"] = encode_state(record)
    return saved


NO_COUNTS: list[Any] = [None, -1, 2**64, True, torch.zeros(2)]


@pytest.mark.parametrize("value", NO_COUNTS, ids=str)
def test_counts_of_a_worker_are_numbers(value: object) -> None:
    assert read(changed()).parts[0].digest == 7
    with pytest.raises(StateCorruptError, match="counts of a worker"):
        read(changed(worker_step=value))


@pytest.mark.parametrize("fields", [{"next_epoch": -1}, {"restart": None}, {"more": 1}], ids=str)
def test_a_part_is_what_was_written(fields: dict[str, Any]) -> None:
    with pytest.raises(StateCorruptError, match="the saved state is damaged"):
        read(changed(**fields))


@pytest.mark.parametrize("step", [torch.zeros(2), None, 3.0, 4], ids=str)
def test_a_step_is_a_number(step: object) -> None:
    saved = state()
    saved[KEY]["step"] = step
    with pytest.raises(StateCorruptError, match=r"its entry .* is of step"):
        read(saved)


WRONG: dict[str, list[Any]] = {
    "rng": [None, torch.zeros(2)],
    "digest": NO_COUNTS,
    "at": [[0, 0, 0, -1], [0, 0, 0], 5, torch.zeros(4)],
    "epoch_start": [5, {"rng_before": 5}, {"rng_before": b"", "state": 1}],
    "history": [None, {"abandoned": 5}],
    "skips": [[[0, 0, "x"]], [[0]]],
}
RESTARTS = [{name: value} for name, values in WRONG.items() for value in values]


@pytest.mark.parametrize("fields", RESTARTS, ids=str)
def test_a_restart_point_is_what_was_written(fields: dict[str, Any]) -> None:
    value = decoded(RestartPoint(StreamPosition(0, 3, 3, 12), {"i": 3}, b"rng", digest=7).encode())
    assert RestartPoint.of(value).digest == 7
    value["restart"] |= fields
    with pytest.raises(StateCorruptError, match="a saved state is corrupt"):
        RestartPoint.of(value)
