"""The digest of a batch that is replayed and goes nowhere: flattened into memory of our own instead of a ring."""

from __future__ import annotations

import ctypes
from typing import Any

from penstock.proto.digest import batch_digest
from penstock.proto.tensors import FlatBatch, Flattener

__all__ = ["Offprint", "samples_in"]


def samples_in(flat: FlatBatch) -> int:
    """Rows of the first tensor or array that has a dimension; 1 if there is none."""
    structure = flat.structure
    dims = 0
    for leaf in structure.leaves:
        if leaf.rank:
            return flat.shapes[dims]
        dims += leaf.dims
    return 1


class Offprint:
    """Flattens batches into a scratch buffer, which grows as needed."""

    def __init__(self, flattener: Flattener | None = None, *, full_digest: bool = False) -> None:
        self._flattener = flattener or Flattener()
        self._full_digest = full_digest
        self._buffer = ctypes.create_string_buffer(1 << 16)

    def take(self, batch: Any) -> tuple[int, int]:
        """(digest, samples) of a batch, as its delivery would have recorded them."""
        flat = self._flattener.flatten(batch)
        if flat.nbytes > len(self._buffer):
            self._buffer = ctypes.create_string_buffer(2 * flat.nbytes)
        flat.write_to(ctypes.addressof(self._buffer))
        digest = batch_digest(flat.structure.key, self._buffer, 0, flat.nbytes, flat.shapes, self._full_digest)
        return digest, samples_in(flat)
