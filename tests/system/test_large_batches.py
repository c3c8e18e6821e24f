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
