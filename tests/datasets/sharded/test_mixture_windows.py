"""A restart point older than a change of the mixture knows the change: random runs without the processes.

Changes are ordered ahead while workers are killed and replaced, each from any state that it has had. A save takes each
worker's state in any of the ways that a slot has: from its loader, by `advance_state` from an older state, or from a
second loader that replays. A run is resumed from any save on any topology, with the run's changes or without. Its rows
are those of the changes that apply, as a function of the position.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import pytest
from all_workers import saved
from tests.datasets.sharded.test_mixture_changes import ROWS, loader, source

from penstock.data import Mapped, Mixture, Schedule, ShardLoader
from penstock.data.sharded.mixture_changes import MixtureChange
from penstock.proto.state.assignment import Assignment, assigned

NAMES = "abcd"
TOPOLOGIES = [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (2, 3), (4, 1)]


def load(name: str) -> Any:
    return source(NAMES.index(name.partition(":")[2]))


@dataclass
class Worker:
    """A worker's present loader, and the states that it and the loaders before it returned."""

    loader: ShardLoader
    batches: Any
    done: int
    states: dict[int, list[Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Save:
    """State of all workers at a step."""

    run: Run
    step: int
    topology: tuple[int, int]
    first: int
    """Slot whose turn is next, if the topology stays."""
    aggregated: Any
    states: list[Any]
    changes: list[MixtureChange]
    """The changes that apply."""

    def fits(self, run: Run) -> bool:
        """Whether it may be resumed in a run: if no worker's state listed a change, only where the coordinator knows
        that change, and not beyond it."""
        listed = {one["key"] for one in self.aggregated.get("mixture_changes", ())}
        missing = [change for change in self.changes if change.key not in listed]
        return not missing or (self.run is run and all(one.position >= self.step * ROWS for one in missing))


class Run:
    """A run of a job and what it has had; `begin` starts its next attempt."""

    def __init__(self, draw: random.Random, by: str) -> None:
        self.draw, self.by = draw, by
        self.ordered: list[tuple[int, MixtureChange]] = []
        """(attempt, change) of the run, as the coordinator has them."""
        self.attempt = 0
        self.log: list[str] = []

    def begin(self, topology: tuple[int, int], save: Save | None = None) -> None:
        self.attempt += 1
        self.topology, self.started = topology, save
        self.begun = self.step = 0 if save is None else save.step
        old = [] if save is None else save.changes
        keys, own = {change.key for change in old}, {change.key for _, change in self.ordered}
        self.changes = [change for change in old if change.key not in own]
        self.changes += [one for _, one in self.ordered if one.key in keys or one.position >= self.step * ROWS]
        self.rows: list[Any] = []
        boxes, workers = topology
        self.workers = [self._resumed(number) for number in range(boxes * workers)]

    def _made(self, number: int) -> ShardLoader:
        boxes, workers = self.topology
        with assigned(Assignment(number // workers, boxes, number % workers, workers, 0, 1)):
            made = loader([2, 1], self.by)
            plain = [{**change.plain(), "required": attempt == self.attempt} for attempt, change in self.ordered]
            made.change_mixture(plain, load)
        return made

    def _resumed(self, number: int) -> Worker:
        made, save = self._made(number), self.started
        here = save is not None and save.run is self  # elsewhere a worker's own state may lack a change
        if save is not None and here and save.topology == self.topology and self.draw.random() < 0.5:
            made.load_state_dict(saved(save.states[number]))
        elif save is not None:
            made.load_state_dict(saved(made.deaggregate_state_dict(saved(save.aggregated))))
        worker = Worker(made, iter(made), 0)
        worker.states[0] = [saved(made.state_dict())]
        return worker

    def go(self, steps: int) -> None:
        boxes, workers = self.topology
        for _ in range(steps):
            rows = []
            for box in range(boxes):
                worker = self.workers[box * workers + self._slot()]
                rows.append(next(worker.batches))
                worker.done += 1
                if self.draw.random() < 0.5:
                    worker.states.setdefault(worker.done, []).append(saved(worker.loader.state_dict()))
            self.rows.append([rows[at % boxes][at // boxes] for at in range(ROWS)])
            self.step += 1

    def _slot(self) -> int:
        """Slot whose turn it is."""
        same = self.started is not None and self.started.topology == self.topology
        first = self.started.first if self.started is not None and same else 0
        return (first + self.step - self.begun) % self.topology[1]

    def order(self, ahead: int) -> None:
        """Change the weights, by the loader's own plan. Each worker is replaced."""
        names = self._names(self.changes)
        added = [name for name in NAMES[2:] if name not in names][: self.draw.randrange(2)]
        weights = {name: str(self.draw.randrange(4)) for name in names} | dict.fromkeys(added, "2")
        weights["a"] = "1"
        state = None if self.started is None else saved(self.started.aggregated)
        steps = self.step + ahead - self.begun
        functions = {name: f"sources:{name}" for name in added}
        _, begins, parts, _, _, functions = self._made(0).plan_change(steps, 0, state, weights, functions, [])
        assert begins == (0, (self.step + ahead) * ROWS)
        change = MixtureChange(str(len(self.ordered)) + f" {self.draw.random()}", begins[1], parts, functions)
        self.ordered.append((self.attempt, change))
        self.changes.append(change)
        for number in range(len(self.workers)):
            self.kill(number)

    def kill(self, number: int) -> None:
        """Replace a worker's loader. The next one starts from any of its states, and makes its batches again."""
        worker = self.workers[number]
        worker.loader = self._made(number)
        worker.batches = self._replayed(worker, worker.loader)

    def _replayed(self, worker: Worker, made: ShardLoader) -> Any:
        done, state = self._state(worker)
        made.load_state_dict(state)
        batches = iter(made)
        for _ in range(worker.done - done):
            next(batches)
        if self.draw.random() < 0.5:
            worker.states.setdefault(worker.done, []).append(saved(made.state_dict()))
        return batches

    def _state(self, worker: Worker) -> tuple[int, Any]:
        """A worker's state after any number of its batches, of any age. It may have been advanced without its
        loader."""
        done = self.draw.choice(list(worker.states))
        state, further = saved(self.draw.choice(worker.states[done])), self.draw.randrange(worker.done - done + 1)
        return (done + further, ShardLoader.advance_state(state, further)) if further % 2 else (done, state)

    def save(self) -> Save:
        states = []
        for number, worker in enumerate(self.workers):
            way = self.draw.choice(["loader", "advance", "replay"])
            if way == "loader":
                state = worker.loader.state_dict()
            elif way == "advance":
                done, state = self._state(worker)
                state = ShardLoader.advance_state(state, worker.done - done)
            else:
                made = self._made(number)
                self._replayed(worker, made)
                state = made.state_dict()
            states.append(saved(state))
        aggregated = saved(loader([2, 1], self.by).aggregate_state_dict(states))  # by the training process
        knows = max(states, key=lambda state: len(state.get("mixture_changes", ())))
        assert aggregated.get("mixture_changes") == knows.get("mixture_changes")
        return Save(self, self.step, self.topology, self._slot(), aggregated, states, list(self.changes))

    @staticmethod
    def _names(changes: list[MixtureChange]) -> list[str]:
        return list(dict.fromkeys(["a", "b", *(name for change in changes for name in change.added)]))

    def check(self) -> None:
        names, segments = self._names(self.changes), {0: {"a": 2, "b": 1}}
        for change in self.changes:
            segments = {at: parts for at, parts in segments.items() if at < change.position}
            segments[change.position] = dict(change.parts)
        schedule = Schedule({at: [parts.get(name, 0) for name in names] for at, parts in segments.items()})
        mixture = Mixture({name: source(NAMES.index(name)) for name in names}, schedule, by=self.by)  # type: ignore[arg-type]
        whole = ShardLoader(
            Mapped(mixture, list), global_batch_size=ROWS, block=ROWS, partitions=2, seed=3, collate_fn=list
        )
        expected = list(islice(whole, self.begun, self.step))
        assert self.rows == expected


@pytest.mark.parametrize("seed", range(8))
def test_random_runs_with_changes(seed: int) -> None:
    draw = random.Random(seed)
    run, saves = Run(draw, draw.choice(["samples", "samples", "tokens"])), list[Save]()
    run.begin(draw.choice(TOPOLOGIES))
    for _ in range(draw.randrange(10, 30)):
        action = draw.choice(["go", "go", "order", "kill", "save", "save", "resume"])
        usable = [save for save in saves if save.fits(run)]
        if action == "go":
            run.go(draw.randrange(1, 8))
        elif action == "order":
            run.order(draw.randrange(12))
        elif action == "kill":
            run.kill(draw.randrange(len(run.workers)))
        elif action == "save":
            saves.append(run.save())
        elif usable:
            run.check()
            save = draw.choice(usable)
            other = Run(draw, run.by)
            run = other if save.fits(other) and draw.random() < 0.3 else run
            run.begin(draw.choice([save.topology, draw.choice(TOPOLOGIES)]), save)
    run.go(3)
    run.check()
