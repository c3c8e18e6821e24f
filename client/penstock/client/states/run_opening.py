"""Request of a loader to open a run: the code, the seed and the start."""

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
    """Code, seed and start of one opening of a loader."""

    reference: CodeReference
    """Reference to input_fn for other processes."""
    arguments: bytes
    """Envelope of input_fn's arguments for other processes."""
    make: Callable[[], Any]
    """Callable that calls input_fn with a copy of its arguments, in this process."""
    start: BoxStart
    """Start of this box."""
    start_of: Callable[[int], BoxStart]
    """Function from any box to its start."""
    seed: int | None
    """Seed of the run. None: the seed of the resumed run, or a random one."""
    key: str
    """Key that distinguishes the openings of one loader in one launch."""
    replay: bool
    """True if a loader without state methods is also saved, by replay."""
    cover: DigestCover
    """Bytes that the digests of batches cover."""
