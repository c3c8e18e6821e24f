"""Where a worker stands in a dataset's order, as a state of a few integers; and all workers' states as one.

A state names the order that it is a place in: a fingerprint of the data, and the settings that decide the order. A
place in another order means nothing, so a mismatch is an error that names both.

The workers of one shape deal out batches from `start` on; each has done some. That is exact for the same topology. For
another one the batches that all of them have done are used up, and a new dealing starts behind them. Where the workers
are the same and only the batches are others, the turn stays with the worker whose turn it was, for a box goes on asking
there.

What is left out of the order (skips.py) is no part of it: a state says what was left out, for that tells which samples
its batches had, and then stands for a position in the whole order. Behind the position anything may be left out on a
resume. Before it, leaving out more would pretend that samples were not seen that were: an error.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.data.ordering.epoch_plan import EpochPlan, EpochRemainder
from penstock.data.ordering.partition import WorkerTurn
from penstock.data.ordering.skips import Ranges, added_behind
from penstock.proto.errors import InvalidArgumentError, StateCorruptError, StateMismatchError, StateVersionError

__all__ = [
    "OrderProgress",
    "Topology",
    "aggregated",
    "check_format",
    "check_order",
    "deaggregated",
    "others_of",
    "progress_of",
    "replanned",
    "skip_of",
    "state_of",
]

FORMAT = 2
PLAIN_FORMAT = 1
"""Of a state in which nothing is left out."""
MOST = 1 << 62
"""Of any number in a state."""


@dataclass(frozen=True)
class Topology:
    """Who shares the batches: boxes, workers of each box, and samples of a global batch."""

    boxes: int
    workers: int
    batch: int


@dataclass(frozen=True)
class OrderProgress:
    epoch: int
    start: int
    """Position in the epoch where this dealing began; negative where samples of the epoch before were left over."""
    done: int
    """Batches of this worker since."""
    topology: Topology
    """Of the dealing."""
    first: int = 0
    """The worker of each box that makes the dealing's first batch."""

    def plain(self) -> dict[str, Any]:
        """As a state has it. Written out: a loop may ask at every step, and `asdict` takes 10 us."""
        topology = {"boxes": self.topology.boxes, "workers": self.topology.workers, "batch": self.topology.batch}
        return {"epoch": self.epoch, "start": self.start, "done": self.done, "topology": topology, "first": self.first}

    @classmethod
    def parsed(cls, state: Mapping[str, Any]) -> OrderProgress:
        """The way back. Raises KeyError, TypeError or ValueError for what cannot be; what `start` may be is not looked
        at, for that depends on the order."""
        topology = Topology(**state["topology"])
        progress = cls(state["epoch"], state["start"], state["done"], topology, state["first"])
        numbers = [progress.epoch, progress.done, topology.boxes - 1, topology.workers - 1, topology.batch - 1]
        numbers += [progress.first, topology.workers - 1 - progress.first]
        if any(type(number) is not int or not 0 <= number < MOST for number in numbers):
            raise ValueError(f"{progress}")
        return progress

    def turn(self, number: int) -> WorkerTurn:
        """Of a box's worker of this number."""
        return WorkerTurn((number - self.first) % self.topology.workers, self.topology.workers)

    def of_worker(self, number: int) -> OrderProgress:
        """The place of a box's worker, where the box has had `done` batches."""
        return replace(self, done=self.turn(number).done(self.done))


def state_of(progress: OrderProgress, order: Mapping[str, Any], skip: Ranges = ()) -> dict[str, Any]:
    """The state of one worker."""
    state = {"format": PLAIN_FORMAT, **progress.plain(), "order": dict(order)}
    if skip:
        state |= {"format": FORMAT, "skip": [list(piece) for piece in skip]}
    return state


def progress_of(state: Any) -> OrderProgress:
    """The way back.

    Raises StateMismatchError, StateVersionError or StateCorruptError for what is no such state, a newer one, or
    damaged.
    """
    check_format(state, "a StreamingLoader or MapLoader", FORMAT)
    try:
        progress = OrderProgress.parsed(state)
        if type(progress.start) is not int or not -MOST < progress.start < MOST:
            raise ValueError(f"{progress}")
        skip_of(state)
    except (KeyError, TypeError, ValueError) as error:
        raise StateCorruptError(f"a loader's state that cannot be: {error!r}") from error
    return progress


def skip_of(state: Mapping[str, Any]) -> Ranges:
    """What was left out when it was saved. Raises TypeError or ValueError for what cannot be."""
    skip = tuple((first, end) for first, end in state.get("skip", ()))
    last = -1
    for number in (number for piece in skip for number in piece):
        if type(number) is not int or not last < number < MOST:
            raise ValueError(f"skip={state['skip']!r:.200}")
        last = number
    return skip


def check_format(state: Any, loader: str, newest: int, *names: str) -> None:
    """Raises StateMismatchError for what is no state of this kind of loader, which has entries of these names beside
    those of all; StateVersionError for one of a format beyond `newest`; StateCorruptError for a damaged one."""
    if not isinstance(state, Mapping) or not {"format", "order", *names} <= state.keys():
        raise StateMismatchError(f"a state of another loader: {str(state)[:200]}; expected one of {loader}")
    if type(state["format"]) is not int or state["format"] < 1 or not isinstance(state["order"], Mapping):
        raise StateCorruptError(f"a loader's state that cannot be: {str(state)[:200]}")
    if state["format"] > newest:
        raise StateVersionError(
            f"the loader's state has format {state['format']}, written by a newer Penstock; this one reads formats up "
            f"to {newest}. Upgrade Penstock here"
        )


def others_of(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of the state of all workers: those that are elsewhere than it says, by global_worker_id."""
    others = state.get("others")
    if not isinstance(others, Mapping):
        raise StateCorruptError(f"a loader's state that cannot be: others is {others!r:.200}")
    return others


def check_order(state: Mapping[str, Any], order: Mapping[str, Any], epochs: EpochPlan, *, strict: bool) -> None:
    """Raises StateMismatchError if the state is a place in another order; without `strict` it is a warning. And
    StateCorruptError if it is none in this one."""
    saved = state["order"]
    names = [name for name in {**saved, **order} if saved.get(name) != order.get(name)]
    if not names:
        least = -state["epoch"] * epochs.length if epochs.tail == "carry" else 0
        if not least <= state["start"] <= epochs.length or state["done"] > epochs.length - least:
            raise StateCorruptError(
                f"a loader's state that cannot be: {state['done']} batches from sample {state['start']} on, of "
                f"{epochs.length} samples"
            )
        return
    differing = ", ".join(f"{name} was {saved.get(name)!r} and is {order.get(name)!r}" for name in names)
    _refuse(f"the state was saved with another order of samples: {differing}", strict=strict)


def _check_same_order(states: Sequence[Mapping[str, Any]]) -> None:
    """Raises StateMismatchError if the workers do not all deal out the same order, in the same batches. Samples have
    been lost and repeated then."""
    first = _settings(states[0])
    for number, state in enumerate(states):
        settings = _settings(state)
        names = [name for name in {**first, **settings} if first.get(name) != settings.get(name)]
        if names:
            differing = ", ".join(f"{name} {first.get(name)!r} and {settings.get(name)!r}" for name in names)
            raise StateMismatchError(
                f"worker {number} makes batches of another order than worker 0, so samples were lost and repeated: of "
                f"worker 0 and then of worker {number}, {differing}. Make the same loader in each"
            )


def _check_same_epochs(workers: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """Raises StateMismatchError if the epochs that are counted here are not those of the workers. The seed may be
    another: outside of a worker there is none of a run."""
    names = [name for name in ("samples", "tail") if workers.get(name) != identity.get(name)]
    if names:
        differing = ", ".join(
            f"{name} is {workers.get(name)!r} there and {identity.get(name)!r} here" for name in names
        )
        raise StateMismatchError(
            f"the workers' states are put together by a loader of other data or settings: {differing}. Make the same "
            "loader in the training process as on the workers"
        )


def _settings(state: Mapping[str, Any]) -> dict[str, Any]:
    """All that workers have in common, whatever they have done."""
    return {**state["order"], "topology": dict(state["topology"]), "skip": skip_of(state)}


def _refuse(message: str, *, strict: bool) -> None:
    if strict:
        raise StateMismatchError(f"{message}. Use what it was saved with, or load it with strict=False to go on anyway")
    warnings.warn(f"{message}; samples may be missing or repeated in this epoch", UserWarning, stacklevel=5)


def replanned(state: Mapping[str, Any], epochs: EpochPlan, done: int, *, strict: bool) -> int:
    """The position of a state, `done` batches of each box behind where its dealing began, for one who leaves out what
    `epochs` says now.

    Raises StateMismatchError, or warns without `strict`, if more is left out before the position than was then.
    """
    place, saved = progress_of(state), skip_of(state)
    position = _remainder(place, replace(epochs, skip=saved)).position(done)
    number = place.epoch * epochs.length + position
    added = added_behind(saved, epochs.skip, number)
    if added is not None:
        _refuse(
            f"skip: samples {added[0]} to {added[1] - 1} cannot be left out any more, for the state is behind them, at "
            f"sample {number}; load a state from before them",
            strict=strict,
        )
    return position


def aggregated(states: Sequence[Mapping[str, Any]], order: Mapping[str, Any], epochs: EpochPlan) -> dict[str, Any]:
    """One state from those of all workers, in order of global_worker_id. Called anywhere: only the states know the
    shape, and what is left out. `order`: of the loader that is asked."""
    if not states:
        raise InvalidArgumentError("aggregate_state_dict() of no states: it takes those of all workers")
    places, skip = [progress_of(state) for state in states], skip_of(states[0])
    _check_same_order(states)
    _check_same_epochs(states[0]["order"], order)
    newest = max(places, key=lambda place: place.epoch)
    workers = newest.topology.workers
    # Who is still at the end of the epoch before has done nothing of this one.
    dones = [place.done if place.epoch == newest.epoch else 0 for place in places]
    batches = min(newest.turn(number % workers).batch(done) for number, done in enumerate(dones))
    batches = min(batches, _remainder(newest, replace(epochs, skip=skip)).batches)
    whole = replace(newest, done=batches)
    others = {
        str(number): state_of(place, {})
        for number, place in enumerate(places)
        if place != whole.of_worker(number % workers)
    }
    return {**state_of(whole, states[0]["order"], skip), "workers": len(states), "others": others}


def deaggregated(
    state: Mapping[str, Any], number: int, workers: int, topology: Topology, epochs: EpochPlan, *, strict: bool
) -> OrderProgress:
    """The place of worker `number` (global_worker_id) of `workers` in all, which have this topology."""
    whole = progress_of(state)
    same = state.get("workers") == workers and whole.topology.workers == topology.workers
    if same and whole.topology == topology and skip_of(state) == epochs.skip:
        other = others_of(state).get(str(number))
        return whole.of_worker(number % topology.workers) if other is None else progress_of(other)
    start = replanned(state, epochs, whole.done, strict=strict)
    if same:  # at the epoch's end, too: that is still to be found out, as it would be with the same batches
        return OrderProgress(whole.epoch, start, 0, topology, (whole.first + whole.done) % topology.workers)
    return OrderProgress(*epochs.remainder(whole.epoch, start, topology.batch, topology.boxes).place(0), 0, topology)


def _remainder(place: OrderProgress, epochs: EpochPlan) -> EpochRemainder:
    return epochs.remainder(place.epoch, place.start, place.topology.batch, place.topology.boxes)
