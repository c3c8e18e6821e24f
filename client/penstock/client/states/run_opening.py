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
    """Bytes with input_fn's arguments, which other processes decode (see code_reference.py)."""
    make: Callable[[], Any]
    """Callable that calls input_fn with a copy of its arguments, in this process."""
    start: BoxStart
    """Position and state from which this box starts."""
    start_of: Callable[[int], BoxStart]
    """Function that returns the position and state from which the box with a given number starts."""
    seed: int | None
    """Seed of the run. None: the seed of the resumed run, or a random one."""
    key: str
    """Text that differs between the openings of one loader in one launch of the job, so that the coordinator recognises
    a repeated request."""
    replay: bool
    """True if a loader without state methods may be saved too: its batches are counted, and made again after a
    resume."""
    cover: DigestCover
    """Choice of the bytes that the digest of a batch covers: a sample, all bytes, or all bytes summed by rows."""
