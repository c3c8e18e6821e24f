"""`penstock mix`: a running job's mixture changes exactly at a step on all boxes, whatever dies meanwhile."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chains import kill_runners, runners
from cluster import INPUTS, TOKEN, Cluster, running
from mixed_runs import alone, order, ordered, training
from waiting import until

from penstock.deploy.loader_processes import LoaderForkServer
from penstock.deploy.replay.replay_batch import ReplayRequest, replay
from penstock.proto.errors import PenstockError
from penstock.proto.rpc.calls import CoordinatorClient
from penstock.proto.state.codec import decode_state

BEFORE, AFTER = {"web": 3, "code": 1}, {"web": 1, "code": 4}
WEIGHTS = {"web": "0.2", "code": "0.8"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("state")) as found, pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", INPUTS)
        found.add_worker(8, allow="mixed")
        yield found


@pytest.mark.parametrize(("boxes", "workers", "ahead"), [(2, 2, 1), (1, 3, 9)])
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


@pytest.mark.filterwarnings("ignore:.*was recovered")
def test_saves_between_orders_and_their_steps(cluster: Cluster) -> None:
    """Both changes are ordered long ahead, one with an added source, and runners die around their steps."""
    job, before = "between", runners()
    weights = {"web": "1", "code": "1", "math": "2"}
    with training(cluster, job, 2, 2, 460, keys=True, every=40) as run:
        run.go(10)
        ordered(cluster, order(job, 230, weights, added={"math": "mixed:math"}))
        ordered(cluster, order(job, 420, retired=["web"]))
        for step in (100, 225, 300, 410, 425):
            run.go(step)
            kill_runners(before)
    expected = alone(464, {0: BEFORE, 229: {"web": 1, "code": 1, "math": 2}, 419: {"code": 1, "math": 2}}, more=True)
    assert run.global_batches == expected[:460]
    assert sorted(run.states) == [*range(40, 460, 40)]
    for step, boxes, workers in ((200, 2, 2), (240, 1, 3), (400, 3, 1), (440, 2, 2)):
        with training(cluster, f"{job}-{step}", boxes, workers, 24, run.states[step], keys=True) as after:
            after.go(24)
        assert after.global_batches == expected[step : step + 24]


@pytest.mark.filterwarnings("ignore:.*was recovered", "ignore:.*left its epoch")
def test_change_in_a_second_epoch(cluster: Cluster, tmp_path: Path) -> None:
    """At a position that the first epoch went beyond, whose states lack the change."""
    job, before = "second", runners()
    with training(cluster, job, 1, 2, 30, leaves=12) as run:
        run.go(14)
        kill_runners(before)
        assert ordered(cluster, order(job, 18, WEIGHTS)).change.position == 5 * 8
        kill_runners(before)
        run.go(22)
    assert run.global_batches == [*alone(12, {0: BEFORE}), *alone(18, {0: BEFORE, 5: AFTER}, epoch=1)]
    assert run.counts == Counter("web" if number < 1000 else "code" for rows in run.global_batches for number in rows)
    with training(cluster, f"{job}-resumed", 2, 1, 6, run.state) as after:
        after.go(2)
    assert after.global_batches == alone(24, {0: BEFORE, 5: AFTER}, epoch=1)[18:]
    server = LoaderForkServer("penstock.deploy.replay.slot_replay")
    with server, CoordinatorClient(cluster.address, TOKEN, insecure=True) as client:
        for step in (12, 17, 18):  # the last of the first epoch, the last before the change, and the first after it
            request = ReplayRequest(job, step, 0, out=tmp_path / f"{step}.pst", allow=["mixed"], deadline_s=60)
            assert replay(request, client, server)["verified"]
            batch: Any = decode_state((tmp_path / f"{step}.pst").read_bytes())
            assert batch.tolist() == run.global_batches[step - 1]


@pytest.mark.filterwarnings("ignore:.*was recovered")
def test_coordinator_and_worker_killed_meanwhile(cluster: Cluster) -> None:
    """An order whose coordinator dies is made or not made, and made once when it is repeated."""
    cluster.add_worker(4, allow="mixed")
    with training(cluster, "deaths", 2, 2, 60) as run:
        schedule: dict[int, Any] = {0: BEFORE}
        for round, at in enumerate((4, 14, 24, 34)):
            run.go(at)
            step, weights = at + 4, {"web": str(1 + round), "code": "3"}
            asked = order("deaths", step, weights)
            ordering = threading.Thread(target=_repeat, args=(cluster, asked))
            ordering.start()
            threading.Event().wait(0.02 * 4**round)  # at any moment of the order
            cluster.coordinator.kill()
            cluster.restart_coordinator()
            if round % 2:
                cluster.workers.pop(0).kill()
                cluster.add_worker(4, allow="mixed")
            ordering.join(60)
            assert not ordering.is_alive()
            schedule[step - 1] = {"web": 1 + round, "code": 3}
        cluster.coordinator.kill()
        cluster.restart_coordinator()
        run.go(50)
    expected = alone(70, schedule)
    assert run.global_batches == expected[:60]
    with training(cluster, "deaths-resumed", 1, 3, 10, run.state) as after:
        after.go(5)
    assert after.global_batches == expected[60:]


def _repeat(cluster: Cluster, asked: Any) -> None:
    """Order until it is made, as the command does."""

    def made() -> bool:
        try:
            return bool(ordered(cluster, asked).change.key)
        except PenstockError:  # the coordinator was away, or the boxes had not reported to the new one yet
            return False

    until(made, 60)
