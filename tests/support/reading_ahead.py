"""Comparison of a loop that gets its batches through something that reads ahead with a plain loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import streams

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.client.states.saved_state import read

__all__ = ["PASS", "STEPS", "WHOLE", "ahead_by", "following", "place_of", "places"]

PASS = 6
"""Steps of an epoch: two workers of three batches each."""
STEPS = 2 * PASS + 2
WHOLE = [1, 1001, 2, 1002, 3, 1003] * 3
"""The numbers of the batches, step by step."""


def places(appliance: Appliance, input_fn: Any = streams.counter) -> dict[int, Any]:
    """step -> where a plain loop's state stands."""
    loader = DataLoader(input_fn, PASS // 2)
    executor = DataExecutor(loader, num_steps=STEPS, appliance=appliance)
    return dict(enumerate((place_of(loader.state_dict()) for _ in executor), 1))


def place_of(state: dict[str, Any]) -> Any:
    """The step, and for each box the epoch, whose turn it is, and how much each worker has delivered."""
    saved = read(state)
    return saved.step, [(at.epoch, at.live, at.cursor, at.delivered, at.total) for at in saved.positions]


def following(state: dict[str, Any], count: int, appliance: Appliance, input_fn: Any = streams.counter) -> list[int]:
    """The numbers of the batches that come when a new run is resumed from this state."""
    loader = DataLoader(input_fn, PASS // 2)
    loader.load_state_dict(state)
    batches = iter(DataExecutor(loader, num_steps=count, appliance=appliance))
    return [int(batch["number"]) for batch in islice(batches, count)]


def ahead_by(count: int, batches: Iterable[Any]) -> Iterator[Any]:
    """Takes so many batches before it hands out the one before them."""
    taken: deque[Any] = deque()
    for batch in batches:
        taken.append(batch)
        if len(taken) > count:
            yield taken.popleft()
    yield from taken
