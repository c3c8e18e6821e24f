"""Checksums of a file and of its sections (parts), so that a section can be verified without reading the rest."""

from __future__ import annotations

import xxhash

PIECE = 1 << 20
"""Bytes that are hashed twice, for the file and for its section, while they are in the processor's cache."""


class PartHasher:
    """Hasher of a file and its sections in one pass. `parts`: offset at which each begins, in bytes."""

    def __init__(self, parts: list[int]) -> None:
        self._parts = parts
        self._all = xxhash.xxh3_128()
        self._part = xxhash.xxh3_64()
        self._digests: list[str] = []
        self._at = 0

    def update(self, data: memoryview) -> None:
        for begin in range(0, len(data), PIECE):  # a piece is still in the cache for the second hash
            piece = data[begin : begin + PIECE]
            self._all.update(piece)
            self._split(piece)

    def _split(self, piece: memoryview) -> None:
        while piece:
            following = len(self._digests) + 1
            end = self._parts[following] if following < len(self._parts) else self._at + len(piece)
            mine = piece[: end - self._at]
            self._part.update(mine)
            piece, self._at = piece[len(mine) :], self._at + len(mine)
            if following < len(self._parts) and self._at == end:
                self._next()

    def _next(self) -> None:
        self._digests.append(self._part.hexdigest())
        self._part = xxhash.xxh3_64()

    def digests(self) -> tuple[str, str]:
        if self._parts:
            self._next()
        parts = zip(self._parts, self._digests, strict=True)
        return self._all.hexdigest(), " ".join(f"{begin}:{digest}" for begin, digest in parts)
