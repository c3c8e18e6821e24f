"""Random histories of training jobs on real processes; `make histories` plays more of them."""

from __future__ import annotations

import os

import pytest
from proof.suite import again, run, table

COUNT = int(os.environ.get("PENSTOCK_HISTORIES", "200"))
PARALLEL = max(2, min(5, (os.cpu_count() or 2)))


@pytest.mark.timeout(60 + 30 * COUNT)
def test_boxes_receive_what_the_model_says() -> None:
    outcomes = run(range(1, 1 + COUNT), parallel=PARALLEL, show=lambda outcome: print(outcome.line))
    print(table(outcomes))
    wrong = [outcome for outcome in outcomes if outcome.difference]
    assert not wrong, f"{wrong[0].difference}\n  {wrong[0].told}\n  again: {again(wrong[0].plan.seed)}"
