"""A batch written into a ring's memory and read from there."""

from __future__ import annotations

import mmap
from typing import Any

from penstock.proto.batch.flatten import Assembler, FlatBatch, Flattener, wrap_buffer
from penstock.proto.batch.structure import Structure

__all__ = ["SIZE", "Ring", "received", "trip"]

SIZE = 1 << 20


class Ring:
    """Anonymous shared memory full of garbage, with its address."""

    def __init__(self, size: int = SIZE, fill: int = 0xA5) -> None:
        self.mmap = mmap.mmap(-1, size)
        self.mmap[:] = bytes([fill]) * size
        self.view = wrap_buffer(self.mmap)
        self.address = self.view.ctypes.data

    def write(self, flat: FlatBatch, offset: int = 128) -> None:
        flat.write_to(self.address + offset)


def received(flat: FlatBatch) -> Structure:
    return Structure.from_bytes(flat.structure.to_bytes())


def trip(batch: Any, offset: int = 128, copy: bool = False) -> Any:
    """The batch as another process assembles it."""
    flat = Flattener().flatten(batch)
    # Of as many pages as it needs: a large one takes longer than the rest.
    ring = Ring(-(-(offset + flat.nbytes + 1) // mmap.PAGESIZE) * mmap.PAGESIZE)
    ring.write(flat, offset)
    assert {ring.mmap[offset - 1], ring.mmap[offset + flat.nbytes]} == {0xA5}, "written outside the region"
    return Assembler(received(flat)).assemble(flat.shapes, ring.view, offset, flat.nbytes, copy=copy)
