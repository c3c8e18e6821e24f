"""Position of Grain's DataLoader: one state for each process, and the order from Grain's own sampler.

A state names its sampler with all of its arguments, and the last index that each worker of the process has used. Worker
w of W reads the indexes w, w + W, ... of its process.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.deploy.import_state.begun_epoch import BegunEpoch, whole_steps
from penstock.deploy.import_state.foreign_files import count, foreign_state
from penstock.deploy.import_state.foreign_order import order_by
from penstock.proto.errors import StateCorruptError, StateMismatchError, StateVersionError

__all__ = ["grain_epoch"]

LIBRARY = "Grain's DataLoader"
VERSION = 2
"""Version of the format of Grain's states that can be read."""
_SHARDING = re.compile(
    r"shard_options=(NoSharding|ShardOptions)\(shard_index=(\d+), shard_count=(\d+), drop_remainder=(True|False)\)"
)
_SAMPLER = re.compile(
    r"(?:Index|Sequential)Sampler\(num_records=(\d+), @(?:, shuffle=(True|False), num_epochs=(\d+|None), "
    r"seed=(\d+|None))?\)"
)


@dataclass(frozen=True)
class _Sampler:
    sequential: bool
    records: int
    sharded: bool
    shards: int
    drop_remainder: bool
    shuffle: bool
    seed: int | None

    def lengths(self) -> list[int]:
        """Return the length of each shard: the number of records that one process reads in an epoch. (Grain calls the
        records of one process a shard.)"""
        share, rest = divmod(self.records, self.shards)
        return [share + (shard < rest and not self.drop_remainder) for shard in range(self.shards)]


@dataclass(frozen=True)
class _Process:
    shard: int
    sampler: _Sampler
    used: Sequence[int]
    """Number of indexes that each worker of the process has used."""

    def next_index(self) -> int:
        """Return the first index of this process that no worker has used."""
        return min(worker + len(self.used) * used for worker, used in enumerate(self.used))

    def ahead(self, begin: int, length: int) -> npt.NDArray[np.bool_]:
        """Return which indexes of an epoch workers have used: True at i if a worker has used index `begin` + i; bool,
        shape (length,). `begin`: first index of the epoch; `length`: number of its indexes.

        Raises StateMismatchError if a worker has used indexes of a later epoch.
        """
        flags = np.zeros(length, bool)
        for worker, used in enumerate(self.used):
            own = worker + len(self.used) * np.arange(used, dtype=np.int64) - begin
            if len(own) and own[-1] >= length:
                raise StateMismatchError(
                    f"all workers must be in epoch {begin // length}, but worker {worker} is already in the next one. "
                    "Pass a state that was saved some steps before or after the end of the epoch"
                )
            flags[own[own >= 0]] = True
        return flags


def grain_epoch(paths: Sequence[Path], batch: int, python: str) -> tuple[BegunEpoch, int]:
    """Return the epoch that the states of all processes are in, and the number of records of the data.

    Args:
        paths: file with the state of each process, in any order.
        batch: records of a step, of all processes together.
        python: interpreter that has Grain.
    """
    found = sorted((_process(path) for path in paths), key=lambda process: process.shard)
    sampler = found[0].sampler
    if any(process.sampler != sampler for process in found):
        raise StateMismatchError("all states must have the same sampler, got several. Pass the states of one run")
    if [process.shard for process in found] != list(range(sampler.shards)):
        raise StateMismatchError(
            f"a state of each of the {sampler.shards} processes (shard_count) must be given, got those of "
            f"the processes {', '.join(str(process.shard) for process in found)}. Pass one file each, all of the "
            "same step"
        )
    step = whole_steps(sum(sum(process.used) for process in found), batch)
    lengths = sampler.lengths()
    epochs = {process.next_index() // length for process, length in zip(found, lengths, strict=True)}
    if len(epochs) > 1:
        raise StateMismatchError(
            f"all processes must be in one epoch, got the epochs {', '.join(map(str, sorted(epochs)))}. Pass states "
            "that were saved some steps before or after the end of an epoch"
        )
    epoch = epochs.pop()
    if sampler.sequential:
        per = sampler.records // sampler.shards
        lengths = [per] * sampler.shards
        keys = [shard + sampler.shards * np.arange(per, dtype=np.int64) for shard in range(sampler.shards)]
    else:
        request = {
            "records": sampler.records,
            "shards": sampler.shards,
            "sharded": sampler.sharded,
            "drop_remainder": sampler.drop_remainder,
            "shuffle": sampler.shuffle,
            "seed": sampler.seed,
            "epoch": epoch,
            "lengths": lengths,
        }
        keys = np.split(order_by(python, "grain_order", request), np.cumsum(lengths)[:-1])
    flags = [process.ahead(epoch * length, length) for process, length in zip(found, lengths, strict=True)]
    delivered = np.concatenate([own[used] for own, used in zip(keys, flags, strict=True)])
    left = np.concatenate([own[~used] for own, used in zip(keys, flags, strict=True)])
    turn = np.argsort(np.concatenate([np.flatnonzero(~used) for used in flags]), kind="stable")
    return BegunEpoch(epoch, np.concatenate([delivered, left[turn]]), len(delivered), step), sampler.records


def _process(path: Path) -> _Process:
    state = foreign_state(path, LIBRARY, {"version", "last_seen_indices", "worker_count", "sampler"})
    if state["version"] != VERSION:
        raise StateVersionError(
            f"{path}: the version of a state of {LIBRARY} must be {VERSION}, got {state['version']!r:.80}. Save the "
            "state with Grain 0.2"
        )
    sampler, shard = _sampler(path, state["sampler"])
    workers, seen = count(path, state, "worker_count") or 1, state["last_seen_indices"]
    if not isinstance(seen, Mapping) or sorted(seen) != sorted(str(worker) for worker in range(workers)):
        raise StateCorruptError(
            f"{path}: last_seen_indices must name {workers} workers, got {seen!r:.200}. Pass an older state"
        )
    used = [
        _used(path, seen[str(worker)], shard + sampler.shards * worker, sampler.shards * workers)
        for worker in range(workers)
    ]
    return _Process(shard, sampler, used)


def _used(path: Path, last: Any, first: int, stride: int) -> int:
    """Return the number of indexes that a worker has used.

    Args:
        path: file with the state, for errors.
        last: last index that the worker has used, as the state has it.
        first: first index that the worker reads.
        stride: distance between the indexes that the worker reads.
    """
    if type(last) is not int or (last - first) % stride or last < first - stride:
        raise StateCorruptError(
            f"{path}: last_seen_indices must have, for this worker, {first} plus a multiple of {stride}, got "
            f"{last!r:.80}. Pass an older state"
        )
    return (last - first) // stride + 1


def _sampler(path: Path, text: Any) -> tuple[_Sampler, int]:
    sharding = _SHARDING.search(text) if isinstance(text, str) else None
    found = _SAMPLER.fullmatch(text.replace(sharding[0], "@")) if sharding is not None else None
    if sharding is None or found is None:
        raise StateVersionError(
            f"{path} must have an IndexSampler or a SequentialSampler as Grain 0.2 writes them, got {text!r:.300}. "
            "With a sampler of your own, list the rows yourself (docs/migrate.md)"
        )
    kind, shard, shards, drop = sharding.groups()
    records, shuffle, _, seed = found.groups()
    if not int(shard) < int(shards) <= int(records):
        raise StateCorruptError(
            f"{path}: shard_index must be below shard_count, and shard_count at most num_records, got {shard}, "
            f"{shards} and {records}. Pass the state as Grain saved it, or start the epoch without a state"
        )
    sampler = _Sampler(
        text.startswith("Seq"),
        int(records),
        kind == "ShardOptions",
        int(shards),
        drop == "True",
        shuffle == "True",
        None if seed in (None, "None") else int(seed),
    )
    return sampler, int(shard)
