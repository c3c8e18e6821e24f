"""Image of a checkpoint's files in shared memory: the bytes that the writer process will write to the disk.

Staging, the copying by the training process, puts each tensor's values at their position in a file, between the bytes
that torch.save would write before and after them. So the writer process only has to write. Everything except the
tensors' values stays the same from save to save.

The memory is a memfd: it has no name under /dev/shm, and the kernel frees the memory when the last process that maps it
ends. All its pages are allocated at once, because page faults would double the time of the first copy.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
from typing import Self

import torch

from penstock.proto.errors import CheckpointError

__all__ = ["PAGE", "SharedImage", "pages"]

PAGE = mmap.PAGESIZE
_numbers = itertools.count()


def pages(nbytes: int) -> int:
    """Return `nbytes`, a number of bytes, rounded up to whole pages of memory."""
    return -(-nbytes // PAGE) * PAGE


class SharedImage:
    """Shared memory of `nbytes` bytes, rounded up to whole pages.

    Attributes:
        number: number of the image, unique in the process that made it.
        fd: descriptor of the memory, to be sent to the writer process; closed with the image.
        map: mapping of the memory in this process.
        address: address of the first byte of the mapping.
        tensor: the whole memory as uint8, of shape [nbytes].
    """

    def __init__(self, nbytes: int) -> None:
        self.number = next(_numbers)
        self.nbytes = max(pages(nbytes), PAGE)
        self.fd = os.memfd_create("penstock-checkpoint", os.MFD_CLOEXEC)
        try:
            # Allocate the pages here: if memory runs out later, the process that touches the page gets a SIGBUS.
            os.posix_fallocate(self.fd, 0, self.nbytes)
            self._map(getattr(mmap, "MAP_POPULATE", 0))
        except OSError as error:
            os.close(self.fd)
            raise CheckpointError(
                f"{self.nbytes:,} bytes of shared memory for the state of this rank cannot be allocated: "
                f"{error.strerror}. Free memory on this machine, or save from more ranks"
            ) from error

    @classmethod
    def received(cls, fd: int, nbytes: int) -> Self:
        """Map an image that another process made. `fd`: its descriptor, which belongs to the new object from now on.
        `nbytes`: size in bytes."""
        image = cls.__new__(cls)
        image.number, image.nbytes, image.fd = next(_numbers), nbytes, fd
        image._map(0)
        return image

    def _map(self, flags: int) -> None:
        self.map = mmap.mmap(self.fd, self.nbytes, flags=mmap.MAP_SHARED | flags)
        self.tensor = torch.frombuffer(self.map, dtype=torch.uint8)
        self.address = self.tensor.data_ptr()

    def put(self, offset: int, data: bytes) -> None:
        self.map[offset : offset + len(data)] = data

    def view(self, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a contiguous tensor of this dtype and shape whose values are the image's bytes from `offset` on.
        `offset` must be a multiple of the dtype's size."""
        count = math.prod(shape)
        if not count:
            # the offset of an empty tensor may lie at the end, or be unaligned
            return torch.empty(shape, dtype=dtype, device="cpu")
        values = torch.frombuffer(self.map, dtype=dtype, count=count, offset=offset)
        return values if len(shape) == 1 else values.view(shape)

    def close(self) -> None:
        """Close the descriptor of the memory. The mapping stays until the last tensor that uses it is freed."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
