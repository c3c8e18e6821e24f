"""Many histories: played by several clusters at a time, compared, and counted."""

from __future__ import annotations

import shlex
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from proof.driver import AFTER, History, Launched, Outcome, World, reference
from proof.histories import Launch, Plan, changed, plan_of
from proof.kinds import KINDS

__all__ = ["again", "play", "run", "table"]


def again(seed: int, arguments: Sequence[str] = ()) -> str:
    """Return the command that plays a history again."""
    more = f" HISTORIES_ARGS={shlex.quote(' '.join(arguments))}" if arguments else ""
    return f"make histories SEED={seed} RUNS=1{more}"


def play(world: World, plan: Plan, against: str = "model") -> Outcome:
    """Play one history. against: "model", or "undisturbed": the product's own batches without a fault."""
    expected = None
    if KINDS[plan.kind].is_function:
        expected = reference(world, plan)
        if against == "undisturbed":
            expected = _undisturbed(world, plan, expected)
            if expected is None:
                return Outcome(plan, skipped=True)
    return History(world, plan, expected).play()


def _undisturbed(world: World, plan: Plan, model: list[Launched]) -> list[Launched] | None:
    """Return what each box receives in each launch, if the product makes the same batches in one launch without a fault
    or a save; None if a launch of the plan resumes where a loop was left, which is another sequence of operations."""
    last = max(launch.stop for launch in plan.launches)
    calm = changed(plan, launches=(Launch(last + AFTER, False, (), ()),), faults=((),))
    (straight,) = reference(world, calm)
    for launch, boxes in zip(plan.launches, model, strict=True):
        for box, row in enumerate(boxes):
            begins = launch.resume
            if [_place(made) for made in row] != [_place(made) for made in straight[box][begins : begins + len(row)]]:
                return None
    history = History(world, calm, [])
    outcome = history.play()
    assert not outcome.difference, f"undisturbed: {outcome.difference}"
    got = [[box[step] for step in sorted(box)] for box in history.got[0]]
    return [[box[launch.resume :] for box in got] for launch in plan.launches]


def _place(made: dict[str, Any]) -> tuple[int, int, int]:
    return made["slot"], made["epoch"], made["number"]


def run(
    seeds: Iterable[int],
    kinds: Sequence[str] = tuple(KINDS),
    *,
    against: str = "model",
    mutation: str = "",
    parallel: int = 1,
    stops: bool = True,
    show: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Play the histories of these seeds, on as many clusters at a time as `parallel` says, and return what they have
    shown. stops: True to play no more after a difference."""
    waiting = list(seeds)[::-1]
    outcomes: list[Outcome] = []
    errors: list[BaseException] = []
    lock = threading.Lock()

    def work() -> None:
        try:
            with World.running() as world:
                while not errors:
                    with lock:
                        if not waiting or (stops and any(outcome.difference for outcome in outcomes)):
                            return
                        seed = waiting.pop()
                    outcome = play(world, changed(plan_of(seed, kinds), mutation=mutation), against)
                    with lock:
                        outcomes.append(outcome)
                        show(outcome)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(parallel)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return sorted(outcomes, key=lambda outcome: outcome.plan.seed)


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the counts per (kind of loader x operation)."""
    counts: dict[str, Counter[str]] = {}
    for outcome in outcomes:
        row = counts.setdefault(outcome.plan.kind, Counter())
        row["histories"] += 1
        row["steps"] += outcome.steps
        row["above 128 KiB"] += outcome.large
        row["named errors"] += bool(outcome.named)
        row["differences"] += bool(outcome.difference)
        row.update(outcome.done)
    first = ["histories", "steps", "above 128 KiB", "named errors", "differences"]
    names = [*first, *sorted({name for row in counts.values() for name in row} - {*first})]
    total: Counter[str] = Counter()
    for row in counts.values():
        total.update(row)
    lines = ["| loader | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for kind, row in [*sorted(counts.items()), ("**all**", total)]:
        lines.append(f"| {kind} | " + " | ".join(str(row[name]) for name in names) + " |")
    return "\n".join(lines)
