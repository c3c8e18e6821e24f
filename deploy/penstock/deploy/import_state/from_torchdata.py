"""Position of torchdata's StatefulDataLoader over a map-style dataset: one state for each rank.

The state has the random generator of a shuffle. It has no generator if the order is that of the dataset or of a
DistributedSampler. The order of a DistributedSampler follows from the seed and the epoch, which the state does not
have. A state consists of a snapshot, and the number of batches since it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.deploy.import_state.begun_epoch import BegunEpoch, Ints, whole_steps
from penstock.deploy.import_state.foreign_files import count, foreign_state
from penstock.proto.errors import InvalidArgumentError, StateCorruptError, StateMismatchError, StateVersionError

__all__ = ["torchdata_epoch"]

LIBRARY = "torchdata's StatefulDataLoader"
WITHOUT_WORKERS = {"_sampler_iter_yielded", "_num_yielded", "_sampler_iter_state"}
WITH_WORKERS = {"_snapshot", "_steps_since_snapshot"}


@dataclass(frozen=True)
class _Rank:
    batches: int
    """Number of batches that the rank delivered before the snapshot."""
    rows: int
    """Number of rows that the rank delivered before the snapshot."""
    after: int
    """Number of batches that the rank delivered since the snapshot."""
    generator: Any
    ended: bool

    def progress(self) -> tuple[int, int, int, bool]:
        return self.batches, self.rows, self.after, self.ended


def torchdata_epoch(
    paths: Sequence[Path], rows: int, epoch: int, *, batch: int | None, shuffle: bool, seed: int
) -> BegunEpoch:
    """Return the epoch that the states of all ranks are in.

    Args:
        paths: file with the state of each rank, in order of rank.
        rows: number of rows of the dataset.
        batch: rows of a step, over all ranks; None: computed from the snapshot in the state, if that was made after a
            batch.
        epoch, shuffle, seed: arguments of a DistributedSampler, which the state does not have.

    Raises StateMismatchError for a state that has no row numbers, states of different steps, and ranks that each
    shuffled all rows; InvalidArgumentError if `batch` is needed and None; StateVersionError for an unknown version.
    """
    ranks = [_rank(path) for path in paths]
    first = ranks[0]
    for path, rank in zip(paths, ranks, strict=True):
        if rank.progress() != first.progress():
            raise StateMismatchError(
                f"all states must be of the same step, but {paths[0]} was saved after {first.batches + first.after} "
                f"batches of its epoch (snapshot after {first.batches}, with {first.rows} rows), and {path} after "
                f"{rank.batches + rank.after} (snapshot after {rank.batches}, with {rank.rows} rows). Pass the states "
                "that all ranks saved at the same step"
            )
    if not first.batches and batch is None:
        raise InvalidArgumentError(
            "--batch-size must be given, because the snapshot in the state was made before the first batch. Pass the "
            "number of rows of a step, over all ranks"
        )
    own = -(-first.rows // first.batches) if batch is None else -(-batch // len(ranks))
    """Number of rows in a batch of one rank."""
    if first.generator is None and (shuffle or len(ranks) > 1):
        order = _distributed(rows, len(ranks), own, epoch, shuffle=shuffle, seed=seed)
    elif first.generator is None:
        order = np.arange(rows, dtype=np.int64)
    elif len(ranks) == 1:
        order = _drawn(first.generator, rows)
    else:
        raise StateMismatchError(
            f"each of the {len(ranks)} ranks shuffled all rows by itself, so the ranks repeat each other's rows, and "
            "this epoch cannot be imported. Start the next epoch without a state"
        )
    delivered = len(order) if first.ended else min((first.rows + first.after * own) * len(ranks), len(order))
    step = whole_steps(delivered, own * len(ranks), len(order))
    # after the last, incomplete batch its size is known only from the number of batches
    steps = first.batches + first.after if delivered == len(order) else -(-len(order) // (own * len(ranks)))
    return BegunEpoch(epoch, order, delivered, epoch * steps + min(step, steps))


def _rank(path: Path) -> _Rank:
    state = foreign_state(path, LIBRARY, WITHOUT_WORKERS, WITH_WORKERS)
    after = count(path, state, "_steps_since_snapshot") if "_snapshot" in state else 0
    main: Any = state
    if "_snapshot" in state:
        snapshot = state["_snapshot"]
        main = snapshot.get("_main_snapshot") if isinstance(snapshot, Mapping) else None
        workers = snapshot.get("_worker_snapshots") if isinstance(snapshot, Mapping) else None
        streams = isinstance(workers, Mapping) and any(
            isinstance(worker, Mapping) and worker.get("fetcher_state") is not None for worker in workers.values()
        )
    else:
        streams = state.get("fetcher_state") is not None
    if streams:
        raise StateMismatchError(
            f"{path} must be the state of a map-style dataset, got one of an IterableDataset, which has no row "
            "numbers. Return the StatefulDataLoader itself from input_fn (docs/migrate.md), and load the state there"
        )
    inner = main.get("_sampler_iter_state") if isinstance(main, Mapping) else None
    if not isinstance(inner, Mapping) or "samples_yielded" not in inner:
        raise StateVersionError(
            f"{path} must be a state of {LIBRARY} as torchdata 0.10 and 0.11 write it, with samples_yielded of its "
            "batch sampler, got one of another version, or with a batch sampler of another class. Save the state with "
            "torchdata 0.11"
        )
    batches, yielded = count(path, main, "_sampler_iter_yielded"), count(path, inner, "samples_yielded")
    ended = state.get("_iterator_finished") is True
    sampler = inner.get("sampler_iter_state")
    generator = sampler.get("generator") if isinstance(sampler, Mapping) else None
    return _Rank(batches, yielded, after, generator, ended)


def _drawn(generator: Any, rows: int) -> Ints:
    """Return the permutation of the rows that torchdata's RandomSampler draws. `generator`: state of its random
    generator."""
    import torch

    if not isinstance(generator, torch.Tensor):
        raise StateCorruptError(
            f"the state's generator must be a tensor, got a {type(generator).__name__}. Pass an older state"
        )
    own = torch.Generator()
    try:
        own.set_state(generator)
    except (RuntimeError, TypeError) as error:
        raise StateCorruptError(f"the state's generator is damaged: {error}. Pass an older state") from error
    return np.asarray(torch.randperm(rows, generator=own).numpy(), np.int64)


def _distributed(rows: int, ranks: int, batch: int, epoch: int, *, shuffle: bool, seed: int) -> Ints:
    """Return the rows that ranks with a DistributedSampler deliver, step by step: in each step the batch of rank 0, of
    rank 1, and so on."""
    import torch.utils.data

    shares = []
    for rank in range(ranks):
        sampler = torch.utils.data.DistributedSampler(range(rows), ranks, rank, shuffle=shuffle, seed=seed)  # type: ignore[arg-type,var-annotated]
        sampler.set_epoch(epoch)
        shares.append(np.fromiter(sampler, np.int64))
    steps = range(0, len(shares[0]), batch)
    return np.concatenate([share[begin : begin + batch] for begin in steps for share in shares])
