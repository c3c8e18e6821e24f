"""Random histories of training jobs on real processes; `make histories` plays more of them."""

from __future__ import annotations

import os

import pytest
from proof.driver import World
from proof.histories import Fault, Launch, changed, plan_of
from proof.suite import again, play, run, table

COUNT = int(os.environ.get("PENSTOCK_HISTORIES", "200"))
PARALLEL = max(2, min(5, (os.cpu_count() or 2)))


@pytest.mark.timeout(60 + 30 * COUNT)
def test_boxes_receive_what_the_model_says() -> None:
    outcomes = run(range(1, 1 + COUNT), parallel=PARALLEL, show=lambda outcome: print(outcome.line))
    print(table(outcomes))
    wrong = [outcome for outcome in outcomes if outcome.difference]
    assert not wrong, f"{wrong[0].difference}\n  {wrong[0].told}\n  again: {again(wrong[0].plan.seed)}"


def test_the_balancer_moves_slots() -> None:
    """Workers whose drains are taken back stand empty, and get slots again; there a runner is killed."""
    kinds = ("keeps its place", "lies at once", "vouched")
    saves = (80, 170, 210)
    launches = Launch(230, True, saves, saves[:2]), Launch(440, False, (300, 400), (300,), 210)
    moves = 0
    with World.running() as world:
        for number, kind in enumerate(kinds):
            plan = plan_of(number, (kind,))
            faults = tuple(
                (
                    Fault("drain", 0, begins + 10, number, False, lasts_s=0.7),
                    Fault("kill slot", 1, begins + 160, number, False),
                )
                for begins in (0, 210)
            )
            topology = {"boxes": 2, "workers": 2, "pace": "slow"}
            outcome = play(world, changed(plan, **topology, launches=launches, faults=faults))
            assert not outcome.difference, f"{outcome.difference}\n  {outcome.told}"
            print(outcome.line, outcome.done)
            moves += outcome.done["balance"]
    assert moves, "the balancer moved nothing"
