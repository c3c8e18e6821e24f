"""The flight record: the chain of a box's digests goes with its position, into every state and out of it again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import streams
from cluster import TOKEN, Cluster, running

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.client.saved import read
from penstock.proto import errors


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("state")) as cluster:
        cluster.add_worker(8, name="w1")
        yield cluster


def box(cluster: Cluster, number: int, boxes: int, workers: int, job: str) -> Appliance:
    return Appliance(
        cluster.address, box=number, num_boxes=boxes, num_workers_per_box=workers, job=job, token=TOKEN, timeout_s=60
    )


@pytest.mark.parametrize("lead", [-3, 0, 3])
def test_a_state_knows_the_record_of_every_box(cluster: Cluster, lead: int) -> None:
    """Box 1 is behind the step, at it, or beyond, when box 0 asks."""
    reached, asked = threading.Event(), threading.Event()

    def train(number: int) -> tuple[dict[int, int], Any]:
        loader, records = DataLoader(streams.shared, 80), {}
        with box(cluster, number, 2, 2, f"lead{lead}") as appliance:
            executor = DataExecutor(loader, num_steps=15, appliance=appliance)
            state = None
            for _ in executor:
                records[executor.step] = executor.digest
                if number == 0 and executor.step == 8:
                    assert reached.wait(30)
                    state = loader.state_dict()
                    asked.set()
                if number == 1 and executor.step == 8 + lead:
                    reached.set()
                    assert asked.wait(30)
            return records, state

    with ThreadPoolExecutor(2) as pool:
        (one, state), (two, _) = pool.map(train, range(2))
    assert [position.chain for position in read(state).positions] == [one[8], two[8]]
    assert one[8] != two[8]


def test_it_goes_on_over_other_workers_and_ends_with_other_boxes(cluster: Cluster) -> None:
    loader = DataLoader(streams.shared, 40)
    with box(cluster, 0, 1, 2, "shapes") as appliance:
        executor = DataExecutor(loader, num_steps=6, appliance=appliance)
        assert len(list(executor)) == 6
        state, record = loader.state_dict(), executor.digest

    def resumed(workers: int, boxes: int) -> int:
        again = DataLoader(streams.shared, 40)
        again.load_state_dict(state)
        with box(cluster, 0, boxes, workers, f"shapes-{workers}-{boxes}") as appliance:
            executor = DataExecutor(again, num_steps=1, appliance=appliance)
            assert len(list(executor)) == 1
            return executor.digest

    same, other, boxes = resumed(2, 1), resumed(3, 1), resumed(1, 2)
    assert record
    assert same
    assert other
    assert not boxes, "two boxes have no one record to go on with"


def test_it_is_the_same_after_a_runner_died(appliance: Appliance, tmp_path: Path) -> None:
    marker = tmp_path / "died"
    marker.touch()
    whole = DataExecutor(DataLoader(streams.dies_at, 9, str(marker)), num_steps=30, appliance=appliance)
    assert len(list(whole)) == 30
    marker.unlink()
    loader = DataLoader(streams.dies_at, 9, str(marker))
    executor = DataExecutor(loader, num_steps=30, appliance=appliance)
    with pytest.warns(UserWarning, match="SIGKILL"):
        assert len(list(executor)) == 30
    assert executor.digest == whole.digest
    assert read(loader.state_dict()).positions[0].chain == whole.digest


def test_in_full_it_sees_every_byte() -> None:
    def record(digest: Any, flip: int) -> int:
        with Appliance(num_workers_per_box=2, seed=1, timeout_s=60, digest=digest) as appliance:
            executor = DataExecutor(DataLoader(streams.large, 3, flip), appliance=appliance)
            assert len(list(executor)) == 6
            return executor.digest

    at = (1 << 19) + 3  # between two words of the sample
    assert record("sample", at) == record(None, -1)
    assert record("full", at) != record("full", -1)


def test_a_state_says_how_its_digests_were_made() -> None:
    loader = DataLoader(streams.stateful, 48)
    with Appliance(num_workers_per_box=2, seed=1, timeout_s=60, digest="full") as appliance:
        whole = DataExecutor(loader, num_steps=5, appliance=appliance)
        assert len(list(whole)) == 5
        state = loader.state_dict()
        assert len(list(DataExecutor(loader, num_steps=3, appliance=appliance))) == 3
        digest = whole.digest
    again = DataLoader(streams.stateful, 48)
    again.load_state_dict(state)
    with Appliance(num_workers_per_box=2, timeout_s=60) as appliance:
        executor = DataExecutor(again, num_steps=3, appliance=appliance)
        assert len(list(executor)) == 3
        assert executor.digest == digest
        assert read(again.state_dict()).full_digest
    again.load_state_dict(state)
    with (
        Appliance(num_workers_per_box=2, timeout_s=60, digest="sample") as appliance,
        pytest.raises(errors.StateMismatchError, match="digest='full'"),
    ):
        iter(DataExecutor(again, appliance=appliance))
