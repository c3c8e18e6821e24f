"""A state is exact in every generation: saved, resumed, saved and resumed again, compared batch by batch with the run
that was not interrupted. `make loaders` does this for all loaders of other libraries; here are some whose own states
lead elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import four_methods
import pytest
import streams
import third_party
from chains import ENDS, INSIDE, OVER, Chain, compare, plain, resumed, whole
from neighbours import beside

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.client.testing import FakeAppliance
from penstock.proto.state.codec import decode_state, encode_state

STEPS = 64


def uninterrupted(make: Callable[..., Any], steps: int, **options: Any) -> list[Any]:
    """The run without a save, in this process: test_appliance_contract.py shows that it is the same."""
    with FakeAppliance(num_workers_per_box=2, seed=7, replay=True) as fake:
        return whole(fake, make, steps, **options)


@pytest.mark.filterwarnings("ignore:.*was recovered")
@pytest.mark.parametrize(
    ("make", "chain"),
    [
        (third_party.stream, Chain(OVER, lost=True)),  # torchdata counts its fast-forward twice
        (third_party.shuffled_stream, Chain(INSIDE)),  # a generator that no state holds
        (third_party.weighted_sampler, Chain(ENDS, announced=True)),
        (third_party.nodes_random, Chain(ENDS)),  # once restored, it draws at another moment
        (third_party.nodes_weighted, Chain(OVER)),  # restored, its next epoch has another length
        (third_party.begins_where_it_was, Chain(OVER, lost=True)),
        (third_party.raises_once_restored, Chain(OVER, lost=True)),
        (third_party.never_the_same, Chain(OVER, lost=True)),
        (four_methods.summed, Chain(OVER, lost=True)),  # adds what former launches streamed
        (four_methods.shard_per_worker, Chain(ENDS, announced=True, lost=True)),  # restored at an end, it ends no epoch
        (four_methods.resuming, Chain((9, 14, 27))),  # starts epochs where it was resumed: its states fit their shape
        (streams.generator, Chain(INSIDE)),  # made again from the beginning
    ],
    ids=lambda value: getattr(value, "__name__", None) or str(value),
)
def test_chain_equals_uninterrupted(appliance: Appliance, make: Callable[..., Any], chain: Chain) -> None:
    compare(appliance, chain, uninterrupted(make, STEPS), make)


@pytest.mark.parametrize("announced", [False, True])
@pytest.mark.parametrize(
    "launches",
    [
        # From steps that no number of workers divides, and over the end of an epoch in a launch that was resumed in it.
        [(2, 9), (2, 25), (3, 44), (3, 50), (2, 60)],
        [(2, 19), (2, 38), (2, 45)],  # from ends of epochs
    ],
    ids=lambda value: "-".join(f"{workers}x{stop}" for workers, stop in value) if isinstance(value, list) else None,
)
def test_resumed_states_fit_other_worker_numbers(
    appliance: Appliance, launches: list[tuple[int, int]], announced: bool
) -> None:
    """Add the counts of a launch to those of the launches before it: nothing is lost, and nothing comes twice."""
    alone = four_methods.summed()
    expected = [plain(batch) for _ in range(4) for batch in alone]
    state, start = None, 0
    for workers, stop in launches:
        with beside(appliance, num_workers_per_box=workers) as launch:
            loader = DataLoader(four_methods.summed)
            if state is not None:
                loader.load_state_dict(decode_state(state))  # type: ignore[arg-type]
            steps = [stop] if announced else None
            executor = DataExecutor(loader, num_steps=stop - start, checkpoint_steps=steps, appliance=launch)
            assert [plain(batch) for batch in executor] == expected[start:stop], f"from step {start} to {stop}"
            state, start = encode_state(loader.state_dict()), stop


def test_edited_state_is_followed(appliance: Appliance) -> None:
    """Follow an edited state also after the end of an epoch that other slots have passed and this one has not."""
    loader = DataLoader(four_methods.summed)
    assert len(list(DataExecutor(loader, num_steps=20, appliance=appliance))) == 20
    state = loader.state_dict()
    state["all_streamed"] = 8
    alone = four_methods.summed()
    expected = [plain(batch) for _ in range(2) for batch in alone][2:26]
    assert resumed(appliance, state, 24, four_methods.summed) == expected


def test_launch_over_many_epochs_is_saved(appliance: Appliance) -> None:
    """Each end is got over once: what is made twice at each would be made 2 ** 20 times in all."""
    expected = uninterrupted(four_methods.shard_per_worker, 84, rows=8)
    loader, start = DataLoader(four_methods.shard_per_worker, rows=8), 0
    for stop in (8, 16, 84):
        if start:
            state = loader.state_dict()
            loader = DataLoader(four_methods.shard_per_worker, rows=8)
            loader.load_state_dict(state)
        executor = DataExecutor(loader, num_steps=stop - start, appliance=appliance)
        assert [plain(batch) for batch in executor] == expected[start:stop]
        start = stop
    loader.state_dict()
