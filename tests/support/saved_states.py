"""States for checkpoints, small and of many parts, that tell of each part which save it is of."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Position", "mark_of", "state_of"]


class Position:
    """Where a loader is."""

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
