"""Hash algorithms for files: those of hashlib and xxhash, by the names that mosaicml-streaming uses."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import xxhash

from penstock.proto.errors import InvalidArgumentError
from penstock.runtime.files.plain_files import open_plain

# hashlib's algorithms with a function of their own. shake_* is left out, because its digests have no fixed length.
HASHES: dict[str, Callable[[], Any]] = {
    **{
        name: getattr(hashlib, name)
        for name in sorted(hashlib.algorithms_available)
        if hasattr(hashlib, name) and not name.startswith("shake_")
    },
    **{name: getattr(xxhash, name) for name in sorted(xxhash.algorithms_available)},
}

_FAST = ("xxh3_64", "xxh3_128", "xxh128", "xxh64", "xxh32", "sha1", "blake2b", "sha256", "md5", "sha512")
"""From the fastest to the slowest on current processors. Others count as slower."""

PIECE = 1 << 20
"""Bytes of a file that are read into memory at a time."""


def fastest_of(algorithms: Iterable[str]) -> str:
    """Return the fastest of several algorithms; "" if none is known."""
    known = [name for name in algorithms if name in HASHES]
    return min(known, key=lambda name: (_FAST.index(name) if name in _FAST else len(_FAST), name), default="")


def digest_of(source: Path | bytes | bytearray | memoryview, algorithm: str) -> str:
    """Return the hexadecimal digest of bytes or a file. Raises InvalidArgumentError for an unknown algorithm."""
    make = HASHES.get(algorithm)
    if make is None:
        raise InvalidArgumentError(f"the hash algorithm must be one of {', '.join(sorted(HASHES))}, got {algorithm!r}")
    state = make()
    if isinstance(source, Path):
        with open(source, "rb", buffering=0, opener=open_plain) as file:
            piece = memoryview(bytearray(PIECE))
            while size := file.readinto(piece):
                state.update(piece[:size])
    else:
        state.update(source)
    return str(state.hexdigest())
