"""States for checkpoints, small and of many parts, that tell of each part which save it is of; and a save of none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from penstock.client.checkpoint.saving.folder_save import FolderSave
from penstock.client.checkpoint.saving.planning import described

__all__ = ["Position", "mark_of", "save_of", "state_of"]


class Position:
    """Position of a loader."""

    def __init__(self, mark: int) -> None:
        self.mark = mark

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.mark, "seen": b"%d" % self.mark * 100}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["seen"] == b"%d" % state["batches"] * 100
        self.mark = state["batches"]


def state_of(mark: int) -> dict[str, Any]:
    """A state with this number in all of it: two tensors for a file each, small ones, objects."""
    return {
        "model": {
            "first": torch.full((100, 37), float(mark)),
            "second": torch.full((50, 41), mark, dtype=torch.int64),
            "third": torch.full((3,), mark, dtype=torch.int32),
        },
        "optimizer": {"lr": mark / 4, "moments": torch.full((90, 30), mark + 0.5)},
        "position": Position(mark),
        "note": f"mark {mark}",
    }


def mark_of(state: dict[str, Any]) -> int:
    """The number; fails if it is not the same in all parts."""
    model, optimizer = state["model"], state["optimizer"]
    marks = {
        *(float(value) for tensor in model.values() for value in tensor.unique()),
        *(float(value) - 0.5 for value in optimizer["moments"].unique()),
        optimizer["lr"] * 4,
        state["position"].mark,
        float(state["note"].removeprefix("mark ")),
    }
    assert len(marks) == 1, f"parts of several saves: {marks}"
    return int(marks.pop())


def save_of(folder: Path, rank: int, *, orphaned: bool = False, **changes: Any) -> FolderSave:
    """The part of one of two ranks in a save of step 2 with nothing to write."""
    metadata = Metadata({}, {}, storage_meta=StorageMeta())
    index = described(metadata, [])
    request: dict[str, Any] = {
        "save": "0abc",
        "step": 2,
        "rank": rank,
        "ranks": 2,
        "folder": str(folder),
        "files": [],
        "error": None,
        "timeout_s": 1800,
        "in_flight": [],
        "fsync": False,
        "keep_last": None,
        "keep_every": None,
        "threads": 1,
        "commit": {"plan": {"0": [], "1": []}, "index": [0, len(index)]},
        **changes,
    }
    return FolderSave(request, memoryview(index), lambda reply: None, lambda: orphaned)
