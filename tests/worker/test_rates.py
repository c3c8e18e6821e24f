"""Rates of a runner, by its progress page."""

from __future__ import annotations

import math

from penstock.worker.processes.process_use import ProcessorUse
from penstock.worker.slots.runner_watch import BatchRates


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
