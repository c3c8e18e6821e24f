"""Hashes of files, by the names that mosaicml-streaming gives them: hashlib's and xxhash's."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

from penstock.proto.errors import DatasetError

__all__ = ["HASHES", "digest_of"]

# Those of hashlib that have a function of their own; shake_* are left out, whose digests have no length of their own.
HASHES: dict[str, Callable[[], Any]] = {
    **{
        name: getattr(hashlib, name)
        for name in sorted(hashlib.algorithms_available)
        if hasattr(hashlib, name) and not name.startswith("shake_")
    },
    **{name: getattr(xxhash, name) for name in sorted(xxhash.algorithms_available)},
}
"""Name of an algorithm -> what makes a hash of nothing yet."""

PIECE = 1 << 20
"""Bytes of a file in memory at a time."""


def digest_of(source: Path | bytes | bytearray | memoryview, algorithm: str) -> str:
    """Digest in hexadecimal, of bytes or of a file's content. Raises DatasetError for an unknown algorithm."""
    make = HASHES.get(algorithm)
    if make is None:
        raise DatasetError(f"unknown hash {algorithm!r}; there are {', '.join(sorted(HASHES))}")
    state = make()
    if isinstance(source, Path):
        with source.open("rb", buffering=0) as file:
            piece = memoryview(bytearray(PIECE))
            while size := file.readinto(piece):
                state.update(piece[:size])
    else:
        state.update(source)
    return str(state.hexdigest())
