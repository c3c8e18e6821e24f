"""Position of mosaicml-streaming: one state for all ranks, and the order from mosaicml-streaming's own code.

This order is elastically deterministic: the first n samples that all ranks deliver together are the first n of one
list, for any number of nodes, ranks and workers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from penstock.deploy.import_state.begun_epoch import BegunEpoch, whole_steps
from penstock.deploy.import_state.foreign_files import count, foreign_state
from penstock.deploy.import_state.foreign_order import order_by
from penstock.proto.errors import InvalidArgumentError, StateMismatchError, StateVersionError

__all__ = ["mosaicml_epoch", "shard_sizes"]

KEYS = {"epoch", "sample_in_epoch", "num_canonical_nodes", "shuffle_seed", "initial_physical_nodes"}


def shard_sizes(folders: Sequence[Path]) -> list[int]:
    """Return the number of samples in each shard of the streams, in their order. `folders`: folder or index.json of
    each stream. Raises InvalidArgumentError for an index that cannot be read."""
    sizes = []
    for folder in folders:
        path = folder / "index.json" if folder.is_dir() else folder
        try:
            sizes += [int(shard["samples"]) for shard in json.loads(path.read_bytes())["shards"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InvalidArgumentError(
                f"{path} must be the index.json of a stream's shards: {error}. Correct the path of --index"
            ) from error
    return sizes


def mosaicml_epoch(
    path: Path,
    sizes: Sequence[int],
    *,
    batch: int,
    shuffle: bool,
    algorithm: str,
    block: int | None,
    python: str,
) -> BegunEpoch:
    """Return the epoch that a state is in.

    Args:
        path: file with the state.
        sizes: number of samples in each shard.
        batch: samples of a step, of all ranks together.
        shuffle: True if the StreamingDataset shuffles.
        algorithm, block: shuffle_algo and shuffle_block_size of the StreamingDataset.
        python: interpreter that has mosaicml-streaming.
    """
    state = foreign_state(path, "mosaicml-streaming", KEYS - {"initial_physical_nodes"})
    if unknown := state.keys() - KEYS:
        raise StateVersionError(
            f"{path} must be a state of mosaicml-streaming 0.7 to 0.13, got one with the unknown keys "
            f"{', '.join(sorted(unknown))}. Save the state with one of these versions"
        )
    nodes, delivered = count(path, state, "num_canonical_nodes"), count(path, state, "sample_in_epoch")
    epoch, seed = count(path, state, "epoch"), count(path, state, "shuffle_seed")
    if nodes < 1:
        raise StateMismatchError(f"{path}: num_canonical_nodes must be at least 1, got {nodes}. Pass an older state")
    order = order_by(
        python,
        "mosaicml_order",
        {
            "sizes": list(sizes),
            "nodes": nodes,
            "epoch": epoch,
            "seed": seed,
            "algorithm": algorithm if shuffle else None,
            "block": block or max(4_000_000 // nodes, 1 << 18),
        },
    )
    if delivered > len(order) + batch:
        raise StateMismatchError(
            f"{path}: sample_in_epoch must be at most {len(order)}, the samples of these shards, got {delivered}. Pass "
            "the --index of each stream, in order. An epoch that does not have each sample once (epoch_size, "
            "proportion, repeat or choose) cannot be imported"
        )
    delivered = min(delivered, len(order))
    steps = whole_steps(delivered, batch, len(order)) + epoch * -(-len(order) // batch)
    return BegunEpoch(epoch, order, delivered, steps)
