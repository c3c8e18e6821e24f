"""What a loader brings to open a run: which code, with which seed, from where."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.client.states.code_reference import Reference
from penstock.client.states.saved_state import Start
from penstock.proto.batch.digest import Cover

__all__ = ["Opening"]


@dataclass(frozen=True)
class Opening:
    """One opening of a loader."""

    reference: Reference
    """Its input_fn, as other processes are told it."""
    arguments: bytes
    """Of input_fn, as other processes are told them."""
    make: Callable[[], Any]
    """Calls input_fn with a copy of its arguments, in this process."""
    start: Start
    """From where this box starts."""
    start_of: Callable[[int], Start]
    """Box -> from where it starts, of all boxes."""
    seed: int | None
    """The run's; None = the one it had, or a fresh one."""
    key: str
    """Tells the openings of one loader in one launch apart."""
    cover: Cover
    """What the digests of batches cover."""
