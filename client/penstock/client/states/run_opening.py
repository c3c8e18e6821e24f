"""Request of a loader to open a run: the code, the seed, and the position and state to start from."""

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
    """Request of a loader to open a run."""

    reference: CodeReference
    """Reference to input_fn for other processes."""
    arguments: bytes
    """Envelope of input_fn's arguments for other processes."""
    make: Callable[[], Any]
    """Callable that calls input_fn with a copy of its arguments, in this process."""
    start: BoxStart
    """Position and state from which this box starts."""
    start_of: Callable[[int], BoxStart]
    """Function that returns the start of the box with a given number."""
    seed: int | None
    """Seed of the run. None: the seed of the resumed run, or a random one."""
    key: str
    """Key that distinguishes the openings of one loader in one launch."""
    replay: bool
    """True if a loader without state methods can be saved by replay."""
    cover: DigestCover
    """Bytes that the digests of batches cover."""
