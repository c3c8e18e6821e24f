"""The promise: a run resumed from a state gives, batch by batch, what the uninterrupted run gave.

Every kind of loader is saved mid-epoch, at the last batch of an epoch, between epochs and in the next epoch, and goes
on in a new run with nothing but the state, which crossed a file in between. Variants of a kind share these steps out,
and of those with processes of their own, each run of which costs a second of a core, there are two: every pair of kind,
randomness and processes is in one of the variants. `make loaders` tests more of them.
"""

from __future__ import annotations

import time
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import streams
import torch
from chains import plain, resumed
from neighbours import beside

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.proto.state.codec import decode_state, encode_state
from penstock.worker import current_assignment

PASS = 12
"""Steps of an epoch: two workers of six batches."""
STEPS = 2 * PASS + 3
MID, LAST, NEXT, LATER = ALL = (5, PASS, PASS + 1, PASS + 7)
"""Steps after which a run is saved."""

LOADERS: dict[str, tuple[Any, tuple[Any, ...], tuple[int, ...]]] = {
    "counter": (streams.counter, (6,), (MID, NEXT)),
    "four methods": (streams.shared, (12,), (LAST, LATER)),
    "asks for its step": (streams.asks_where, (12,), (MID, NEXT)),
    "torch, shuffled, noisy": (streams.shuffled, (24, 0, True), ALL),
    "torch, own generator, 2 processes": (streams.own_generator, (False, 2), (MID, NEXT)),
    "stateful, noisy": (streams.stateful, (24, 0, True), ALL),
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


def test_epoch_abandoned_by_workers_far_ahead(appliance: Appliance) -> None:
    loader = DataLoader(streams.short_epochs)
    order = [plain(batch) for batch in DataExecutor(loader, num_steps=200, appliance=appliance)]
    again = DataLoader(streams.short_epochs)
    got = [plain(batch) for batch in DataExecutor(again, num_steps=160, appliance=appliance)]
    got += [plain(batch) for batch in islice(DataExecutor(again, appliance=appliance), 1)]
    rest = [plain(batch) for batch in DataExecutor(again, num_steps=38, appliance=appliance)]
    assert got + rest == order[:161] + order[162:]


def test_empty_slot_on_new_topology_can_be_saved(appliance: Appliance) -> None:
    state, got = None, []
    for workers, steps in ((1, 3), (2, 4), (1, 2)):  # one batch an epoch: the second worker has none
        with beside(appliance, num_workers_per_box=workers) as there:
            loader = DataLoader(streams.shared, 1)
            if state is not None:
                loader.load_state_dict(state)
            got += [batch["number"] for batch in DataExecutor(loader, num_steps=steps, appliance=there)]
            state = loader.state_dict()
    assert got == [0] * 9
    assert state is not None
    assert state["__penstock__"]["step"] == 9


def test_unbuildable_loader_aggregates_remotely(appliance: Appliance) -> None:
    loader = DataLoader(streams.only_on_workers, 30)
    first = [batch["number"] for batch in DataExecutor(loader, num_steps=7, appliance=appliance)]
    state = loader.state_dict()
    assert state["done"] == [4, 3]
    assert len(loader) == 60  # each worker's loader says 30
    again = DataLoader(streams.only_on_workers, 30)
    again.load_state_dict(state)
    assert first + [batch["number"] for batch in DataExecutor(again, appliance=appliance)] == list(range(30))


# Both workers are passes ahead, at the first epoch's middle and end; both are mid-epoch, and have no end in sight.
@pytest.mark.parametrize(("batches", "left_after"), [(8, 15), (3000, 8)])
def test_every_step_after_a_break_can_be_saved(appliance: Appliance, batches: int, left_after: int) -> None:
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


def test_epoch_without_a_slots_batch_is_abandoned(appliance: Appliance) -> None:
    """A loader that begins an epoch in its first next() would go on with the one before, if restored from this one's
    origin."""
    loader = DataLoader(streams.fresh, 40)
    got: list[list[int]] = []
    for take in (65, 1, 4):
        got = []
        for batch in DataExecutor(loader, appliance=appliance):
            got.append(batch.tolist()[:2])
            if len(got) == take:
                time.sleep(0.5)  # the runners are ahead now, by as much as there is room for
                break
    assert got == [[1, 2], [1001, 2], [2, 2], [1002, 2]]


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


def test_unnamed_code_goes_by_value_locally(appliance: Appliance, tmp_path: Path) -> None:
    (tmp_path / "numbers").write_text("3 4 5 6 7")
    times = 10

    def read(scale: Any, path: Path) -> list[torch.Tensor]:
        mine = path.read_text().split()[current_assignment().slot :: 2]
        return [torch.tensor([scale(int(word))]) for word in mine]

    def loader() -> DataLoader:
        return DataLoader(partial(read, lambda number: times * number), path=tmp_path / "numbers")

    first, again = loader(), loader()
    numbers = [int(batch) for batch in DataExecutor(first, num_steps=3, appliance=appliance)]
    again.load_state_dict(first.state_dict())
    numbers += [int(batch) for batch in DataExecutor(again, appliance=appliance)]
    assert numbers == [30, 40, 50, 60, 70]
