"""Plan of a chaos run, as a function of its seed alone: the jobs, the machines, and which fault comes when.

Pure. What a fault hits is a number, reduced by the count of what there is at the time: the schedule is the same for a
seed, what exists at a moment depends on timing.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

__all__ = ["Fault", "Plan", "TrainingJob", "plan_of"]

MIXED = "mixed job"
"""Name of the job whose mixture is changed meanwhile."""
INPUTS = [
    ("stateful", (400, 0)),
    ("stateful", (160, 2)),
    ("shuffled", (200, 0)),
    ("counter", (30,)),
    ("shared", (170,)),
    ("generator", (25,)),
    ("fresh", (20,)),
]
# What may happen; how long it lasts: 0 = a moment, else up to so many seconds, after which it is put right.
FAULTS = {
    "kill a runner": 0.0,
    "stop a runner": 3.0,
    "kill a fork server": 0.0,
    "kill a daemon": 3.0,
    "stop a daemon": 7.0,
    "stop a worker machine": 7.0,
    "cut a daemon's control connection": 0.0,
    "silence a daemon's control connection": 7.0,
    "deafen a daemon": 7.0,
    "kill the coordinator": 3.0,
    "stop the coordinator": 5.0,
    "kill a trainer": 0.0,
    "stop a trainer": 13.0,
    "kill a receiver": 0.0,
    "stop a receiver": 3.0,
    "cut a trainer's lanes": 0.0,
    "silence a trainer's lanes": 4.0,
}


@dataclass(frozen=True)
class TrainingJob:
    """Training job and how it is run."""

    name: str
    input: str
    arguments: tuple[Any, ...]
    boxes: int
    workers: int
    lane: str
    steps: int
    pace_s: float
    save: int


@dataclass(frozen=True)
class Fault:
    """Fault that occurs `at_s` seconds after the start, and ends `lasts_s` later."""

    at_s: float
    what: str
    which: int
    lasts_s: float

    def __str__(self) -> str:
        return f"{self.what} ({self.which}){f' for {self.lasts_s:.1f} s' if self.lasts_s else ''}"


@dataclass(frozen=True)
class Plan:
    seed: int
    daemons: int
    jobs: list[TrainingJob]
    faults: list[Fault]


def plan_of(seed: int, seconds: float) -> Plan:
    """The plan of a seed, with faults over so many seconds."""
    rng = random.Random(seed)
    jobs = []
    for number in range(rng.choice([1, 2])):
        name, arguments = rng.choice(INPUTS)
        boxes = rng.choice([1, 1, 2])
        pace_s = rng.choice([0.005, 0.01, 0.02])
        jobs.append(
            TrainingJob(
                f"job {number}",
                name,
                arguments,
                boxes,
                rng.choice([1, 2, 3]) if boxes == 1 else rng.choice([1, 2]),
                rng.choice(["auto", "tcp"]),
                int(seconds / pace_s),
                pace_s,
                rng.choice([40, 100]),
            )
        )
    faults, at_s = [], 0.5
    while at_s < seconds:
        what = rng.choice(list(FAULTS))
        lasts_s = rng.uniform(0.3, FAULTS[what]) if FAULTS[what] else 0.0
        fault = Fault(at_s, what, rng.randrange(1000), lasts_s)
        faults.append(fault)
        at_s += rng.uniform(0.3, 3.0)
    daemons = rng.choice([2, 3])
    if rng.random() < 0.5:
        boxes, pace_s = rng.choice([1, 2]), 0.02
        steps, workers, lane = int(seconds / pace_s), rng.choice([1, 2]), rng.choice(["auto", "tcp"])
        jobs.append(TrainingJob(MIXED, "planned", ([],), boxes, workers, lane, steps, pace_s, 40))
        times = (rng.uniform(1.0, seconds) for _ in range(rng.randint(1, 4)))
        faults += [Fault(at_s, "change the mixture", rng.randrange(1000), 0.0) for at_s in times]
        faults.sort(key=lambda fault: fault.at_s)
    return Plan(seed, daemons, jobs, faults)
