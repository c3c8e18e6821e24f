"""Batches built in the ring are those that are copied into it, to the bit, whatever the user's code does with them."""

from __future__ import annotations

import os
import select
import time
from pathlib import Path
from typing import Any

import built
import pytest
from neighbours import beside

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.client.testing import FakeAppliance
from penstock.proto.batch.flatten import Flattener
from penstock.proto.batch.replay_digest import ReplayDigest

STEPS = 90


def digests(appliance: Appliance | None, input_fn: Any, *arguments: Any, steps: int | None = None) -> list[int]:
    """Return the digests of all batches; the loop writes into each batch afterwards. Without an appliance, those of one
    in this process, which has no ring to build a batch in."""
    if appliance is None:
        with FakeAppliance(num_workers_per_box=2, seed=7, replay=True) as fake:
            return digests(fake, input_fn, *arguments, steps=steps)
    replay_digest = ReplayDigest(Flattener())
    got = []
    for batch in DataExecutor(DataLoader(input_fn, *arguments), num_steps=steps, appliance=appliance):
        got.append(replay_digest.take(batch)[0])
        scribble(batch)
    return got


def scribble(batch: Any) -> None:
    if isinstance(batch, dict):
        batch = list(batch.values())
    if isinstance(batch, list | tuple):
        for part in batch:
            scribble(part)
    elif hasattr(batch, "shape") and batch.shape:
        batch[...] = 3


@pytest.fixture(scope="module")
def default() -> list[int]:
    """Return the digests of a StatefulDataLoader with torch's own collate function. The steps cross the end of an epoch
    of 102, in which each worker's last batch is smaller."""
    return digests(None, built.collated, "default", 404, 0, True, steps=150)


@pytest.mark.parametrize(("workers", "stateful", "steps"), [(0, True, 150), (1, False, 110)])
def test_a_torch_loader_gives_the_same_batches(
    appliance: Appliance, default: list[int], workers: int, stateful: bool, steps: int
) -> None:
    if not stateful:
        alone = None if workers == 0 else appliance  # only a runner forks processes without threads beside it
        default = digests(alone, built.collated, "default", 404, workers, False, steps=steps)
    assert len(set(default)) == steps
    assert digests(appliance, built.collated, "ours", 404, workers, stateful, steps=steps) == default


def test_batches_are_built_in_the_ring(appliance: Appliance) -> None:
    """The first batch of a slot tells how large a ring entry must be. The image is 32 KiB of a batch's 33."""
    loader = DataLoader(built.collated, "watched")
    batches = list(DataExecutor(loader, num_steps=STEPS, appliance=appliance))
    assert [batch["in_ring"] for batch in batches] == [False] * 2 + [True] * (STEPS - 2)
    assert all(batch["moved"] > 4 * built.ROWS * built.WIDTH for batch in batches[2:4])
    assert {batch["moved"] for batch in batches[4:]} == {
        built.ROWS * 8 + built.ROWS * 8 + built.ROWS
    }  # int, float, bool


def test_epoch_abandoned_while_its_worker_waits(appliance: Appliance) -> None:
    """Wherever it waits: the ring has 32 slots, and the loop is at its third batch."""
    with beside(appliance, replay=True) as alone:
        for count in (32, 35):
            executor = DataExecutor(DataLoader(built.one_more, count, True), appliance=alone)
            for _ in range(2):
                for taken, batch in enumerate(executor):
                    assert batch["number"] == taken
                    if taken == 2:
                        time.sleep(0.05)
                        break
            assert [batch["number"] for batch in executor] == list(range(count))


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")  # one forks in this process, too
@pytest.mark.parametrize("how", ["held", "prefetched", "fetched_by_a_thread", "stumbling", "forking"])
def test_whatever_user_code_does_with_a_batch(appliance: Appliance, how: str) -> None:
    count = 70
    default = digests(None, built.by_hand, how, count, False)
    assert len(default) >= count
    assert digests(appliance, built.by_hand, how, count, True) == default


def test_a_state_dict_that_makes_batches(appliance: Appliance) -> None:
    assert digests(appliance, built.stateful, 60, True) == digests(None, built.stateful, 60, False)


def test_worker_waiting_in_user_code_is_stopped(appliance: Appliance, tmp_path: Path) -> None:
    marker = tmp_path / "caught"
    with beside(appliance, replay=True) as alone:
        iterator = iter(DataExecutor(DataLoader(built.swallows, str(marker)), appliance=alone))
        first = [next(iterator) for _ in range(3)]
        assert [int(batch["rows"][0, 0]) for batch in first] == [1000, 2000, 3000]
        runner = os.pidfd_open(int(first[0]["pid"]))
        time.sleep(0.5)  # the ring is full long before
    try:
        assert select.select([runner], [], [], 8)[0], "it ended, or was made to"
    finally:
        os.close(runner)
    assert not marker.exists(), "nothing of ours passes through user code"
