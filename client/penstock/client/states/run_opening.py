"""What a loader brings to open a run: which code, with which seed, from where."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.client.states.code_reference import CodeReference
from penstock.client.states.saved_state import BoxStart
from penstock.proto.batch.digest import DigestCover

__all__ = ["Opening"]


@dataclass(frozen=True)
class Opening:
    """One opening of a loader."""

    reference: CodeReference
    """Its input_fn, as other processes are told it."""
    arguments: bytes
    """Of input_fn, as other processes are told them."""
    make: Callable[[], Any]
    """Calls input_fn with a copy of its arguments, in this process."""
    start: BoxStart
    """From where this box starts."""
    start_of: Callable[[int], BoxStart]
    """Box -> from where it starts, of all boxes."""
    seed: int | None
    """The run's; None = the one it had, or a fresh one."""
    key: str
    """Tells the openings of one loader in one launch apart."""
    cover: DigestCover
    """What the digests of batches cover."""
