"""States of real generators, optimizers, modules and loaders: they continue from their envelope as from themselves."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from round_trips import fingerprint, same
from torchdata.stateful_dataloader import StatefulDataLoader

from penstock.proto.state.codec import decode_state, encode_state


def test_states_of_random_generators() -> None:
    random.gauss(0, 1)
    np.random.normal()
    same([random.getstate(), np.random.get_state(), np.random.get_state(legacy=False), torch.get_rng_state()])
    for generator in (np.random.PCG64, np.random.MT19937, np.random.Philox, np.random.SFC64, np.random.PCG64DXSM):
        rng = np.random.Generator(generator(7))
        rng.random(3, np.float32)
        state = same(rng.bit_generator.state)
        expected = rng.random(5)
        other = np.random.Generator(generator(8))
        other.bit_generator.state = state
        assert np.array_equal(other.random(5), expected)


OPTIMIZERS = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.AdamW, {"betas": (0.8, 0.9)}),
    (torch.optim.Adagrad, {}),
    (torch.optim.RMSprop, {"centered": True}),
    (torch.optim.LBFGS, {}),
    (torch.optim.Rprop, {}),
    (torch.optim.NAdam, {}),
]


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS, ids=lambda x: getattr(x, "__name__", ""))
def test_states_of_optimizers(kind: Any, options: dict[str, Any]) -> None:
    def train(model: torch.nn.Module, optimizer: Any, steps: int) -> None:
        for _ in range(steps):

            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss: torch.Tensor = model(torch.ones(2, 3)).square().sum()
                loss.backward()  # type: ignore[no-untyped-call]
                return loss

            optimizer.step(closure)

    model = torch.nn.Linear(3, 2)
    optimizer = kind(model.parameters(), **options)
    train(model, optimizer, 3)
    model_state, optimizer_state = same(model.state_dict()), same(optimizer.state_dict())
    train(model, optimizer, 3)
    twin = torch.nn.Linear(3, 2)
    twin.load_state_dict(model_state)
    twin_optimizer = kind(twin.parameters(), **options)
    twin_optimizer.load_state_dict(optimizer_state)
    train(twin, twin_optimizer, 3)
    assert fingerprint(twin.state_dict()) == fingerprint(model.state_dict())


def test_states_of_modules_keep_their_metadata() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 2), torch.nn.BatchNorm2d(4), torch.nn.LSTM(4, 4)).bfloat16()
    back = same(model.state_dict())
    assert back._metadata["1"] == {"version": 2}
    model.load_state_dict(back)


class Indices:
    """Map-style dataset with a state of its own."""

    def __init__(self) -> None:
        self.calls = 0

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple[int, int]:
        self.calls += 1
        return index, self.calls

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls, "note": b"\0\xff", "nested": {"by": {(0, 1): None}}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["note"] == b"\0\xff"
        assert state["nested"] == {"by": {(0, 1): None}}
        self.calls = state["calls"]


class Draws(torch.utils.data.IterableDataset[tuple[int, float, int]]):
    """Iterable dataset whose samples come from generators that are part of its state."""

    def __init__(self) -> None:
        self.position = 0
        self.rng = np.random.default_rng(3)
        self.python = random.Random(4)
        self.seen = torch.zeros(4, dtype=torch.int64)

    def __iter__(self) -> Iterator[tuple[int, float, int]]:
        info = torch.utils.data.get_worker_info()
        while self.position < 24:
            self.position += 1
            self.seen[self.position % 4] += 1
            yield (
                self.position + 1000 * (info.id if info else 0),
                self.rng.random() + self.python.random(),
                int(self.seen.prod()),
            )
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "position": self.position,
            "rng": self.rng.bit_generator.state,
            "python": self.python.getstate(),
            "seen": self.seen.clone(),  # torch would share the tensor itself between the processes, and it would change
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]
        self.rng.bit_generator.state = state["rng"]
        self.python.setstate(state["python"])
        self.seen = state["seen"]


@pytest.mark.parametrize("dataset", [Indices, Draws])
@pytest.mark.parametrize(("num_workers", "at"), [(0, 0), (0, 1), (0, 4), (0, 7), (2, 0), (2, 5)])
def test_stateful_dataloader_resumes_from_decoded(num_workers: int, dataset: Any, at: int) -> None:
    def build() -> StatefulDataLoader[Any]:
        options: dict[str, Any] = {} if dataset is Draws else {"shuffle": True}
        generator = torch.Generator().manual_seed(5)
        return StatefulDataLoader(dataset(), batch_size=3, num_workers=num_workers, generator=generator, **options)

    loader = build()
    batches = iter(loader)
    for _ in range(at):
        next(batches)
    state = loader.state_dict()
    data = encode_state(state)
    assert fingerprint(decode_state(data)) == fingerprint(state)
    expected = [fingerprint(batch) for batch in batches]  # the loader moves on; what was encoded does not
    assert expected
    resumed = build()
    resumed.load_state_dict(decode_state(data))
    assert [fingerprint(batch) for batch in resumed] == expected
