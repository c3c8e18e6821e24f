"""How fast a runner is, by its ledger."""

from __future__ import annotations

import math

from penstock.worker.rates import Rates


def test_a_batch_takes_what_was_worked_and_the_rate_is_what_was_taken() -> None:
    rates = Rates(since=0.0)
    rates.look(0.5, 5, 0.1)
    assert (rates.batches_per_s, rates.batch_s) == (0.0, 0.0)  # too early to say
    rates.look(2.0, 10, 0.5)
    assert (rates.batches_per_s, rates.batch_s) == (5.0, 0.05)
    rates.look(4.0, 10, 0.5)  # the loop takes nothing: the runner is no slower for it
    assert (rates.batches_per_s, rates.batch_s) == (0.0, 0.05)


def test_a_batch_that_is_not_done_yet_counts_as_soon_as_it_takes_longer_than_usual() -> None:
    rates = Rates(since=0.0)
    rates.look(1.0, 10, 1.0)
    rates.look(3.0, 10, 3.0)
    assert rates.batch_s == 2.0


def test_figures_that_cannot_be_true_count_as_none() -> None:
    rates = Rates(since=0.0)
    for now, total, worked_s in ((1.0, 10, math.nan), (2.0, 5, math.inf), (3.0, 6, -1.0), (4.0, 3, 7.0)):
        rates.look(now, total, worked_s)
        assert math.isfinite(rates.batch_s)
        assert math.isfinite(rates.batches_per_s)
        assert rates.batches_per_s >= 0
    rates.look(5.0, 13, 8.0)
    assert rates.batch_s == 0.1
