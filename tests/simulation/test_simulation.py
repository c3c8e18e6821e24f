"""The coordinator's promises, over many histories that a seed decides; `make simulate` plays thousands."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from simulated.mutations import MUTATIONS, Mutation, applied
from simulated.scenario import simulate
from simulated.truth import PROMISES

SEEDS = 50
"""Histories: a second of a core plays eleven. Most mutations survive fewer; `make simulate` plays thousands."""
GROUPS = 2
"""Groups of seeds, one test each, in which every kind of fault happens; a failure names its seed."""
CAUGHT_WITHIN = 60
"""Seeds that a mutation may survive."""


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    log = logging.getLogger("penstock.appliance")
    before = log.level
    log.setLevel(logging.CRITICAL)  # full disks are ours
    yield
    log.setLevel(before)


@pytest.mark.parametrize("group", range(GROUPS))
def test_every_promise_is_kept(group: int) -> None:
    faults: Counter[str] = Counter()
    deliveries = saves = 0
    for seed in range(group, SEEDS, GROUPS):
        outcome = simulate(seed)
        assert not outcome.broken, f"make simulate SEED={seed}: {outcome.broken}"
        faults.update(outcome.faults)
        deliveries += outcome.deliveries
        saves += outcome.saves
    assert deliveries > 500
    assert saves >= 20
    assert {"worker killed", "coordinator killed", "crash before the sync", "crash after the sync"} <= set(faults)
    assert {"message lost", "message doubled", "message slow", "link cut one way", "disk full"} <= set(faults)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_is_caught(mutation: Mutation, record_property: Callable[[str, object], None]) -> None:
    with applied(mutation):
        for seed in (mutation.seed, *range(CAUGHT_WITHIN)):
            broken = simulate(seed).broken
            if broken:
                promise = broken.partition(":")[0]
                record_property("caught", f"seed {seed}: {promise}")
                assert promise in PROMISES
                return
    pytest.fail(f"{CAUGHT_WITHIN} seeds did not see that {mutation.name}")


ANEW = """
import sys, types
import penstock.proto
sys.modules["penstock.client"] = package = types.ModuleType("penstock.client")  # the whole one imports torch
package.__path__ = [f"{place}/client" for place in penstock.__path__]
from simulated.scenario import simulate
print(*simulate(0, tracing=True).diary, sep="\\n")
"""


def test_a_seed_is_one_history_in_every_process() -> None:
    """The order of sets and dictionaries of names differs between processes; histories must not."""
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    there = subprocess.run([sys.executable, "-c", ANEW], env=environment, capture_output=True, timeout=60)
    assert there.stdout.decode().splitlines() == "\n".join(simulate(0, tracing=True).diary).splitlines()
