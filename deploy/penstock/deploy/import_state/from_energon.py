"""Position of Megatron Energon's savable loader over one dataset of tar files: one state for each rank.

Energon's position is spread over its wrappers (slices, shuffle buffers, checkpoints of workers). So Energon's own
loader reads from the state to the end of the epoch, and reports these samples. All other samples were delivered.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from penstock.deploy.import_state.begun_epoch import BegunEpoch, whole_steps
from penstock.deploy.import_state.foreign_order import order_by
from penstock.proto.errors import InvalidArgumentError, StateMismatchError

__all__ = ["energon_epoch"]


def energon_epoch(paths: Sequence[Path], batch: int, loader: str, python: str) -> tuple[BegunEpoch, int]:
    """Return the epoch that the states of all ranks are in, and the number of samples of the dataset.

    Args:
        paths: file with the state of each rank, in order of rank.
        batch: samples of a step, of all ranks together.
        loader: "module:function", which takes a state's path, the rank and the number of ranks, and returns the savable
            loader restored from that state.
        python: interpreter that has Energon.
    """
    module, colon, name = loader.partition(":")
    if not (module and colon and name):
        raise InvalidArgumentError(
            f"--loader must be MODULE:NAME, got {loader!r}. Name a function that returns the restored loader"
        )
    request = {"loader": loader, "ranks": len(paths), "path": [str(Path.cwd())]}
    found = []
    for rank, path in enumerate(paths):
        if not path.is_file():
            raise InvalidArgumentError(
                f"{path} must be a file with the state of rank {rank}, but is not a file. Correct the path"
            )
        found.append(order_by(python, "energon_order", {**request, "state": str(path.absolute()), "rank": rank}))
    epoch, rows = int(found[0][0]), int(found[0][1])
    if any((own[0], own[1]) != (epoch, rows) for own in found):
        raise StateMismatchError(
            "all ranks must be in the same epoch of the same dataset, got the epochs "
            f"{', '.join(str(own[0]) for own in found)} of {', '.join(str(own[1]) for own in found)} samples. Pass "
            "states that all ranks saved at the same step, away from the end of an epoch"
        )
    left = np.concatenate([own[2:] for own in found])
    turn = np.argsort(np.concatenate([np.arange(len(own) - 2) for own in found]), kind="stable")
    if len(np.unique(left)) < len(left):
        raise StateMismatchError(
            "several ranks have the same samples left. Pass one state of each data-parallel rank, in order of rank"
        )
    seen = np.setdiff1d(np.arange(rows, dtype=np.int64), left)
    step = whole_steps(epoch * rows + len(seen), batch)
    return BegunEpoch(epoch, np.concatenate([seen, left[turn]]), len(seen), step), rows
