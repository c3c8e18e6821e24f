"""A state is exact in every generation: saved, resumed, saved and resumed again, compared batch by batch with the run
that was not interrupted. `make loaders` does this for all loaders of other libraries; here are some whose own states
lead elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import four_methods
import pytest
import streams
import third_party
from chains import ENDS, INSIDE, OVER, Chain, compare, kill_runners, plain, resumed, runners, whole
from neighbours import beside

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.client.testing import FakeAppliance
from penstock.proto.errors import ReplayMismatchError
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
        (third_party.nodes_random, Chain(ENDS)),  # once restored, it draws at another moment
        (third_party.nodes_weighted, Chain(OVER)),  # restored, its next epoch has another length
        (third_party.raises_once_restored, Chain(OVER, lost=True)),
        (four_methods.summed, Chain(OVER, lost=True)),  # adds what former launches streamed
        (four_methods.shard_per_worker, Chain(ENDS, announced=True, lost=True)),  # restored at an end, it ends no epoch
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


@pytest.mark.parametrize(("period", "step"), [(1000, 6), (1, 6), (6, 6), (6, 5), (1000, 0)])
def test_loader_that_begins_again_on_another_topology_is_refused(appliance: Appliance, period: int, step: int) -> None:
    """Unless the run's first batch was due, as where the data have come round, or all batches are the same."""
    with beside(appliance, num_workers_per_box=2) as launch:
        loader = DataLoader(four_methods.OwnRows, period)
        assert len(list(DataExecutor(loader, num_steps=step + 1, appliance=launch))) == step + 1
        state = loader.state_at(step) if step else DataLoader(four_methods.OwnRows, period).state_dict()
    loader = DataLoader(four_methods.OwnRows, period)
    with beside(appliance, num_workers_per_box=3) as launch:
        for strict in (True, False) if step else ():
            loader.load_state_dict(state, strict=strict)
            executor = DataExecutor(loader, num_steps=2, appliance=launch)
            if strict and period == 1000:
                with pytest.raises(ReplayMismatchError, match="begins again with the run's first batch: its deaggr"):
                    next(iter(executor))
            else:
                assert len(list(executor)) == 2


@pytest.mark.filterwarnings("ignore:.*was recovered")
@pytest.mark.parametrize("in_process", [False, True])
def test_runner_is_lost_in_an_epoch_of_which_a_slot_had_no_batch_when_it_was_saved(
    appliance: Appliance, in_process: bool
) -> None:
    """What is compared after the loss counts from the epoch's beginning, and not from the batches before it."""

    def steps(loader: DataLoader, count: int) -> list[Any]:
        return [plain(batch) for batch in islice(loader, count)]

    loader = DataLoader(streams.paced, 0.002)
    with FakeAppliance(num_workers_per_box=2, seed=7) if in_process else beside(appliance, num_workers_per_box=2):
        steps(loader, 3)  # a `break` in epoch 0: each slot has batches of it
        begun = steps(loader, 1)  # one batch of slot 0
        state = encode_state(loader.state_dict())
    with beside(appliance, num_workers_per_box=2):
        loader = DataLoader(streams.paced, 0.002)
        loader.load_state_dict(decode_state(state))  # type: ignore[arg-type]
        before, got = runners(), []
        for batch in islice(loader, 200):
            got.append(plain(batch))
            if len(got) == 6:
                kill_runners(before)
    with FakeAppliance(num_workers_per_box=2):
        assert begun + got == steps(DataLoader(streams.paced, 0.0), 201)


@pytest.mark.filterwarnings("ignore:.*was recovered")
def test_own_worker_processes_live_as_long_as_the_loader(appliance: Appliance) -> None:
    """Over the ends of epochs, a `break`, and the replay for a runner that was killed."""
    alone, loader = four_methods.counted_by_own_workers(), DataLoader(four_methods.counted_by_own_workers)
    ends = (19, 4, 19, 6, 19)
    with beside(appliance, num_workers_per_box=1):
        before = runners()
        for epoch, end in enumerate(ends):
            expected = [plain(batch) for batch in islice(alone, end)]
            got = []
            for batch in loader:
                got.append(plain(batch))
                if len(got) == 2 and epoch == 3:
                    kill_runners(before)
                if len(got) == end:
                    break
            assert got == expected, f"epoch {epoch}"


def test_edited_state_is_followed(appliance: Appliance) -> None:
    """Follow an edited state also after the end of an epoch that other slots have passed and this one has not."""
    loader = DataLoader(four_methods.summed)
    assert len(list(DataExecutor(loader, num_steps=20, appliance=appliance))) == 20
    state = loader.state_dict()
    state["all_streamed"] = 8
    alone = four_methods.summed()
    expected = [plain(batch) for _ in range(2) for batch in alone][2:26]
    assert resumed(appliance, state, 24, four_methods.summed) == expected
