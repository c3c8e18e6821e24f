"""Batches above what a digest covers in full: every leaf counts, and runner, lanes, loop and replays agree."""

from __future__ import annotations

from typing import Literal

import large
import pytest
from neighbours import beside

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.proto.batch.digest import DigestCover
from penstock.proto.batch.replay_digest import ReplayDigest
from penstock.proto.state.position import Position


@pytest.mark.parametrize(("lane", "cover"), [("auto", "sample"), ("tcp", "full")])
def test_stream_digest_is_that_of_the_batches(
    appliance: Appliance, lane: Literal["auto", "tcp"], cover: Literal["sample", "full"]
) -> None:
    position, replay_digest = Position.start(2), ReplayDigest(cover=DigestCover[cover.upper()])
    with beside(appliance, num_workers_per_box=2, lane=lane, digest=cover) as job:
        executor = DataExecutor(DataLoader(large.of_all_kinds, 60), num_steps=100, appliance=job)
        for batch in executor:
            position.deliver(replay_digest.take(batch)[0])
        assert executor.digest == position.chain
        assert executor.stats.corrupt == 0


def test_labels_between_large_leaves_are_compared(appliance: Appliance) -> None:
    """The stream of an interrupted run has the labels of the whole one, although a state has none of their noise."""

    def labels(loader: DataLoader, steps: int) -> list[list[int]]:
        return [batch["label"].tolist() for batch in DataExecutor(loader, num_steps=steps, appliance=job)]

    with beside(appliance, num_workers_per_box=1, replay=True) as job:
        whole = labels(DataLoader(large.noisy_labels), 18)
    with beside(appliance, num_workers_per_box=1, replay=True) as job:
        loader = DataLoader(large.noisy_labels)
        got = labels(loader, 9)
        state = loader.state_dict()
    with beside(appliance, num_workers_per_box=1, replay=True) as job:
        loader = DataLoader(large.noisy_labels)
        loader.load_state_dict(state)
        assert got + labels(loader, 9) == whole
