"""Short run of `make chaos`, and a check that a seed decides what it does."""

from __future__ import annotations

import pytest
from chaos import chaos
from chaos_plan import FAULTS, plan_of


def test_a_seed_is_a_schedule() -> None:
    assert plan_of(7, 20) == plan_of(7, 20)
    assert plan_of(7, 20) != plan_of(8, 20)
    seen = {fault.what for seed in range(50) for fault in plan_of(seed, 20).faults}
    assert seen == {*FAULTS, "change the mixture"}


@pytest.mark.timeout(300)
def test_a_short_storm() -> None:
    assert chaos(4, 6.0) >= 2
