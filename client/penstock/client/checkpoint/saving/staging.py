"""Copy of live tensors into shared memory: the only part of a save for which the training loop waits.

Each unwritten save has one image: shared memory with the bytes of its files as on the disk, a region for each file. The
regions follow from the plan, so each later save only copies each tensor once. The memory is a memfd: it has no name
under /dev/shm, and the kernel frees it with its last process. All pages are allocated at once, because page faults
would double the time of the first copy."""

from __future__ import annotations

import itertools
import math
import mmap
import os
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch

from penstock.client.checkpoint.saving.planning import Key, LocalItem, RankLayout
from penstock.client.checkpoint.values.torch_private import copy_all
from penstock.client.stream.cuda import PageLocks, take_error
from penstock.proto.errors import CheckpointError

PAGE = mmap.PAGESIZE
_numbers = itertools.count()
SLACK = 16 * PAGE
"""Fewest spare bytes in a file's region, for objects that grow from save to save. With more bytes of objects, a file
gets as many spare bytes: objects that grow steadily need ever fewer new layouts."""

Staged = tuple[list[tuple[str, int, int, list[int]]], tuple[int, int]]
"""(name, offset and length in the image, offsets of archives) of each file; offset and length of the index."""


def pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


class SharedImage:
    """Shared memory of `nbytes` bytes, rounded up to whole pages. `number` is unique in the process that made it;
    `tensor` is the whole memory as uint8, of shape [nbytes]; `fd` is closed with the image."""

    def __init__(self, nbytes: int) -> None:
        self.number = next(_numbers)
        self.nbytes = max(pages(nbytes), PAGE)
        try:
            self.fd = os.memfd_create("penstock-checkpoint", os.MFD_CLOEXEC)
            try:
                # Allocate the pages here: if memory runs out later, the process that touches the page gets a SIGBUS.
                os.posix_fallocate(self.fd, 0, self.nbytes)
                self._map(getattr(mmap, "MAP_POPULATE", 0))
            except OSError:
                os.close(self.fd)
                raise
        except OSError as error:
            raise CheckpointError(
                f"{self.nbytes:,} bytes of shared memory for the state cannot be allocated: {error.strerror}"
            ) from error

    @classmethod
    def received(cls, fd: int, nbytes: int) -> Self:
        """Map an image that another process made. `fd` belongs to the new object from now on."""
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
        """Return a contiguous tensor in the image. `offset`: a multiple of the dtype's size."""
        count = math.prod(shape)
        if not count:
            # the offset of an empty tensor may lie at the end, or be unaligned
            return torch.empty(shape, dtype=dtype, device="cpu")
        values = torch.frombuffer(self.map, dtype=dtype, count=count, offset=offset)
        return values if len(shape) == 1 else values.view(shape)

    def close(self) -> None:
        """Close the descriptor. The mapping stays until the last tensor that uses it is freed."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class StagingBuffer:
    def __init__(self) -> None:
        self.image: SharedImage | None = None
        self._layout: RankLayout | None = None
        self._starts: list[int] = []
        self._capacities: list[int] = []
        self._targets: list[torch.Tensor] = []
        self._cuda: dict[torch.device, CudaCopies] = {}

    def stage(
        self,
        layout: RankLayout,
        objects: dict[Key, bytes],
        metadata: bytes,
        tensor_of: Callable[[LocalItem], torch.Tensor],
    ) -> Staged:
        """Copy everything that this rank saves into the image, byte for byte as in the files; after that the loop may
        change its values. `objects`: of unframed items. `metadata`: index's description; b"" on ranks that do not write
        it."""
        lengths = {key: len(data) for key, data in objects.items()}
        laid_out = [file.offsets(lengths) for file in layout]
        others = [offsets for offsets, _ in laid_out]
        sizes = [*(size for _, size in laid_out), len(metadata)]
        with torch.inference_mode(False), torch.no_grad():  # a later save may run in another mode
            if layout is not self._layout or any(
                size > capacity for size, capacity in zip(sizes, self._capacities, strict=True)
            ):
                self._lay_out(layout, sizes)
            image = self.image
            assert image is not None
            self._copy(image, [tensor_of(one) for file in layout for one, _ in file.framed])
            for file, offsets, start in zip(layout, others, self._starts, strict=False):
                for one, offset in zip(file.others, offsets, strict=True):
                    image.put(start + offset, objects[one.key])
            image.put(self._starts[-1], metadata)
            files = [
                (file.name, start, size, [offset for _, offset in file.framed] + offsets)
                for file, start, size, offsets in zip(layout, self._starts, sizes, others, strict=False)
            ]
            return files, (self._starts[-1], len(metadata))

    def _copy(self, image: SharedImage, sources: list[torch.Tensor]) -> None:
        devices = {source.device for source in sources if source.is_cuda}
        for device in devices:
            if device not in self._cuda:
                self._cuda[device] = CudaCopies(device)
            there = [number for number, source in enumerate(sources) if source.device == device]
            self._cuda[device].copy(image, [self._targets[n] for n in there], [sources[n] for n in there])
        here = [number for number, source in enumerate(sources) if source.device not in devices]
        if here:
            copy_all([self._targets[number] for number in here], [sources[number] for number in here])

    def _lay_out(self, layout: RankLayout, sizes: Sequence[int]) -> None:
        self._layout = None  # until the layout is complete
        # leave space for the metadata, whose numbers may get more digits
        framed = [*(file.framed_bytes for file in layout), sizes[-1]]
        self._capacities = [
            pages(size + max(SLACK, size - fixed)) if size else 0 for size, fixed in zip(sizes, framed, strict=True)
        ]
        self._starts = [sum(self._capacities[:number]) for number in range(len(sizes))]
        needed = sum(self._capacities)
        if self.image is None or self.image.nbytes < needed:
            self.close()
            self.image = SharedImage(needed)
        image = self.image
        self._targets = []
        for file, start in zip(layout, self._starts, strict=False):
            for one, offset in file.framed:
                assert one.frame is not None
                assert one.data is not None
                frame, data, begin = one.frame, one.data, start + offset
                values = begin + len(frame.before)
                image.put(begin, frame.before)
                image.put(values + frame.nbytes, frame.behind)
                self._targets.append(image.view(values, data.properties.dtype, data.chunk.sizes))
        self._layout = layout

    def close(self) -> None:
        self._targets, self._layout = [], None
        if self.image is not None:
            self.image.close()
            self.image = None


class CudaCopies:
    """Copies from CUDA into page-locked memory, on a stream of their own, after the kernels started before."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device = device
        self._cuda = cuda
        self._stream = cuda.Stream(device)
        self._locks = PageLocks(cuda.cudart(), str(device), lambda: take_error(device))
        self._locked: set[int] = set()

    def copy(self, image: SharedImage, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        if image.number not in self._locked:
            self._locked.add(image.number)
            with self._cuda.device(self._device):
                self._locks.lock(image)
        self._stream.wait_stream(self._cuda.current_stream(self._device))
        with self._cuda.stream(self._stream):
            copy_all(targets, sources, non_blocking=True)
        self._stream.synchronize()
