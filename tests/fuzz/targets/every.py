"""All targets, by name."""

from __future__ import annotations

from targets import lanes, processes, values
from targets.target import Target

__all__ = ["EVERY"]

EVERY: dict[str, Target] = {target.name: target for target in (*values.TARGETS, *lanes.TARGETS, *processes.TARGETS)}
