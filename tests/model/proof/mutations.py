"""Small faults of the product's own code, put in on purpose: a proof that does not see them proves nothing.

A fault is put into the processes that run user code, by the user's code: into a slot's process when it calls input_fn,
so into its children too; and into the training process. Most are replacements in the source of one function. If the
source has changed so that the text is not there, the mutation is to be written anew: the mistake that it stands for can
still be made.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

__all__ = ["MUTATIONS", "Mutation", "apply", "mutable", "replaced"]


@dataclass(frozen=True)
class Replacement:
    """Text in the source of a function, and what stands there instead."""

    module: str
    function: str
    old: str
    new: str


@dataclass(frozen=True)
class Mutation:
    kinds: tuple[str, ...]
    """Loaders that show it."""
    replacements: tuple[Replacement, ...] = ()
    more: Callable[[], None] = lambda: None
    """What is changed besides, before."""
    of_both_sides: bool = False
    """True if it is put into the training process too: else one side notices the other's."""


def _digest_of_64_words() -> None:
    from xxhash import xxh3_64_intdigest

    from penstock.proto.batch import digest

    def few(seed: int, memory: memoryview, offset: int, nbytes: int, full: bool, *more: Any) -> int:
        if nbytes <= 128 << 10:
            return int(original(seed, memory, offset, nbytes, full, *more))
        words = (bytes(memory[place : place + 8]) for place in range(offset, offset + nbytes - 8, nbytes // 64))
        return xxh3_64_intdigest(b"".join(words), seed=seed & (2**64 - 1))

    original = replaced(digest, "region_digest", few)


def _two_epochs(stream: Any) -> None:
    """Stream an epoch, and each second time the next one too, with the same objects."""
    stream.stream_epoch()
    producer, position = stream.producer, stream.source.position
    if not position.epoch % 2 or stream.source.is_open:
        return
    while producer.open_epochs < position.epoch and not producer.abandoned:
        stream.serve(None)
    if not producer.abandoned:
        stream.source._unused = True
        stream.open_epoch()
        stream.stream_epoch()


def _lossy(stream: Any, goal: Any, run_epoch: Any, *given: Any) -> Any:
    """Take the last record for that of a child which has died without one."""
    from penstock.worker.runner import epoch_process

    class LostError(Exception):
        pass

    def lost(status: int) -> None:
        raise LostError

    original = replaced(epoch_process, "die_like", lost)
    try:
        return run_epoch(*given)
    except LostError:
        position = [(goal.epoch if goal else 0) + 1, 0, stream.producer.delivered, 0]
        producer, fds = stream.producer.hand_over()
        record = {"why": "over", "position": position, "producer": producer, "lane_fds": len(fds), "seeds": []}
        empty = {"unfinished": b"", "hello": b"", "points": [], "firsts": [], "iterable": False}
        return epoch_process.Outcome({**record, **empty}, fds)
    finally:
        epoch_process.die_like = original


def _offer(module: str, function: Callable[..., Any]) -> Callable[[], None]:
    """Return what puts a function among the globals of a module."""
    return lambda: setattr(importlib.import_module(module), function.__name__, function)


GENERATORS = "penstock.worker.loader.loader_generators"
TRAVEL = "penstock.worker.loader.travel"
RUNNER = "penstock.worker.runner.epoch_runner"
STREAM = "penstock.worker.runner.slot_stream"
WORKER_INFO = "penstock.worker.loader.worker_info"
_CHAINS = "if goal.chain and source.chain and source.chain != goal.chain:"
_MADE = "if known is not None and"
MUTATIONS = {
    "a digest of 64 words": Mutation(("entropy",), more=_digest_of_64_words, of_both_sides=True),
    "no seeding anew": Mutation(
        ("own generators", "StatefulDataLoader"),
        (Replacement(GENERATORS, "LoaderGenerators.begin", "if epoch or path:", "if False:"),),
    ),
    "a restore that is not compared": Mutation(
        ("lies at once", "entropy"),
        (
            Replacement(TRAVEL, "finish", _CHAINS, "if False:"),
            Replacement(TRAVEL, "finish", "if goal.ends or goal.next_digest:", "if False:"),
            Replacement(STREAM, "SlotStream._compared", _MADE, "if False and"),
        ),
    ),
    "a process that makes two epochs": Mutation(
        ("memoised", "counts epochs", "detshuffle", "keeps its place", "file at import"),
        (Replacement(RUNNER, "EpochRunner._child", "stream.stream_epoch()", "_two_epochs(stream)"),),
        _offer(RUNNER, _two_epochs),
    ),
    "a worker info that sticks": Mutation(
        ("worker info",),
        (Replacement(WORKER_INFO, "_answer", "if own_worker is not None or answers is None", "if answers is None"),),
    ),
    "a record that is lost between END and the hand-over": Mutation(
        ("dies",),
        (Replacement(RUNNER, "EpochRunner._in_child", "= run_epoch(", "= _lossy(stream, goal, run_epoch, "),),
        _offer(RUNNER, _lossy),
    ),
}


# ---- putting them in


_applied: set[str] = set()
_sources: dict[str, str] = {}
"""Functions that have been changed, with their present text."""


def replaced(module: ModuleType, name: str, value: Any) -> Any:
    """Put a value in the place of a module's, there and wherever it was imported. Return the value before."""
    original = getattr(module, name)
    for other in list(sys.modules.values()):
        if getattr(other, "__name__", "").startswith("penstock.") and vars(other).get(name) is original:
            setattr(other, name, value)
    return original


def apply(name: str) -> None:
    """Put a mutation into this process, once."""
    if not name or name in _applied:
        return
    _applied.add(name)
    mutation = MUTATIONS[name]
    mutation.more()
    for change in mutation.replacements:
        _replace(change)


def _replace(change: Replacement) -> None:
    module = importlib.import_module(change.module)
    holder, _, attribute = change.function.rpartition(".")
    owner: Any = getattr(module, holder) if holder else module
    place = f"{change.module}.{change.function}"
    source = _sources.get(place) or textwrap.dedent(inspect.getsource(getattr(owner, attribute)))
    assert change.old in source, f"write this mutation anew: {change}"
    names: dict[str, Any] = {}
    _sources[place] = changed = source.replace(change.old, change.new)
    future = "from __future__ import annotations\n"
    exec(compile(future + changed, f"<mutation of {change.function}>", "exec"), vars(module), names)
    getattr(owner, attribute).__code__ = names[attribute].__code__  # so that whoever has the function has it changed


def mutable(input_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate an input_fn so that it takes `mutation`: the name of what to put into the process that calls it."""

    def made(*args: Any, mutation: str = "", **kwargs: Any) -> Any:
        apply(mutation)
        return input_fn(*args, **kwargs)

    for name in ("__module__", "__name__", "__qualname__", "__doc__"):
        setattr(made, name, getattr(input_fn, name))
    return made
