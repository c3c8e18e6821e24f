"""Rates of a runner, by its progress page."""

from __future__ import annotations

import math
import os
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

from coroutines import in_loop

from penstock.proto.v1 import records_pb2
from penstock.worker.processes.process_use import ProcessorUse, used_by
from penstock.worker.slots.runner_watch import BatchRates
from penstock.worker.slots.slot import Slot


def test_batch_time_is_work_and_rate_is_taken() -> None:
    rates = BatchRates(since=0.0)
    rates.look(0.5, 5, 0.1)
    assert (rates.batches_per_s, rates.batch_s) == (0.0, 0.0)  # too early to say
    rates.look(2.0, 10, 0.5)
    assert (rates.batches_per_s, rates.batch_s) == (5.0, 0.05)
    rates.look(4.0, 10, 0.5)  # the loop takes nothing: the runner is no slower for it
    assert (rates.batches_per_s, rates.batch_s) == (0.0, 0.05)


def test_unfinished_slow_batch_counts_at_once() -> None:
    rates = BatchRates(since=0.0)
    rates.look(1.0, 10, 1.0)
    rates.look(3.0, 10, 3.0)
    assert rates.batch_s == 2.0


def test_impossible_figures_count_as_none() -> None:
    rates = BatchRates(since=0.0)
    for now, total, worked_s in ((1.0, 10, math.nan), (2.0, 5, math.inf), (3.0, 6, -1.0), (4.0, 3, 7.0)):
        rates.look(now, total, worked_s)
        assert math.isfinite(rates.batch_s)
        assert math.isfinite(rates.batches_per_s)
        assert rates.batches_per_s >= 0
    rates.look(5.0, 13, 8.0)
    assert rates.batch_s == 0.1


def test_processor_time_and_waits_are_counted() -> None:
    rates = BatchRates(since=0.0)
    rates.look(1.0, 10, 1.0, ProcessorUse(cpu_s=0.25, delay_s=0.5))
    assert (rates.batch_s, rates.batch_cpu_s, rates.batch_delay_s) == (0.1, 0.025, 0.05)
    rates.look(2.0, 10, 1.0, ProcessorUse(cpu_s=0.25, delay_s=0.5))  # the loop takes nothing
    assert (rates.batch_cpu_s, rates.batch_delay_s) == (0.025, 0.05)
    rates.look(4.0, 10, 3.0, ProcessorUse(cpu_s=1.25, delay_s=1.5))  # a batch that is not done yet
    assert (rates.batch_s, rates.batch_cpu_s, rates.batch_delay_s) == (2.0, 1.0, 1.0)
    rates.look(5.0, 12, 5.0, ProcessorUse(cpu_s=0.0, delay_s=0.5))  # the processes are gone
    assert (rates.batch_s, rates.batch_cpu_s, rates.batch_delay_s) == (2.0, 0.0, 0.0)


def test_processor_wait_is_at_most_the_batch() -> None:
    rates = BatchRates(since=0.0)
    rates.look(1.0, 10, 0.5, ProcessorUse(cpu_s=0.1, delay_s=9.0))
    assert rates.batch_delay_s == rates.batch_s == 0.05


@in_loop
async def test_report_of_a_slot_tells_processor_time() -> None:
    host: Any = SimpleNamespace(name="w")
    slot = Slot(host, records_pb2.WorkerAssignment(run="job/0", attempt=1, num_workers_per_box=1))
    slot.record.child = Mock(pid=os.getpid())  # which has had a tick of a processor at least
    slot.record.progress_page.record(1, 0, 0, 1, 0)
    slot.record.progress_page.worked_s = 1000.0
    slot.record.progress_page._write_head()
    slot._rates.since -= 2.0
    report = slot.report()
    assert report.batch_s == 1000.0
    assert report.batch_cpu_s > 0.0
    assert 0.0 <= report.batch_delay_s <= used_by(os.getpid()).delay_s
    slot.record.progress_page.close()
