"""The promise: a run resumed from a state gives, batch by batch, what the uninterrupted run gave.

Two kinds of loaders are saved mid-epoch, at the last batch of an epoch, between epochs and in the next epoch, and go on
in a new run with nothing but the state. Others are in tests/model and test_appliance_contract.py; `make loaders` tests
more of them.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import streams
from chains import plain, resumed

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.proto.state.codec import decode_state, encode_state

PASS = 12
"""Steps of an epoch: two workers of six batches."""
STEPS = 2 * PASS + 3
MID, LAST, NEXT, LATER = (5, PASS, PASS + 1, PASS + 7)
"""Steps after which a run is saved."""

LOADERS: dict[str, tuple[Any, tuple[Any, ...], tuple[int, ...]]] = {
    "asks for its step": (streams.asks_where, (12,), (MID, NEXT)),
    "stateful, 2 processes, noisy": (streams.stateful, (24, 2, True), (LAST, LATER)),
}


@pytest.mark.parametrize("name", LOADERS)
def test_resumed_equals_uninterrupted(appliance: Appliance, name: str) -> None:
    input_fn, arguments, saved_at = LOADERS[name]
    loader = DataLoader(input_fn, *arguments)
    states: dict[int, bytes] = {}
    whole: list[Any] = []
    executor = DataExecutor(loader, num_steps=STEPS, checkpoint_steps=5, appliance=appliance)
    for batch in executor:
        whole.append(plain(batch))
        if executor.step in saved_at:
            states[executor.step] = encode_state(loader.state_dict())
    assert len(whole) == STEPS
    for step, state in states.items():
        again = DataLoader(input_fn, *arguments)
        again.load_state_dict(decode_state(state))  # type: ignore[arg-type]
        rest = DataExecutor(again, num_steps=STEPS - step, appliance=appliance)
        assert [plain(batch) for batch in rest] == whole[step:], f"saved at step {step}"
        assert rest.step == STEPS
        assert rest.digest == executor.digest


def test_unbuildable_loader_aggregates_remotely(appliance: Appliance) -> None:
    loader = DataLoader(streams.only_on_workers, 30)
    first = [batch["number"] for batch in DataExecutor(loader, num_steps=7, appliance=appliance)]
    state = loader.state_dict()
    assert state["done"] == [4, 3]
    assert len(loader) == 60  # each worker's loader says 30
    again = DataLoader(streams.only_on_workers, 30)
    again.load_state_dict(state)
    assert first + [batch["number"] for batch in DataExecutor(again, appliance=appliance)] == list(range(30))


def test_every_step_after_a_break_can_be_saved(appliance: Appliance) -> None:
    """Both workers are passes ahead."""
    batches, left_after = 8, 15
    loader = DataLoader(streams.fresh, batches)
    list(islice(DataExecutor(loader, appliance=appliance), left_after))
    assert loader.state_dict()
    executor = DataExecutor(loader, num_steps=6, appliance=appliance)
    got, states = [], []
    for batch in executor:
        got.append(batch.tolist())
        states.append(loader.state_dict())
    assert [epoch for _, epoch, _ in got] == [1] * 6
    assert [number % 1000 for number, _, _ in got] == [1, 1, 2, 2, 3, 3]
    assert resumed(appliance, states[2], 3, streams.fresh, batches) == got[3:]


def test_break_replays_nothing_without_states(appliance: Appliance) -> None:
    loader = DataLoader(streams.queue)
    list(islice(DataExecutor(loader, appliance=appliance), 6))
    second = [int(batch) for batch in DataExecutor(loader, appliance=appliance)]
    assert len(second) == 200
    assert second[0::2] == list(range(second[0], second[0] + 100))


def test_handmade_state_resumes_with_records(appliance: Appliance) -> None:
    loader = DataLoader(streams.asks_where)
    loader.load_state_dict({"start": 12, "done": [3, 2, 1]})  # of three workers, elsewhere
    executor = DataExecutor(loader, num_steps=5, checkpoint_steps=[5], appliance=appliance)
    assert [batch["number"] for batch in executor] == [18, 19, 20, 21, 22]
    first, second = loader.checkpoints()
    assert (first.global_worker_id, first.total_num_workers, first.appliance_step) == (0, 2, 5)
    assert first.user_state_dict == {"start": 18, "done": 3, "step": 5, "worker_step": 3}
    assert second.user_state_dict == {"start": 18, "done": 2, "step": 5, "worker_step": 2}
    assert [(c.worker_step, c.samples_streamed) for c in (first, second)] == [(3, 12), (2, 8)]
    state = loader.state_dict()
    again = DataLoader(streams.asks_where)
    again.load_state_dict(state)
    numbers = [batch["number"] for batch in DataExecutor(again, num_steps=3, appliance=appliance)]
    assert numbers == [23, 24, 25]
    assert [(c.appliance_step, c.worker_step, c.lifetime_worker_step) for c in again.checkpoints()] == [
        (3, 1, 4),
        (3, 2, 4),
    ]
