"""States of a worker in an order of samples, a few integers each; aggregation and deaggregation of all workers' states.

A state contains the order's settings: a position means nothing in another order, so a mismatch is an error. Workers
share the batches from `start` of the epoch on; `done` counts one worker's since. With the same topology and skips each
continues there. Otherwise batches before the first that no worker has made are done, and the rest is divided anew. If
only batch size or skips differ, the worker whose turn it was goes next, because the box reads from it next. Positions
count skipped samples (skips.py). A resumed run may skip others after the position, but not more before it: those have
been delivered.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec.structs import replace

from penstock.data.ordering.epoch_plan import EpochPlan, EpochRemainder
from penstock.data.ordering.partition import Tail, WorkerTurn
from penstock.data.ordering.skips import Ranges, added_before
from penstock.proto.errors import StateCorruptError, StateMismatchError, StateVersionError
from penstock.proto.state.envelope import damaged_state

FORMAT = 3
VERSIONS = "versions"
"""Setting with the version of each stream's dataset; None: without versions."""
TAKEN = "taken"
"""Entry of an advanced state: `done` before the advance."""
NUMBER_LIMIT = 1 << 62
"""Exclusive bound of every number in a state."""
Number = Annotated[int, msgspec.Meta(ge=0, lt=NUMBER_LIMIT)]
Count = Annotated[int, msgspec.Meta(ge=1, lt=NUMBER_LIMIT)]


class Topology(msgspec.Struct, frozen=True):
    """Boxes, workers of each box, and samples in a global batch."""

    boxes: Count
    workers: Count
    batch: Count


class OrderProgress(msgspec.Struct, frozen=True):
    """Progress of one worker, or of all workers of a box. `msgspec.to_builtins` makes it an entry of a state."""

    epoch: Number
    start: Annotated[int, msgspec.Meta(gt=-NUMBER_LIMIT, lt=NUMBER_LIMIT)]
    """Position from which batches are counted; negative if samples of earlier epochs were left."""
    done: Number
    topology: Topology
    first: Number = 0
    """Worker, in each box, of the first batch after `start`."""

    @classmethod
    def parsed(cls, state: Mapping[str, Any]) -> OrderProgress:
        """Raises ValueError. The limits of `start` depend on the order."""
        progress = msgspec.convert(state, cls)
        if progress.first >= progress.topology.workers:
            raise ValueError(f"first must be below {progress.topology.workers}, got {progress.first}")
        return progress

    def turn(self, number: int) -> WorkerTurn:
        return WorkerTurn((number - self.first) % self.topology.workers, self.topology.workers)

    def of_worker(self, number: int) -> OrderProgress:
        return replace(self, done=self.turn(number).done(self.done))


def state_of(progress: OrderProgress, order: Mapping[str, Any], skip: Ranges = ()) -> dict[str, Any]:
    state = {"format": FORMAT, **msgspec.to_builtins(progress), "order": dict(order)}
    return {**state, "skip": [list(piece) for piece in skip]} if skip else state


def progress_of(state: Any) -> OrderProgress:
    """Raises StateMismatchError (another kind of loader), StateVersionError (another format), StateCorruptError."""
    check_format(state, "a StreamingLoader or MapLoader")
    try:
        progress = OrderProgress.parsed(state)
        skip_of(state)
    except (TypeError, ValueError) as error:
        raise damaged_state("the loader's state is damaged", error) from error
    return progress


def skip_of(state: Mapping[str, Any]) -> Ranges:
    """Return the saved run's skipped ranges. Raises TypeError or ValueError."""
    skip = tuple((first, end) for first, end in state.get("skip", ()))
    last = -1
    for number in (number for piece in skip for number in piece):
        if type(number) is not int or not last < number < NUMBER_LIMIT:
            raise ValueError(f"skip must be ascending ranges of sample numbers, got {state['skip']!r:.200}")
        last = number
    return skip


def epoch_to_begin(state: Mapping[str, Any], tail: Tail) -> int | None:
    """Return the epoch that begins at a state's position; None if it is within one, or unclear: one of several workers'
    states, no common position, or skipped samples."""
    progress, samples = progress_of(state), state["order"].get("samples")
    several = progress.topology.workers > 1 and "others" not in state
    if several or skip_of(state) or others_of(state, {}) or not isinstance(samples, list | int):
        return None
    length = samples if isinstance(samples, int) else sum(samples)
    epochs = EpochPlan(length, tail)
    epoch, start = _remainder(progress, epochs).position_after(progress.done)
    return epoch if start == 0 else None


def check_format(state: Any, loader: str, *names: str) -> None:
    """Raise `progress_of`'s errors for a format. `loader`: kind, for errors. `names`: entries besides "format" and
    "order"."""
    if not isinstance(state, Mapping) or not {"format", "order", *names} <= state.keys():
        raise StateMismatchError(f"the state must come from {loader}, got another loader's: {str(state)[:200]}")
    if type(state["format"]) is not int or state["format"] < 1 or not isinstance(state["order"], Mapping):
        raise StateCorruptError(
            f"a loader's state needs an integer 'format' >= 1 and a dict 'order', got {str(state)[:200]}"
        )
    if state["format"] != FORMAT:
        raise StateVersionError(
            f"the format of a loader's state must be {FORMAT}, got {state['format']} of another version of Penstock"
        )


def others_of(state: Mapping[str, Any], default: Any = None) -> Mapping[str, Any]:
    """Return by global_worker_id (text) the workers not at the common position. `default`: for one worker's state;
    None: StateCorruptError."""
    others = state.get("others", default)
    if not isinstance(others, Mapping):
        raise StateCorruptError(f"the loader's state is damaged: 'others' must be a dict, got {others!r:.200}")
    return others


def check_order(state: Mapping[str, Any], order: Mapping[str, Any], epochs: EpochPlan, *, strict: bool) -> None:
    """Raise StateMismatchError unless the state's order is `order` (strict=False: warn), StateCorruptError for a bad
    position."""
    differing = differences(state["order"], order)
    if differing:
        _refuse(f"the state was saved with another order of samples: {', '.join(differing.values())}", strict=strict)
        return
    least = -state["epoch"] * epochs.length if epochs.tail == "carry" else 0
    if not least <= state["start"] <= epochs.length or state["done"] > epochs.length - least:
        raise StateCorruptError(
            f"the loader's state is damaged: its position must lie in an epoch of {epochs.length} samples, got "
            f"{state['done']} batches after sample {state['start']}. Load an older state"
        )


def check_same_order(states: Sequence[Mapping[str, Any]]) -> None:
    """Raise StateMismatchError unless workers divided one order into the same batches: the run has lost or repeated
    samples."""
    orders = [{**state["order"], "topology": dict(state["topology"]), "skip": skip_of(state)} for state in states]
    for number, order in enumerate(orders):
        if order != orders[0] and (differing := differences(orders[0], order)):
            raise StateMismatchError(
                f"all workers must have the same order and topology. From worker 0 to worker {number}, "
                f"{', '.join(differing.values())}. Make the same loader on each, from a sorted list of files"
            )


def differences(was: Any, now: Any, path: str = "") -> dict[str, str]:
    """Return the differences of JSON values by path: {"source.length": "source.length was 128 and is 64 now"}."""
    if isinstance(was, Mapping) and isinstance(now, Mapping):
        texts: dict[str, str] = {}
        for name in {**was, **now}:
            inner = f"{path}.{name}" if path else str(name)
            if name not in now:
                texts[inner] = f"{inner} was {was[name]!r:.200} and is absent now"
            elif name not in was:
                texts[inner] = f"{inner} was absent and is {now[name]!r:.200} now"
            else:
                texts.update(differences(was[name], now[name], inner))
        return texts
    if isinstance(was, list | tuple) and isinstance(now, list | tuple):  # JSON turns a tuple into a list
        was, now = list(was), list(now)
        if len(was) == len(now):
            pairs = enumerate(zip(was, now, strict=True))
            return {name: text for at, pair in pairs for name, text in differences(*pair, f"{path}[{at}]").items()}
    return {} if was == now else {path: f"{path} was {was!r:.200} and is {now!r:.200} now"}


def common_progress(workers: Sequence[OrderProgress]) -> tuple[OrderProgress, list[int]]:
    """Return the common progress, before the first batch that no worker has made, and each worker's batches in that
    epoch."""
    newest = max(workers, key=lambda progress: progress.epoch)
    # A worker that is still at the end of the previous epoch has made no batch of this one.
    dones = [progress.done if progress.epoch == newest.epoch else 0 for progress in workers]
    batches = min(newest.turn(number % newest.topology.workers).batch(done) for number, done in enumerate(dones))
    return replace(newest, done=batches), dones


def _check_same_epochs(workers: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """Raise StateMismatchError for other sample numbers or `tail`. Seeds may differ: outside a worker the run's is
    unknown."""
    names = [name for name in ("samples", "tail") if workers.get(name) != identity.get(name)]
    if names:
        differing = ", ".join(
            f"{name} is {workers.get(name)!r} on the workers and {identity.get(name)!r} here" for name in names
        )
        raise StateMismatchError(
            f"the loader that aggregates must have the workers' data and settings: {differing}. Make the same one"
        )


def _refuse(message: str, *, strict: bool) -> None:
    if strict:
        raise StateMismatchError(f"{message}. Use the settings of the saved run, or load with strict=False to continue")
    warnings.warn(f"{message}. Samples may be missing or repeated in this epoch", UserWarning, stacklevel=5)


def replanned(state: Mapping[str, Any], epochs: EpochPlan, done: int, *, strict: bool) -> int:
    """Return each box's position after `done` batches from `start`, by the saved run's skips. StateMismatchError if the
    loader skips others before it (strict=False: warns)."""
    progress, saved = progress_of(state), skip_of(state)
    position = _remainder(progress, EpochPlan(epochs.length, epochs.tail, saved)).position(done)
    number = progress.epoch * epochs.length + position
    added = added_before(saved, epochs.skip, number)
    if added is not None:
        _refuse(
            f"skip must not have samples before the state's position, sample {number}, that were not skipped when the "
            f"state was saved, got {added[0]} to {added[1] - 1}. Load a state from before these samples",
            strict=strict,
        )
    return position


def aggregated(states: Sequence[Mapping[str, Any]], order: Mapping[str, Any], epochs: EpochPlan) -> dict[str, Any]:
    """Merge all workers' states. Topology and skips come from them, because this process may be no worker."""
    workers_progress, skip = [progress_of(state) for state in states], skip_of(states[0])
    check_same_order(states)
    _check_same_epochs(states[0]["order"], order)
    whole, _ = common_progress(workers_progress)
    whole = replace(whole, done=min(whole.done, _remainder(whole, EpochPlan(epochs.length, epochs.tail, skip)).batches))
    workers = whole.topology.workers
    others = {
        str(number): state_of(progress, {})
        for number, progress in enumerate(workers_progress)
        if progress != whole.of_worker(number % workers)
    }
    return {**state_of(whole, states[0]["order"], skip), "workers": len(states), "others": others}


def deaggregated(
    state: Mapping[str, Any], number: int, workers: int, topology: Topology, epochs: EpochPlan, *, strict: bool
) -> OrderProgress:
    whole = progress_of(state)
    same = state.get("workers") == workers and whole.topology.workers == topology.workers
    if same and whole.topology == topology and skip_of(state) == epochs.skip:
        other = others_of(state).get(str(number))
        return whole.of_worker(number % topology.workers) if other is None else progress_of(other)
    start = replanned(state, epochs, whole.done, strict=strict)
    if same:  # also at the epoch's end, which the worker notices by itself
        return OrderProgress(whole.epoch, start, 0, topology, (whole.first + whole.done) % topology.workers)
    remainder = epochs.remainder(whole.epoch, start, topology.batch, topology.boxes)
    return OrderProgress(*remainder.position_after(0), 0, topology)


def _remainder(progress: OrderProgress, epochs: EpochPlan) -> EpochRemainder:
    topology = progress.topology
    return epochs.remainder(progress.epoch, progress.start, topology.batch, topology.boxes)
