"""`penstock mix`: a running job's mixture changes exactly at a step on all boxes, whatever dies meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from cluster import Cluster, running
from mixed_runs import alone, order, ordered, training

BEFORE, AFTER = {"web": 3, "code": 1}, {"web": 1, "code": 4}
WEIGHTS = {"web": "0.2", "code": "0.8"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("state")) as found:
        found.add_worker(8, allow="mixed")
        yield found


@pytest.mark.parametrize(("boxes", "workers", "ahead"), [(1, 1, 1), (2, 2, 1), (1, 3, 9)])
def test_change_is_exact_at_its_step(cluster: Cluster, boxes: int, workers: int, ahead: int) -> None:
    job, step = f"exact-{boxes}-{workers}", 6 + ahead
    with training(cluster, job, boxes, workers, 24) as run:
        run.go(5)
        reply = ordered(cluster, order(job, step, WEIGHTS))
        assert (reply.run, reply.change.position, reply.slots) == (f"{job}/0", (step - 1) * 8, boxes * workers)
        run.go(12)
    expected = alone(40, {0: BEFORE, step - 1: AFTER})
    assert run.global_batches == expected[:24]
    assert run.counts == Counter(
        ["web" if number < 1000 else "code" for rows in expected[:24] for number in rows[::boxes]]
    )
    with training(cluster, f"{job}-resumed", 3 - boxes, 3, 8, run.state) as after:
        after.go(1)
    assert after.global_batches == expected[24:32]
