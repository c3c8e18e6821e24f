"""Suites of full_path.py: which modes (ways to deliver batches) are measured with which cases (batches to deliver), in
which order.

In each round the compared modes take turns, and each round begins with another mode, so that other load of the machine
affects all alike. A figure is None if a mode could not be measured.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.cases import BUSY_S, PATH, SLOW, SNAPSHOTS, Case, Times, calibrate
from benchmarks.modes import ALONE, DATALOADER, MODES, PENSTOCK, ROOT, STATEFUL, TCP, Stage

__all__ = ["SUITES", "Figures", "Plan", "path", "slots", "slow", "snapshots", "startup"]

Figures = dict[str, dict[str, list[dict[str, Any] | None]]]
"""Measurements of each round, by the name of the case and of the mode; None for a round in which the measurement
failed."""
SLOTS_DEADLINE_S = 120.0


@dataclass(frozen=True)
class Plan:
    """Numbers of rounds and durations of all suites."""

    rounds: int = 3
    state_rounds: int = 5
    """Number of rounds of the suite "snapshots", in which a loss of 5% must be distinguished from noise."""
    times: Times = field(default_factory=Times)
    slow_spans: int = 2
    """Factor by which measurements of the suite "slow" are longer, because its sources yield only 500 batches per
    second."""
    slots: tuple[int, ...] = (16, 64)
    slots_s: float = 3.0


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def turns(round_: int, names: Sequence[str]) -> list[str]:
    """Return the names in the order of a round: each round begins with the next name."""
    first = round_ % len(names)
    return [*names[first:], *names[:first]]


def path(stage: Stage, plan: Plan) -> Figures:
    """Run the suite "path": measure every mode with batches of every size that exist already. Return its
    measurements."""
    names = [name for name in MODES if name != ALONE]
    stage.start(names)
    figures: Figures = {}
    for case in PATH:
        found = figures[case.name] = {name: [] for name in names}
        for round_ in range(plan.rounds):
            say(f"path: {case.name}, round {round_ + 1} of {plan.rounds}")
            for name in turns(round_, names):
                record = stage.measure(name, case, plan.times)
                found[name].append(record)
                if name == PENSTOCK and record is not None:
                    case = _with_slots(case, record)
    return figures


def _with_slots(case: Case, record: dict[str, Any]) -> Case:
    """Return the case with the number of entries that Penstock's ring had in a measurement. `record`: result of the
    measurement. Of several rings the largest is the one in use."""
    slots = max(record["rings"], default=0) // case.nbytes
    return replace(case, slots=slots) if slots else case


def slow(stage: Stage, plan: Plan) -> Figures:
    """Run the suite "slow": measure what each mode adds to a source that runs Python code for 2 ms for each batch.
    Return its measurements."""
    names = [ALONE, PENSTOCK, TCP, DATALOADER, STATEFUL]
    stage.start(names)
    work = calibrate(BUSY_S)
    times = replace(plan.times, span_s=plan.slow_spans * plan.times.span_s)
    figures: Figures = {}
    for case in SLOW:
        if case.work:
            case = replace(case, work=work)
        found = figures[case.name] = {name: [] for name in names}
        for round_ in range(plan.rounds):
            say(f"slow: {case.name}, round {round_ + 1} of {plan.rounds}")
            for name in turns(round_, names):
                found[name].append(stage.measure(name, case, times))
    return figures


def snapshots(stage: Stage, plan: Plan, folder: Path) -> Figures:
    """Run the suite "snapshots": measure sources with and without a state through Penstock, and some also through
    StatefulDataLoader. Return its measurements.

    folder: folder for the file in which sources count the calls of their state_dict.
    """
    stage.start([PENSTOCK, STATEFUL])
    pairs = [(PENSTOCK, case) for case in SNAPSHOTS]
    pairs += [(STATEFUL, case) for case in SNAPSHOTS if case.name in ("no state", "100 x 1 KiB")]
    figures: Figures = {case.name: {} for case in SNAPSHOTS}
    counter = folder / "states"
    for round_ in range(plan.state_rounds):
        say(f"snapshots: round {round_ + 1} of {plan.state_rounds}")
        for number in range(len(pairs)):
            name, case = pairs[(number + round_) % len(pairs)]
            if case.state_tensors is not None:
                counter.write_bytes(bytes(8))
                case = replace(case, counter=str(counter))
            figures[case.name].setdefault(name, []).append(stage.measure(name, case, plan.times))
    return figures


def _slots_once(slots: int, seconds: float, failures: list[str]) -> dict[str, Any] | None:
    command = [sys.executable, "-m", "benchmarks.slots", "--slots", str(slots), "--seconds", str(seconds)]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SLOTS_DEADLINE_S)
    except subprocess.TimeoutExpired:
        failures.append(f"{slots} slots: no result within {SLOTS_DEADLINE_S:.0f} s")
        return None
    if done.returncode:
        failures.append(f"{slots} slots: {(done.stderr.strip() or 'no word').splitlines()[-1]}")
        return None
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def slots(stage: Stage, plan: Plan) -> dict[str, list[dict[str, Any] | None]]:
    """Run the suite "slots". Return the results of benchmarks/slots.py of each round, by the number of slots."""
    figures: dict[str, list[dict[str, Any] | None]] = {str(count): [] for count in plan.slots}
    for round_ in range(plan.rounds):
        say(f"slots: round {round_ + 1} of {plan.rounds}")
        for count in turns(round_, list(figures)):
            figures[count].append(_slots_once(int(count), plan.slots_s, stage.failures))
    return figures


def startup(stage: Stage, plan: Plan) -> list[dict[str, Any] | None]:
    """Measure the time of a start: run benchmarks/slots.py with one slot, once in each round, and return its
    results."""
    say("start-up")
    return [_slots_once(1, 0.5, stage.failures) for _ in range(plan.rounds)]


SUITES: dict[str, Callable[[Stage, Plan, Path], Any]] = {
    "path": lambda stage, plan, _: path(stage, plan),
    "snapshots": snapshots,
    "slots": lambda stage, plan, _: {**slots(stage, plan), "1": startup(stage, plan)},
    "slow": lambda stage, plan, _: slow(stage, plan),
}
