"""A stream is what it would have been without them, wherever workers are lost, loops break and jobs are restarted: the
real loader code, carried through random lives in this process."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import dealt
import four_methods
import pytest
import third_party
from chains import plain
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.client import DataExecutor, DataLoader
from penstock.client.testing import FakeAppliance, LostWorker
from penstock.proto.errors import EmptyInputError

LOADERS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "shuffled by torch's generator": (third_party.shuffled, {"noisy": True}),
    "shards of ours": (dealt.listed, {"lengths": [5, 2, 7], "batch_size": 2}),
}
ONE_OBJECT_A_LAUNCH: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "four methods, dealt in turn": (four_methods.SummedLoader, {"rows": 28}),
}
MOST = 10
"""Batches of a part of a life."""

parts = st.lists(st.tuples(st.sampled_from(["steps", "epoch"]), st.integers(1, MOST), st.booleans()), max_size=4)
"""Parts of a history: a number of steps, or an epoch that the loop leaves after a number of steps; and True if the job
is restarted afterwards."""


def lived(name: str, life: list[tuple[str, int, bool]], *, restarts: bool, lost: frozenset[int]) -> tuple[Any, Any]:
    """The batches of a life, and the digest at its end."""
    input_fn, kwargs = (LOADERS | ONE_OBJECT_A_LAUNCH)[name]
    faults = [LostWorker(step) for step in sorted(lost)]
    appliance, loader = FakeAppliance(num_workers_per_box=2, seed=7, faults=faults), DataLoader(input_fn, **kwargs)
    got: list[Any] = []
    for kind, count, restarted in [*life, ("steps", 2, False)]:
        left = count
        try:
            for batch in DataExecutor(loader, count if kind == "steps" else None, appliance=appliance):
                got.append(plain(batch))
                left -= 1
                if kind == "epoch" and not left:
                    break
        except EmptyInputError:  # an object that goes on where it was has no batch after a `break` at its last one
            appliance.close()
            return got, "empty"
        if restarts and restarted and kind == "steps":  # an epoch that was left early is closed by the next loop
            state = loader.state_dict()
            appliance.close()
            appliance = FakeAppliance(num_workers_per_box=2, seed=7, faults=faults)
            loader = DataLoader(input_fn, **kwargs)
            loader.load_state_dict(state)
    executor = DataExecutor(loader, 1, appliance=appliance)
    got += map(plain, executor)
    appliance.close()
    return got, executor.digest


@pytest.mark.parametrize("name", [*LOADERS, *ONE_OBJECT_A_LAUNCH])
@settings(max_examples=10)
@given(life=parts, lost=st.frozensets(st.integers(1, 4 * MOST), max_size=4))
def test_a_stream_is_what_it_would_have_been(
    name: str, life: list[tuple[str, int, bool]], lost: frozenset[int]
) -> None:
    """A `break` calls iter() on a launch's one object: a launch between two breaks is another life, as in cstorch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        if name in ONE_OBJECT_A_LAUNCH:
            undisturbed = lived(name, life, restarts=False, lost=frozenset())
            assert lived(name, life, restarts=False, lost=lost) == undisturbed
            life = [("steps", count, restarted) for _, count, restarted in life]
        undisturbed = lived(name, life, restarts=False, lost=frozenset())
        assert lived(name, life, restarts=True, lost=lost) == undisturbed
