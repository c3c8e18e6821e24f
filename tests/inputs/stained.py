"""Loaders that leave something behind in their process, or are well only in a process of a certain kind."""

from __future__ import annotations

import os
from typing import Any

from streams import Counter

built = 0


class Stained(Counter):
    """Its state says how many were built in this process."""

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"built": built}

    def aggregate_state_dict(self, states: list[Any]) -> Any:
        return states

    def deaggregate_state_dict(self, state: Any) -> Any:
        return state[0]


def stained(batches: int, fork_server: int = 0, otherwise: str = "") -> Stained:
    """`otherwise`: what happens where the process is no child of `fork_server`."""
    import statistics  # noqa: F401  # as many do: what is needed only here

    global built
    built += 1
    if otherwise and os.getppid() != fork_server:
        if otherwise == "dies":
            os._exit(3)
        raise RuntimeError("this is no child of the fork server")
    return Stained(batches)
