"""Several boxes, through a coordinator and workers that were started apart."""

from __future__ import annotations

import re
import select
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import pytest
import streams
from cluster import TOKEN, Cluster, running

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.proto import errors
from penstock.proto.rpc.calls import CoordinatorClient

SLOW_S = 0.04


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("state")) as cluster:
        cluster.add_worker(4, name="w1")
        cluster.add_worker(4, name="w2")
        yield cluster


def box(cluster: Cluster, number: int, boxes: int, workers: int, job: str, **options: Any) -> Appliance:
    return cluster.box(job, box=number, num_boxes=boxes, num_workers_per_box=workers, **options)


def together(boxes: int, train: Callable[[int], Any]) -> list[Any]:
    """Each box's loop in a thread of its own; their results in order."""
    with ThreadPoolExecutor(boxes) as pool:
        return list(pool.map(train, range(boxes)))


def is_apart(loader: DataLoader, named: bool = False) -> bool:
    """Whether the coordinator has told this box that another one is in a later epoch, or has `named` it otherwise."""
    other = loader._session.run.box_apart  # type: ignore[union-attr]
    return other is not None and other.HasField("label") == named


def wait_until(there: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not there() and time.monotonic() < until:
        select.select([], [], [], 0.05)


@pytest.mark.filterwarnings("ignore:.*the epoch of box")  # 28 batches on three boxes: one has one more
@pytest.mark.parametrize("lane", ["tcp"])
def test_two_boxes_save_at_one_step_and_resume(cluster: Cluster, lane: str) -> None:
    job = f"two-{lane}"
    meet = threading.Barrier(2, timeout=60)

    def first(number: int) -> tuple[list[int], Any]:
        loader, got = DataLoader(streams.shared, 40), []
        with box(cluster, number, 2, 2, job, lane=lane) as appliance:
            executor = DataExecutor(loader, num_steps=6, checkpoint_steps=6, appliance=appliance)
            for batch in executor:
                got.append(batch["number"])
                meet.wait()
            return got, loader.state_dict()

    (one, state), (two, same) = together(2, first)
    assert one == [0, 1, 4, 5, 8, 9]
    assert two == [2, 3, 6, 7, 10, 11]
    assert state == same
    assert state["done"] == [3, 3, 3, 3]

    def second(number: int) -> list[int]:
        loader = DataLoader(streams.shared, 40)
        loader.load_state_dict(state)
        with box(cluster, number, 2, 2, job, lane=lane) as appliance:
            return [batch["number"] for batch in DataExecutor(loader, appliance=appliance)]

    assert together(2, second) == [
        [n for n in range(40) if n % 4 < 2 and n not in one],
        [n for n in range(40) if n % 4 >= 2 and n not in two],
    ]

    def third(number: int) -> list[int]:
        loader = DataLoader(streams.shared, 40)
        loader.load_state_dict(state)
        with box(cluster, number, 3, 1, f"{job}-three", lane=lane) as appliance:
            return [batch["number"] for batch in DataExecutor(loader, appliance=appliance)]

    rest = [number for part in together(3, third) for number in part]
    assert sorted(one + two + rest) == list(range(40))


def test_box_with_an_early_epoch_end_is_announced(cluster: Cluster) -> None:
    ended = threading.Event()

    def train(number: int) -> int:
        loader = DataLoader(streams.uneven, [3, 9])
        with box(cluster, number, 2, 1, "uneven") as appliance:
            steps = iter(DataExecutor(loader, appliance=appliance))
            taken = 0
            for _ in steps:
                taken += 1
                if number == 1 and taken == 4:
                    assert ended.wait(30)
                    until = time.monotonic() + 10
                    while not loader._session.run.ended_boxes and time.monotonic() < until:  # type: ignore[union-attr]
                        select.select([], [], [], 0.05)
            if number == 0:
                ended.set()
            return taken

    with pytest.warns(UserWarning, match="the epoch of box 0 ended at step 3, but box 1 continues"):
        assert together(2, train) == [3, 9]


def test_boxes_in_different_epochs_are_named_once(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    begun, told = threading.Event(), threading.Event()

    def train(number: int) -> None:
        loader = DataLoader(streams.uneven, [40, 40])
        with box(cluster, number, 2, 1, "apart") as appliance:
            if number == 0:
                assert len(list(islice(DataExecutor(loader, appliance=appliance), 3))) == 3
                assert next(iter(DataExecutor(loader, appliance=appliance))) is not None
                begun.set()
                assert told.wait(30)
                return
            for step, _ in enumerate(DataExecutor(loader, appliance=appliance), 1):
                if step == 4:
                    assert begun.wait(30)
                    wait_until(lambda: is_apart(loader))
            told.set()

    together(2, train)
    lines = [record.message for record in caplog.records if "different epochs at one step" in record.message]
    assert len(lines) == 1
    assert "box 0 left epoch 0 after step 3, and box 1 continues it with step" in lines[0]


def test_boxes_that_call_an_epoch_by_different_numbers_are_named(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    told = threading.Event()

    def train(number: int) -> None:
        loader = DataLoader(streams.uneven, [40, 40])
        with box(cluster, number, 2, 1, "numbers") as appliance:
            assert len(list(islice(DataExecutor(loader, appliance=appliance), 3))) == 3
            loader.set_epoch(5 + number)
            for step, _ in enumerate(DataExecutor(loader, appliance=appliance), 1):
                if step == 4:
                    wait_until(lambda: told.is_set() or is_apart(loader, named=True))
                elif step == 5:
                    told.set()

    together(2, train)
    lines = [record.message for record in caplog.records if "different epochs at one step" in record.message]
    assert len(lines) == 1
    assert re.search(
        r"box (0 is in epoch 5 and box 1 in epoch 6|1 is in epoch 6 and box 0 in epoch 5)\. Call", lines[0]
    )


def test_last_state_outlives_another_box(cluster: Cluster) -> None:
    closed = threading.Event()

    def train(number: int) -> Any:
        loader = DataLoader(streams.shared, 80)
        with box(cluster, number, 2, 2, "closed") as appliance:
            list(DataExecutor(loader, num_steps=6, appliance=appliance))
            if number == 0:
                assert closed.wait(30)
                return loader.state_dict()
        closed.set()
        return None

    assert together(2, train)[0]["done"] == [3, 3, 3, 3]


def test_second_client_of_one_attempt_on_a_box(cluster: Cluster) -> None:
    with (
        box(cluster, 0, 1, 1, "twice", attempt="a") as one,
        box(cluster, 0, 1, 1, "twice", attempt="a") as other,
    ):
        loader = DataLoader(streams.counter)  # one that is dropped closes its run
        assert next(iter(DataExecutor(loader, num_steps=3, appliance=one)))
        with pytest.raises(errors.BoxTakenError, match="box 0"):
            next(iter(DataExecutor(DataLoader(streams.counter), num_steps=3, appliance=other)))


def test_restarted_trainer_supersedes_at_once(cluster: Cluster) -> None:
    with box(cluster, 0, 1, 8, "again", attempt="a") as one, box(cluster, 0, 1, 8, "again", attempt="b") as two:
        old = iter(DataExecutor(DataLoader(streams.counter, 10_000), num_steps=90_000, appliance=one))
        next(old)
        # All eight slots that the workers have are the predecessor's.
        assert next(iter(DataExecutor(DataLoader(streams.counter, 10_000), num_steps=2, appliance=two)))
        with pytest.raises(errors.SupersededError, match="attempt"):
            for _ in old:
                pass


def test_missing_slots_are_counted_in_the_error(cluster: Cluster) -> None:
    with (
        cluster.box("many", num_workers_per_box=11, timeout_s=8) as greedy,
        pytest.raises(errors.NoWorkersError, match=r"3.*11"),
    ):
        list(DataExecutor(DataLoader(streams.counter), num_steps=30, appliance=greedy))


def test_input_fn_under_no_allowed_prefix(cluster: Cluster) -> None:
    import json

    with box(cluster, 0, 1, 1, "prefix") as appliance, pytest.raises(errors.InputFnNotAllowedError) as caught:
        next(iter(DataExecutor(DataLoader(json.loads, "[1]"), appliance=appliance)))
    text = str(caught.value)
    assert "'json'" in text
    assert "streams" in text
    assert "--allow json" in text


def test_a_slow_worker_is_named_and_waited_for(cluster: Cluster) -> None:
    """The order is kept."""
    with box(cluster, 0, 1, 2, "slow") as appliance, CoordinatorClient(cluster.address, TOKEN) as client:
        executor = DataExecutor(DataLoader(streams.slow, SLOW_S, 100), num_steps=160, appliance=appliance)
        got, waited_for = [], set()
        for batch in executor:
            got.append(int(batch))
            if executor.step % 40 == 0:
                (run,) = [run for run in client.status().runs if run.run.startswith("slow/")]
                waited_for.add(run.boxes[0].waiting_for)
        slow, other = (slot.worker for slot in sorted(run.boxes[0].slots, key=lambda slot: slot.slot))
        assert slow != other
        waited = executor.stats.waited_by_worker
    assert got == [number for number in range(80) for _ in range(2)]
    assert max(waited, key=lambda name: waited[name]) == slow
    assert any(slow in who for who in waited_for), waited_for


def test_a_drained_worker_hands_its_slots_on(cluster: Cluster) -> None:
    """The last test of this cluster: one of its two workers ends."""

    def train(job: str, at_step_40: Callable[[DataLoader], None]) -> list[Any]:
        got = []
        with box(cluster, 0, 1, 2, job) as appliance:
            loader = DataLoader(streams.stateful, 400)
            executor = DataExecutor(loader, num_steps=120, appliance=appliance)
            for batch in executor:
                got.append(batch.tolist())
                if executor.step == 40:
                    at_step_40(loader)
        return got

    def drain(loader: DataLoader) -> None:
        assert loader._session is not None
        drained = cluster.workers[["w1", "w2"].index(loader._session.run.views[0].worker)]
        drained.terminate()
        assert drained.wait(20) == 0

    whole = train("undrained", lambda loader: None)
    with pytest.warns(UserWarning, match="drains"):
        assert train("drained", drain) == whole
