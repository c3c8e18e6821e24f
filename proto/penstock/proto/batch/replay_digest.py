"""Digest of a batch that a replay makes again (in private memory), to compare with that of the delivered batch."""

from __future__ import annotations

import ctypes
from typing import Any

from penstock.proto.batch.digest import DigestCover, digests_of, row_digests, rows_in
from penstock.proto.batch.flatten import Flattener, Structure


class ReplayDigest:
    def __init__(self, flattener: Flattener | None = None, *, cover: DigestCover = DigestCover.SAMPLE) -> None:
        self._flattener = flattener or Flattener()
        self._cover = cover
        self._buffer = ctypes.create_string_buffer(1 << 16)
        self.link = 0
        """What the chain of an epoch's batches links for the batch that `take` got last (`linked`)."""
        self._newest: tuple[Structure, list[int], int] | None = None

    def take(self, batch: Any) -> tuple[int, int]:
        """Return the digest of a batch, and its number of rows: those delivered, if the loader is deterministic."""
        flat = self._flattener.flatten(batch)
        if flat.nbytes > len(self._buffer):
            self._buffer = ctypes.create_string_buffer(2 * flat.nbytes)
        flat.write_to(ctypes.addressof(self._buffer))
        self._newest = flat.structure, flat.shapes, flat.nbytes
        digest, self.link = digests_of(self._cover, flat.structure, flat.shapes, self._buffer, 0, flat.nbytes)
        return digest, rows_in(flat.structure, flat.shapes)

    def link_of(self, batch: Any) -> int:
        """Return what the chain of an epoch's batches links for a batch: a digest of all its values."""
        self.take(batch)
        return self.link

    def rows(self) -> list[int]:
        assert self._newest is not None
        structure, shapes, nbytes = self._newest
        return row_digests(structure, shapes, self._buffer, 0, nbytes)
