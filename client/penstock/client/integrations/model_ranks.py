"""Batches for the ranks that split a model: one of them reads the stream, and the others get its batches.

Tensor, context and pipeline parallelism split one data-parallel rank, a box of Penstock, over several processes, which
all need the box's batches. The first of them, the leader, has the loader. For each batch it broadcasts a header (sizes,
or the end, or its error), the structure, the shapes, and the batch as one region of memory: the form in which batches
are in rings, without pickle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from penstock.proto.batch.flatten import ALIGN, Assembler, FlatBatch, Flattener, wrap_buffer
from penstock.proto.batch.structure import Structure
from penstock.proto.errors import PenstockError

__all__ = ["from_leader", "ranks_of_boxes"]

BATCH, END, FAILED = range(3)
"""Kinds of a header."""


def ranks_of_boxes(boxes: Sequence[int]) -> list[list[int]]:
    """Return the ranks of each box, in the order of their first ranks. boxes: the box of each rank."""
    found: dict[int, list[int]] = {}
    for rank, box in enumerate(boxes):
        found.setdefault(box, []).append(rank)
    return list(found.values())


def from_leader(batches: Iterator[Any] | None, group: dist.ProcessGroup) -> Iterator[Any]:
    """Yield the leader's batches on all ranks of a group. All of them request each batch, and the end.

    Args:
        batches: on the leader, the group's first rank; None on the others.
        group: gloo group of the ranks.

    Raises PenstockError on the other ranks if the leader's stream raises an error.
    """
    return _led(batches, group) if batches is not None else _following(group)


def _led(batches: Iterator[Any], group: dist.ProcessGroup) -> Iterator[Any]:
    flattener = Flattener()
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            _broadcast(_header(END), group)
            return
        except Exception as error:
            text = f"{type(error).__name__}: {error}".encode()
            _broadcast(_header(FAILED, len(text)), group)
            _broadcast(torch.frombuffer(bytearray(text), dtype=torch.uint8), group)
            raise
        flat = flattener.flatten(batch)
        structure = flat.structure.to_bytes()
        _broadcast(_header(BATCH, len(structure), len(flat.shapes), flat.nbytes), group)
        _broadcast(torch.frombuffer(bytearray(structure), dtype=torch.uint8), group)
        _broadcast(torch.tensor(flat.shapes, dtype=torch.int64), group)
        _broadcast(torch.from_numpy(_written(flat)), group)
        del flat
        yield batch


def _following(group: dist.ProcessGroup) -> Iterator[Any]:
    assembler: Assembler | None = None
    while True:
        kind, length, dims, nbytes = _received(torch.empty(4, dtype=torch.int64), group).tolist()
        if kind == END:
            return
        described = bytes(_received(torch.empty(length, dtype=torch.uint8), group).numpy())
        if kind == FAILED:
            leader = dist.get_global_rank(group, 0)
            raise PenstockError(f"rank {leader}, which reads the batches of this rank, failed: {described.decode()}")
        shapes = _received(torch.empty(dims, dtype=torch.int64), group).tolist()
        region = _aligned(nbytes)
        _received(torch.from_numpy(region), group)
        structure = Structure.from_bytes(described)
        if assembler is None or assembler.structure != structure:
            assembler = Assembler(structure)
        yield assembler.assemble(shapes, wrap_buffer(region), 0, nbytes)


def _header(kind: int, length: int = 0, dims: int = 0, nbytes: int = 0) -> torch.Tensor:
    return torch.tensor([kind, length, dims, nbytes], dtype=torch.int64)


def _written(flat: FlatBatch) -> np.ndarray[Any, np.dtype[np.uint8]]:
    region = _aligned(flat.nbytes)
    flat.write_to(region.ctypes.data)
    return region


def _aligned(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    memory = np.empty(nbytes + ALIGN, np.uint8)
    start = -memory.ctypes.data % ALIGN
    return memory[start : start + nbytes]


def _broadcast(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    if tensor.numel():
        dist.broadcast(tensor, group_src=0, group=group)


def _received(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    _broadcast(tensor, group)
    return tensor
