"""`penstock mix`: a running job's mixture changes exactly at a step on all boxes, whatever dies meanwhile."""

from __future__ import annotations

import contextlib
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
from penstock.proto.errors import InputFnNotAllowedError, InvalidArgumentError, PenstockError, UnknownRunError
from penstock.proto.rpc.calls import CoordinatorClient
from penstock.proto.state.codec import decode_state

BEFORE, AFTER = {"web": 3, "code": 1}, {"web": 1, "code": 4}
WEIGHTS = {"web": "0.2", "code": "0.8"}
STEPS = 1200
"""Number of steps of a loop that runs at full speed."""


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


def test_two_changes_with_an_added_and_retired_source(cluster: Cluster) -> None:
    """The second one adds a source and retires another; the third overrides what the second ordered for later."""
    weights = {"web": "1", "code": "1", "math": "2"}
    with training(cluster, "twice", 2, 2, 40, keys=True) as run:
        run.go(3)
        ordered(cluster, order("twice", 6, WEIGHTS))
        run.go(8)
        reply = ordered(cluster, order("twice", 11, weights, added={"math": "mixed:math"}))
        assert {share.source: (share.was, share.now) for share in reply.shares} == {
            "web": (0.2, 0.25),
            "code": (0.8, 0.25),
            "math": (0.0, 0.5),
        }
        run.go(9)
        ordered(cluster, order("twice", 30, {"math": "1"}, retired=["web", "code"]))
        ordered(cluster, order("twice", 20, retired=["web"]))
        run.go(25)
    schedule = {0: BEFORE, 5: AFTER, 10: {"web": 1, "code": 1, "math": 2}, 19: {"code": 1, "math": 2}}
    expected = alone(50, schedule, more=True)
    assert run.global_batches == expected[:40]
    with training(cluster, "twice-resumed", 1, 3, 10, run.state, keys=True) as after:
        after.go(5)
    assert after.global_batches == expected[40:]


@pytest.mark.filterwarnings("ignore:.*was recovered")
@pytest.mark.parametrize("keys", [False, True])
def test_runners_killed_before_and_after(cluster: Cluster, keys: bool) -> None:
    job, before = f"killed-{keys}", runners()
    with training(cluster, job, 1, 2, 40, keys=keys) as run:
        run.go(4)
        kill_runners(before)
        ordered(cluster, order(job, 12, WEIGHTS))
        kill_runners(before)
        run.go(11)
        kill_runners(before)
        run.go(20)
        kill_runners(before)
    expected = alone(50, {0: BEFORE, 11: AFTER})
    assert run.global_batches == expected[:40]
    with training(cluster, f"{job}-resumed", 2, 1, 10, run.state, keys=keys) as after:
        after.go(5)
    assert after.global_batches == expected[40:]


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
    with server, CoordinatorClient(cluster.address, TOKEN) as client:
        for step in (12, 17, 18):  # the last of the first epoch, the last before the change, and the first after it
            request = ReplayRequest(job, step, 0, out=tmp_path / f"{step}.pst", allow=["mixed"], deadline_s=60)
            assert replay(request, client, server)["verified"]
            batch: Any = decode_state((tmp_path / f"{step}.pst").read_bytes())
            assert batch.tolist() == run.global_batches[step - 1]


def test_launch_after_the_change_has_it(cluster: Cluster) -> None:
    """The run is opened again with the state of a step before the change, which was saved before the order."""
    with training(cluster, "again", 1, 2, 6) as first:
        first.go(6)
    with training(cluster, "again", 1, 2, 20, first.state) as second:
        second.go(1)
        ordered(cluster, order("again", 12, WEIGHTS))
        second.go(10)
    with training(cluster, "again", 2, 1, 20, first.state) as third:
        third.go(1)
        with pytest.raises(InvalidArgumentError, match="--from-step must be at least 8 for run again/0"):
            ordered(cluster, order("again", 7, WEIGHTS))
    expected = alone(26, {0: BEFORE, 11: AFTER})
    assert first.global_batches + second.global_batches == expected
    assert first.global_batches + third.global_batches == expected


def test_loops_at_full_speed_are_fenced(cluster: Cluster) -> None:
    """Nobody holds the boxes: either the change is refused and nothing changes, or it is exact at its step."""
    job = "fast"
    made: list[tuple[int, dict[str, str]]] = []
    with training(cluster, job, 2, 2, STEPS, pace_s=0.008) as run:
        run.go(1)
        run.let(1 << 60)
        for number in range(8):
            step = max(max(rows) for rows in run.rows) + (2, 150, 500, 80)[number % 4]
            weights = {"web": str(1 + number % 5), "code": str(1 + number % 3)}
            if step > STEPS - 10:
                break
            with contextlib.suppress(InvalidArgumentError):  # the step has passed
                ordered(cluster, order(job, step, weights))
                made = [(at, asked) for at, asked in made if at < step] + [(step, weights)]
    assert made
    schedule = {0: BEFORE} | {step - 1: {name: int(text) for name, text in asked.items()} for step, asked in made}
    expected = alone(STEPS, schedule)
    differs = next((step for step in range(STEPS) if run.global_batches[step] != expected[step]), None)
    assert differs is None, f"step {differs + 1} differs with the changes {made}"


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


@pytest.mark.parametrize(
    ("weights", "more", "says"),
    [
        ({"web": "1", "cod": "1"}, {}, r"a source must be one of web, code, got 'cod'"),
        ({"web": "1", "code": "-1"}, {}, r"weights\['code'\] must be at least 0, got -1"),
        ({"web": "1", "code": "nan"}, {}, r"weights\['code'\] must be a finite number, got 'nan'"),
        ({"web": "1"}, {}, r"--weights or --retire must name each source, got none for code"),
        ({"web": "0", "code": "0"}, {}, r"at least one weight must be above 0"),
        ({}, {}, r"a change needs --weights or --retire, got neither"),
        ({"web": "1", "code": "1", "few": "1"}, {"added": {"few": "mixed:few"}}, r"'few' must have 8 shards"),
        ({"web": "1", "code": "1", "x": "1"}, {"added": {"x": "mixed:broken"}}, r"no such source on this worker"),
        ({"web": "1", "code": "1", "x": "1"}, {"added": {"x": "mixed:none"}}, r"has no 'none'"),
        ({"web": "1", "code": "1", "x": "1"}, {"added": {"x": "os:getpid"}}, r"module 'os', which this worker may not"),
    ],
)
def test_refused_changes_move_nothing(cluster: Cluster, refusing: Any, weights: Any, more: Any, says: str) -> None:
    with pytest.raises(Exception, match=says) as refused:
        ordered(cluster, order("refusing", 9, weights, **more))
    if "os:" in str(more):
        assert isinstance(refused.value, InputFnNotAllowedError)


@pytest.fixture(scope="module")
def refusing(cluster: Cluster) -> Iterator[None]:
    """A job that waits at its fifth step while tests use it; of these there may be none that takes a minute."""
    with training(cluster, "refusing", 2, 1, 20) as run:
        run.go(5)
        yield
        run.go(12)
    assert run.global_batches == alone(20, {0: BEFORE})


@pytest.mark.usefixtures("refusing")
def test_steps_and_runs_that_do_not_exist(cluster: Cluster) -> None:
    with pytest.raises(InvalidArgumentError, match=r"--from-step must be at least [67] for run refusing/0, .*, got 5"):
        ordered(cluster, order("refusing", 5, WEIGHTS))
    with pytest.raises(UnknownRunError, match="has no run or job 'nowhere'"):
        ordered(cluster, order("nowhere", 5, WEIGHTS))
    dry = ordered(cluster, order("refusing", 9, WEIGHTS, dry_run=True))
    assert (dry.change.position, dry.slots) == (64, 2)
    assert dry.batches > 0
