"""DataLoader.set_epoch(k), as the Trainer and Accelerate call it: a pure loader makes epoch k, through all that may
happen to its runners and to the job."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import labelled
import pytest
import torch
from chains import kill_runners, runners

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.client.testing import FakeAppliance
from penstock.proto.state.codec import decode_state, encode_state

LABELS = (0, 5, 5, 2)
EPOCH = 2 * labelled.BATCHES
"""Batches of the box in an epoch."""

pytestmark = pytest.mark.filterwarnings("ignore:.*(was recovered|drains|was moved)")


@pytest.fixture(scope="module")
def epochs() -> list[list[Any]]:
    """Epochs 0 to 8 of a job that does not call set_epoch."""
    with FakeAppliance(num_workers_per_box=2, seed=7, replay=True) as fake:
        taken = list(DataExecutor(DataLoader(labelled.labelled), num_steps=9 * EPOCH, appliance=fake))
    found = [taken[start : start + EPOCH] for start in range(0, len(taken), EPOCH)]
    assert all({batch[0] for batch in epoch} == {batch[1] for batch in epoch} == {k} for k, epoch in enumerate(found))
    return found


def train(
    loader: DataLoader,
    appliance: Appliance,
    labels: tuple[int, ...] = LABELS,
    act: Callable[[int], None] = lambda step: None,
) -> list[Any]:
    """A Trainer's loop. act: called after each step."""
    taken = []
    for label in labels:
        loader.set_epoch(label)
        for batch in DataExecutor(loader, appliance=appliance):
            taken.append(batch)
            act(loader.step)
    return taken


def at(epochs: list[list[Any]], *labels: int) -> list[Any]:
    return [batch for label in labels for batch in epochs[label]]


def test_an_epoch_counts_on_and_a_break_takes_the_next_number(appliance: Appliance, epochs: list[list[Any]]) -> None:
    loader = DataLoader(labelled.labelled)
    for asked, label in ((None, 0), (4, 4), (None, 5), (1, 1)):
        if asked is not None:
            loader.set_epoch(asked)
        batches = iter(DataExecutor(loader, appliance=appliance))
        assert [next(batches) for _ in range(3)] == epochs[label][:3]
        batches.close()  # type: ignore[attr-defined]


def test_an_open_epoch_keeps_its_number(
    appliance: Appliance, epochs: list[list[Any]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "penstock.client")
    loader = DataLoader(labelled.labelled)
    assert list(DataExecutor(loader, num_steps=5, appliance=appliance)) == epochs[0][:5]  # has opened later ones too
    loader.set_epoch(3)
    assert list(DataExecutor(loader, num_steps=EPOCH, appliance=appliance)) == at(epochs, 0, 1)[5 : 5 + EPOCH]
    assert caplog.text.count("set_epoch(3) has no effect: the loop is in epoch 0, which had been opened before") == 1
    vouched = DataLoader(torch.utils.data.TensorDataset(torch.arange(8)), batch_size=2)
    vouched.set_epoch(4)
    assert next(iter(DataExecutor(vouched, appliance=appliance))) is not None
    assert caplog.text.count("set_epoch(4) has no effect: the loop is in epoch 0, which is counted from") == 1


def test_a_lost_runner_makes_the_same_epoch_again(appliance: Appliance, epochs: list[list[Any]]) -> None:
    before, step = runners(), 2 * EPOCH + 2
    loader = DataLoader(labelled.labelled)
    assert train(loader, appliance, act=lambda now: kill_runners(before) if now == step else None) == at(
        epochs, *LABELS
    )
    assert loader._session is not None
    assert loader._session.stats().recoveries


@pytest.mark.parametrize(("make", "where"), [(labelled.aggregated, "here"), (labelled.labelled, "runners")])
def test_a_resume_continues_with_the_same_numbers(
    appliance: Appliance,
    epochs: list[list[Any]],
    make: Callable[[], Any],
    where: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "penstock.client")
    with FakeAppliance(num_workers_per_box=2, seed=7, replay=True) as fake:
        on = appliance if where == "runners" else fake
        states: dict[int, bytes] = {}
        loader = DataLoader(make)

        def save(step: int) -> None:
            if step in (EPOCH + 20, 2 * EPOCH):
                states[step] = encode_state(loader.state_dict())

        whole = train(loader, on, act=save)
        assert whole == at(epochs, *LABELS)
        loader.close()
        for step, state in states.items():
            saved: Any = decode_state(state)
            # without set_epoch the numbers count on from that of the saved epoch
            resumed = DataLoader(make)
            resumed.load_state_dict(saved)
            number = LABELS[(step - 1) // EPOCH]
            expected = at(epochs, number, number + 1, number + 2)[(step - 1) % EPOCH + 1 :][:EPOCH]
            assert list(DataExecutor(resumed, num_steps=EPOCH, appliance=on)) == expected, step
            resumed.close()
            # the Trainer's loop goes on, from the epoch that was saved or the next
            resumed = DataLoader(make)
            resumed.load_state_dict(saved)
            assert train(resumed, on, LABELS[step // EPOCH :]) == whole[step:], step
            resumed.close()
        assert "has no effect" not in caplog.text
        resumed = DataLoader(make)
        resumed.load_state_dict(decode_state(states[EPOCH + 20]))  # type: ignore[arg-type]
        assert train(resumed, on, (7, 2)) == at(epochs, 5, 2)[20:]
        assert caplog.text.count("set_epoch(7) has no effect: the loop is in epoch 5") == 1
