"""What a box receives is what the model says, whatever happens to runners, daemons, coordinator and job meanwhile.

A few histories are here, 100 in test_random_histories.py; `make histories` plays as many as one likes.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from proof.driver import World
from proof.histories import Fault, Launch, Loop, Plan, plan_of
from proof.kinds import KINDS
from proof.suite import play


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World.running() as world:
        yield world


def life(kind: str, lane: str, *faults: str, **arguments: object) -> Plan:
    """A job on two boxes of two slots: a `break`, faults after it, a save, a resume, and the same again."""
    script = (Loop("epoch", leave=5), Loop("epoch"), Loop("steps", 9), Loop("persistent", leave=4))
    launches = (Launch(22, True, (5, 13), (13,)), Launch(40, False, (30,), (), 13))
    first = tuple(
        Fault(fault, number % 2, 6 + 4 * number, number, number % 2 == 0) for number, fault in enumerate(faults)
    )
    second = (Fault("kill slot", 0, 20, 1, True), Fault("kill epoch", 1, 30, 2, False))
    return Plan(0, kind, dict(arguments), 2, 2, lane, "fast", 5, script, launches, (first, second))


@pytest.mark.parametrize(
    "plan",
    [
        life("own generators", "auto", "kill epoch", "kill slot", big=True),
        life("keeps its place", "tcp", "drain", "kill slot", length=9),
        life("uneven", "tcp", "kill epoch", "kill epoch"),
    ],
    ids=lambda plan: plan.kind,
)
def test_boxes_receive_what_the_model_says(world: World, plan: Plan) -> None:
    outcome = play(world, plan)
    assert not outcome.difference, outcome
    assert outcome.steps >= 2 * (22 + 40 - 13)


def test_random_plans_are_hard_enough() -> None:
    """At least half of them have two boxes of two slots, three faults, a `break` before a fault, and a resume; at least
    a quarter of the batches exceed 128 KiB."""
    plans = [plan_of(seed) for seed in range(400)]
    assert {plan.kind for plan in plans} == {*KINDS}
    assert 2 * sum(is_hard(plan) for plan in plans) >= len(plans)
    batches = [(plan.launches[-1].stop * plan.boxes, "big" in plan.arguments) for plan in plans]
    assert 4 * sum(count for count, big in batches if big) >= sum(count for count, _ in batches)


def is_hard(plan: Plan) -> bool:
    first = plan.script[0]
    faults = [fault for found in plan.faults for fault in found]
    breaks = first.kind == "epoch" and 0 < first.leave <= plan.launches[0].stop
    after = breaks and any(fault.step >= first.leave for fault in plan.faults[0])
    resumes = any(launch.resume for launch in plan.launches)
    return (plan.boxes, plan.workers) == (2, 2) and len(faults) >= 3 and after and resumes
