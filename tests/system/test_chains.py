"""A state is exact in every generation: saved, resumed, saved and resumed again, compared batch by batch with the run
that was not interrupted. `make loaders` does this for all loaders of other libraries; here are some whose own states
lead elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import third_party
from chains import ENDS, INSIDE, OVER, Chain, compare, plain, whole

from penstock.client import Appliance

STEPS = 64


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
        (third_party.summed, Chain(OVER, lost=True)),  # adds what former launches streamed
        (third_party.shard_per_worker, Chain(ENDS, announced=True, lost=True)),  # restored at an end, it ends no epoch
    ],
    ids=lambda value: getattr(value, "__name__", None) or str(value),
)
def test_chain_equals_uninterrupted(appliance: Appliance, make: Callable[..., Any], chain: Chain) -> None:
    compare(appliance, chain, whole(appliance, make, STEPS), make)


def test_batches_dealt_in_turn_keep_their_order_over_epochs(appliance: Appliance) -> None:
    """19 of them in an epoch, dealt to two workers: their state counts samples, and holds for no other order."""
    alone = third_party.summed()
    assert whole(appliance, third_party.summed, 50) == [plain(batch) for _ in range(3) for batch in alone][:50]
