"""A batch at which a slot is lost again and again: named in the error, or left out and remembered."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_cluster import FakeBox, FakeCluster, FakeWorker

from penstock.appliance.core.placement import LOSS_WINDOW_S
from penstock.appliance.journal.journal import StateDir
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import records_pb2


def dies(worker: FakeWorker, total: int, count: int = 0, epoch: int = 0) -> None:
    """The worker's runner of slot 0 dies while it makes the batch after `total`."""
    report = worker.slot_report(worker.of(0), pb.FAILED)
    report.lost = True
    report.error.CopyFrom(records_pb2.ErrorDetail(name="WorkerLostError", message="SIGSEGV", remote_traceback="in f"))
    report.making.CopyFrom(records_pb2.Skip(epoch=epoch, total=total, count=count))
    worker.heartbeat(report)


def opened(world: FakeCluster, *, skip: bool) -> tuple[FakeWorker, FakeBox]:
    worker = world.worker("a", 4)
    box = world.open(skip_poison=skip)
    worker.ready()
    box.deliver(4)
    return worker, box


def skips(worker: FakeWorker) -> list[tuple[int, int, int]]:
    return [(skip.epoch, skip.total, skip.count) for skip in worker.of(0).skips]


def test_skipped_batch_stays_skipped_and_counted() -> None:
    worker, box = opened(FakeCluster(), skip=True)
    for number in range(4):
        assert skips(worker) == []
        assert box.watch().slots[0].restarts == number
        dies(worker, 5)
    assert skips(worker) == [(0, 5, 1)]
    view = box.watch().slots[0]
    assert (view.phase, view.skipped) == (pb.STARTING, 1)
    assert "batch 6 of box 0 slot 0 (step 11) is quarantined and skipped" in view.note
    for _ in range(4):
        dies(worker, 5, count=1)  # the one that took its place is no better
    assert skips(worker) == [(0, 5, 2)]
    assert box.watch().slots[0].skipped == 2


def test_deaths_at_different_batches_name_none() -> None:
    worker, box = opened(FakeCluster(), skip=True)
    for total in (5, 6, 5, 6):
        assert skips(worker) == []
        dies(worker, total)
    assert "lost its runner 4 times" in box.watch().slots[0].error.message


def test_progress_resets_losses_and_time_does_not() -> None:
    world = FakeCluster()
    worker, box = opened(world, skip=True)
    for _ in range(3):
        dies(worker, 5)
    box.deliver(2)
    for _ in range(3):
        dies(worker, 5)
        world.run_for(2 * LOSS_WINDOW_S, [worker, box])
    assert skips(worker) == []
    dies(worker, 5)
    assert skips(worker) == [(0, 5, 1)]


def test_next_attempt_skips_journaled_batches(tmp_path: Path) -> None:
    directory = StateDir(tmp_path)
    world = FakeCluster(directory=directory)
    worker, box = opened(world, skip=True)
    for _ in range(4):
        dies(worker, 5, count=2)  # two were left out by the state that this attempt started from
    world.restart()
    worker.register()
    assert skips(worker) == [(0, 5, 3)]
    assert box.watch().slots[0].skipped == 1
    again = world.open(skip_poison=True, attempt_key="next", client_id="another")
    assert again.reply.attempt == 2
    assert skips(worker) == []
    assert world.journal.rows("skips") == []
    world.journal.close()
    directory.close()


@pytest.mark.parametrize("outgrown", [False, True])
def test_recycled_runner_costs_no_loss(outgrown: bool) -> None:
    worker, box = opened(FakeCluster(), skip=False)
    for number in range(6):
        report = worker.slot_report(worker.of(0), pb.FAILED)
        report.lost = report.recycle = True
        report.outgrown = outgrown and number != 1
        report.error.CopyFrom(records_pb2.ErrorDetail(name="WorkerLostError", message="it held 9 GiB, limit 4 GiB"))
        worker.heartbeat(report)
        view = box.watch().slots[0]
        if number < 3 or not outgrown:
            assert (view.phase, view.note) == (pb.STARTING, "it held 9 GiB, limit 4 GiB")
        else:
            assert view.error.name == "MemoryLimitError"
            assert "9 GiB" in view.error.message
            assert "--runner-memory" in view.error.message
            break


def test_only_the_runner_before_counts_as_outgrown() -> None:
    worker, box = opened(FakeCluster(), skip=False)

    def outgrown() -> None:
        report = worker.slot_report(worker.of(0), pb.FAILED)
        report.lost = report.recycle = report.outgrown = True
        worker.heartbeat(report)

    outgrown()
    worker.ready()
    worker.lose(worker.of(0))  # after hours, it may be, of one that held no more than it might
    outgrown()
    assert box.phases() == ["STARTING", "READY"]
    outgrown()
    assert box.phases() == ["FAILED", "READY"]


def test_a_place_that_is_none_is_not_quarantined() -> None:
    """User code can write into the memory where its runner notes what it makes."""
    world = FakeCluster()
    worker, box = opened(world, skip=True)
    for _ in range(4):
        report = worker.slot_report(worker.of(0), pb.FAILED)
        report.lost = True
        report.making.total = (1 << 64) - 1
        worker.heartbeat(report)
    assert box.phases() == ["FAILED", "READY"]
    assert world.journal.pending == {}
