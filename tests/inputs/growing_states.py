"""A loader with the four methods whose state has other parts at each step, as some have: keys, lists, tensors."""

from __future__ import annotations

from typing import Any

import streams
import torch

__all__ = ["growing"]


class Growing(streams.Shared):
    def state_dict(self) -> dict[str, Any]:
        seen = self.start + self.done
        return {
            **super().state_dict(),
            "seen": {f"shard-{number}": {"rows": number} for number in range(seen)},
            "open": [torch.arange(length) for length in range(seen)],
        }

    def load_state_dict(self, state: dict[str, Any], strict: bool = True) -> None:
        super().load_state_dict(state)
        seen = state["start"] + sum(state.get("all_done", [state["done"]]))  # dealt out, or this worker's own
        assert len(state["seen"]) == len(state["open"]) == seen, f"{state} lacks parts"

    def aggregate_state_dict(self, worker_states: list[dict[str, Any]]) -> dict[str, Any]:
        seen = worker_states[0]["start"] + sum(state["done"] for state in worker_states)
        return {
            **super().aggregate_state_dict(worker_states),
            "seen": {f"shard-{number}": {"rows": number} for number in range(seen)},
            "open": [torch.arange(length) for length in range(seen)],
        }

    def deaggregate_state_dict(self, aggregated: dict[str, Any], strict: bool = True) -> dict[str, Any]:
        parts = {key: aggregated[key] for key in ("seen", "open")}
        return {**super().deaggregate_state_dict(aggregated), **parts, "all_done": aggregated["done"]}


def growing(batches: int = 30) -> Growing:
    return Growing(batches)
