"""Many histories: played by several clusters at a time, and compared."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from proof.driver import History, Outcome, World, reference
from proof.histories import Plan, plan_of
from proof.kinds import KINDS

__all__ = ["play", "run"]


def play(world: World, plan: Plan) -> Outcome:
    """Play one history, and compare it with the model."""
    return History(world, plan, reference(world, plan) if KINDS[plan.kind].is_function else None).play()


def run(
    seeds: Iterable[int],
    kinds: Sequence[str] = tuple(KINDS),
    *,
    mutation: str = "",
    parallel: int = 1,
    show: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Play the histories of these seeds, up to the first difference, on as many clusters at a time as `parallel` says,
    and return what they have shown."""
    waiting = list(seeds)[::-1]
    outcomes: list[Outcome] = []
    errors: list[BaseException] = []
    lock = threading.Lock()

    def work() -> None:
        try:
            with World.running() as world:
                while not errors:
                    with lock:
                        if not waiting or any(outcome.difference for outcome in outcomes):
                            return
                        seed = waiting.pop()
                    outcome = play(world, replace(plan_of(seed, kinds), mutation=mutation))
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
