"""All targets, by name."""

from __future__ import annotations

from targets import datasets, lanes, processes, values
from targets.target import Target

__all__ = ["EVERY"]

_ALL = (*values.TARGETS, *lanes.TARGETS, *processes.TARGETS, *datasets.TARGETS)
EVERY: dict[str, Target] = {target.name: target for target in _ALL}
