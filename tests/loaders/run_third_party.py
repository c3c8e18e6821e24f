"""Loaders of other libraries, saved and resumed through three generations: `make loaders` runs this, in minutes.

Each is saved within its first epoch, over the ends of epochs, and just there, at announced steps and at others, with
and without a runner that is lost in each launch; every batch is compared with that of a run without all this.
A loader whose library is not installed is skipped. Some of it runs in each test run: tests/system/test_chains.py.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import four_methods
import pytest
import third_party
from chains import ENDS, INSIDE, OVER, Chain, compare, whole

from penstock.client import Appliance

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore:.*was recovered")]

STEPS = 80
MAKERS: list[tuple[str, Callable[..., Any], list[tuple[Any, ...]]]] = [
    ("torchdata", third_party.shuffled, [(0,), (2,), (0, True), (2, True)]),
    ("torchdata", third_party.random_sampler, [(0,), (2,), (0, True), (2, True)]),
    ("torchdata", third_party.weighted_sampler, [(0,), (2,), (0, True), (2, True)]),
    ("torchdata", third_party.distributed_sampler, [(0,), (2,)]),
    ("torchdata", third_party.stream, [(0,), (2,), (0, True), (2, True)]),
    ("torchdata", third_party.saved_stream, [(0,), (2,), (0, True), (2, True)]),
    ("torchdata", third_party.shuffled_stream, [(0,), (2,)]),
    ("torchdata", third_party.rare_snapshots, [()]),
    ("torchdata", third_party.prefetched_out_of_order, [()]),
    ("torchdata", third_party.nodes_random, [()]),
    ("torchdata", third_party.nodes_random_own, [()]),
    ("torchdata", third_party.nodes_saved_iterable, [()]),
    ("torchdata", third_party.nodes_weighted, [()]),
    ("torchdata", third_party.nodes_parallel, [()]),
    ("torchdata", third_party.nodes_no_restart, [()]),
    ("torch", four_methods.summed, [()]),
    ("torch", four_methods.shard_per_worker, [()]),
    ("torch", third_party.begins_where_it_was, [()]),
    ("torch", third_party.raises_once_restored, [()]),
    ("datasets", third_party.hf_map, [(0,)]),
    ("datasets", third_party.hf_iterable_shuffled, [()]),
    ("datasets", third_party.hf_iterable_stateful, [(0,), (2,), (0, True), (2, True)]),
    ("webdataset", third_party.webdataset_shuffled, [()]),
    ("webdataset", third_party.webdataset_loader, [(0,), (2,)]),
    ("grain", third_party.grain_loader, [(0,)]),
    ("grain", third_party.grain_dataset, [()]),
    ("grain", third_party.grain_saved, [()]),
    ("grain", third_party.grain_loader_saved, [()]),
    ("litdata", third_party.litdata_loader, [(0,), (2,)]),
]
"""Library, input_fn, and arguments."""
LOADERS = {
    " ".join([make.__name__, *map(str, arguments)]): (library, make, arguments)
    for library, make, several in MAKERS
    for arguments in several
}
CHAINS = [
    Chain(saves, announced, lost)
    for saves in (INSIDE, OVER, ENDS)
    for announced in (False, True)
    for lost in (False, True)
]


@pytest.fixture(scope="session")
def appliance() -> Iterator[Appliance]:
    third_party.prepare()
    with Appliance(num_workers_per_box=2, seed=7, timeout_s=120, replay=True) as opened:
        yield opened


@cache
def uninterrupted(appliance: Appliance, name: str) -> list[Any]:
    _, make, arguments = LOADERS[name]
    return whole(appliance, make, STEPS, *arguments)


@pytest.mark.parametrize("chain", CHAINS, ids=str)
@pytest.mark.parametrize("name", LOADERS)
def test_chain_equals_uninterrupted(appliance: Appliance, name: str, chain: Chain) -> None:
    library, make, arguments = LOADERS[name]
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed: `make loaders` does that")
    compare(appliance, chain, uninterrupted(appliance, name), make, *arguments)
