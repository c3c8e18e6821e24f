"""Random histories of training jobs on real processes; `make histories` plays more of them."""

from __future__ import annotations

import os

import pytest
from proof.suite import run

COUNT = 100
PARALLEL = max(2, min(5, (os.cpu_count() or 2)))


@pytest.mark.timeout(60 + 30 * COUNT)
def test_boxes_receive_what_the_model_says() -> None:
    outcomes = run(range(1, 1 + COUNT), parallel=PARALLEL, show=print)
    wrong = [outcome for outcome in outcomes if outcome.difference]
    assert not wrong, f"make histories SEED={wrong[0].plan.seed} RUNS=1: {wrong[0]}"
