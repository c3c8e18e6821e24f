"""A loader whose state has as many MiB as it is told."""

from __future__ import annotations

import os
from typing import Any


class LargeState:
    def __init__(self, mib: int) -> None:
        self.made, self.ballast = 0, os.urandom(mib << 20)

    def __iter__(self) -> LargeState:
        return self

    def __next__(self) -> int:
        self.made += 1
        return self.made

    def state_dict(self) -> dict[str, Any]:
        return {"made": self.made, "ballast": self.ballast}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.made, self.ballast = state["made"], state["ballast"]


def loader(mib: int) -> LargeState:
    return LargeState(mib)
