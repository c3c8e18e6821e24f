"""Content of a saved state without its restart points, which depend on what was verified by then."""

from __future__ import annotations

from typing import Any

from penstock.client.states.saved_state import read

__all__ = ["described"]


def described(state: Any) -> dict[str, Any]:
    """Step, seed, positions with their stream digests, and each worker's counts and last batch."""
    saved = read(state)
    return {
        "step": saved.step,
        "seed": saved.seed,
        "aggregated": saved.aggregated,
        "positions": [position.to_proto().SerializeToString(deterministic=True) for position in saved.positions],
        "workers": [(part.box, part.slot, part.worker_step, part.samples, part.digest) for part in saved.parts],
    }
