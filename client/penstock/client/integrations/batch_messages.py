"""Message with a batch for the other ranks of its box: its structure, shapes, and region (one block with all values).

    offset  size  content                                         (in bytes)
    0       8     S, size of the structure                        int64, little-endian, like D and R
    8       8     D, number of dims: the sizes of all dimensions of all tensors
    16      8     R, size of the region
    64      S     structure, then zeros to a multiple of 64
            8D    dims, then zeros to a multiple of 64
            R     region

Nothing is pickled; all is encoded as on a lane, and checked by the same code."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from penstock.client.states.batch_sizes import batch_size_of
from penstock.proto.batch.flatten import Assembler, Flattener
from penstock.proto.batch.structure import Structure, padded
from penstock.proto.errors import malformed

HEADER = 64
NUMBERS = 3


class BatchMessages:
    """For the batches of one stream, and one thread."""

    def __init__(self) -> None:
        self._flattener = Flattener()
        self._assembler: Assembler | None = None

    def pack(self, batch: Any) -> torch.Tensor:
        """Return the message, a uint8 CPU tensor of shape [bytes] that shares no memory with the batch. Raises
        UnsupportedLeafError for tensors on a GPU."""
        flat = self._flattener.flatten(batch)
        structure = flat.structure.to_bytes()
        dims_at = HEADER + padded(len(structure))
        region_at = dims_at + padded(8 * len(flat.shapes))
        # torch aligns its memory to 64 bytes, as the region must be
        message = torch.empty(region_at + flat.nbytes, dtype=torch.uint8, device="cpu")
        memory = message.numpy()
        memory[:region_at] = 0
        memory[: 8 * NUMBERS].view("<i8")[:] = len(structure), len(flat.shapes), flat.nbytes
        memory[HEADER : HEADER + len(structure)] = np.frombuffer(structure, np.uint8)
        memory[dims_at : dims_at + 8 * len(flat.shapes)].view("<i8")[:] = flat.shapes
        if flat.nbytes:
            flat.write_to(message.data_ptr() + region_at)
        return message

    def unpack(self, message: torch.Tensor) -> Any:
        """Return the batch as views of the message. Raises ProtocolError for what pack() cannot have made."""
        structure, shapes, region_at, nbytes = self._parts(message)
        if self._assembler is None or self._assembler.structure != structure:
            self._assembler = Assembler(structure)
        return self._assembler.assemble(shapes, message.numpy(), region_at, nbytes)

    def rows(self, message: torch.Tensor) -> int | None:
        """Return the number of rows of the batch; None as for infer_batch_size."""
        structure, shapes, _, _ = self._parts(message)
        return batch_size_of(structure, shapes)

    def _parts(self, message: torch.Tensor) -> tuple[Structure, list[int], int, int]:
        memory = message.numpy()
        if memory.size < HEADER:
            raise malformed(f"a batch from another rank must have {HEADER} bytes or more, got {memory.size}")
        structure_bytes, dims, nbytes = memory[: 8 * NUMBERS].view("<i8").tolist()
        fits = min(structure_bytes, dims, nbytes) >= 0 and max(structure_bytes, dims, nbytes) <= memory.size
        dims_at = HEADER + padded(structure_bytes) if fits else 0
        region_at = dims_at + padded(8 * dims) if fits else 0
        if not fits or region_at + nbytes != memory.size:
            raise malformed(f"the parts of a batch from another rank must fill its {memory.size} bytes")
        encoded = memory[HEADER : HEADER + structure_bytes].tobytes()
        known = self._assembler
        structure = known.structure if known is not None and known.structure.encoded == encoded else None
        shapes = memory[dims_at : dims_at + 8 * dims].view("<i8").tolist()
        return structure or Structure.from_bytes(encoded), shapes, region_at, nbytes
