"""Live tensors -> shared memory: the only part of a save that the training loop waits for.

One image (image.py) for a save in flight. The regions of its files follow from the plan and stay where they are while
that stays, so staging again is one copy for each tensor and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from penstock.client.checkpoint.frames import frame_of
from penstock.client.checkpoint.image import PAGE, Image, pages
from penstock.client.checkpoint.planning import Key, RankLayout
from penstock.client.checkpoint.torch_private import copy_all

__all__ = ["Buffer", "Staged", "copy_to"]

SLACK = 16 * PAGE
"""Bytes that a region has for its objects to grow into, before all of it has to be laid out anew."""

Staged = tuple[list[tuple[str, int, int]], tuple[int, int]]
"""(name, offset, bytes) of each file in the image, and offset and bytes of the metadata."""


class Buffer:
    """Shared memory for one save at a time."""

    def __init__(self) -> None:
        self.image: Image | None = None
        self._layout: RankLayout | None = None
        self._starts: list[int] = []
        self._rooms: list[int] = []
        self._targets: list[torch.Tensor] = []

    def stage(
        self,
        layout: RankLayout,
        objects: dict[Key, bytes],
        metadata: bytes,
        tensor_of: Callable[[Any], torch.Tensor],
    ) -> Staged:
        """Lay out what this rank saves as it will lie in its files. When this returns nothing refers to live values.

        Args:
            objects: what is not framed.
            metadata: torch's `.metadata`; b"" on ranks that do not write it.
            tensor_of: MetadataIndex -> the tensor to be saved there.
        """
        lengths = {key: len(data) for key, data in objects.items()}
        sizes = [file.places(lengths)[1] for file in layout.files] + [len(metadata)]
        if layout is not self._layout or any(size > room for size, room in zip(sizes, self._rooms, strict=True)):
            self._lay_out(layout, sizes)
        image = self.image
        assert image is not None
        sources = [tensor_of(one.item.index).detach() for file in layout.files for one, _ in file.framed]
        copy_to(self._targets, sources)
        for file, start in zip(layout.files, self._starts, strict=False):
            for one, offset, _ in file.places(lengths)[0]:
                image.put(start + offset, objects[one.key])
        image.put(self._starts[-1], metadata)
        files = [(file.name, start, size) for file, start, size in zip(layout.files, self._starts, sizes, strict=False)]
        return files, (self._starts[-1], len(metadata))

    def _lay_out(self, layout: RankLayout, sizes: Sequence[int]) -> None:
        self._layout = None  # until all of it is there
        self._rooms = [pages(size) + (SLACK if size else 0) for size in sizes]
        self._starts = [sum(self._rooms[:number]) for number in range(len(sizes))]
        needed = sum(self._rooms)
        if self.image is None or self.image.nbytes < needed:
            self.close()
            self.image = Image(needed)
        image = self.image
        self._targets = []
        for file, start in zip(layout.files, self._starts, strict=False):
            for one, offset in file.framed:
                frame, (dtype, shape) = frame_of(*one.chunk), one.chunk
                begin = start + offset
                image.put(begin, frame.before)
                image.put(begin + len(frame.before) + frame.nbytes, frame.behind)
                self._targets.append(image.view(begin + len(frame.before), dtype, shape))
        self._layout = layout

    def close(self) -> None:
        self._targets, self._layout = [], None
        if self.image is not None:
            self.image.close()
            self.image = None


def copy_to(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy values; returns when they are there.

    Those on a CUDA device are copied on a stream of their own, behind what was asked of the device so far, and all at
    once: one wait for all of them.
    """
    with torch.no_grad():
        on_cuda = [number for number, source in enumerate(sources) if source.is_cuda]
        if not on_cuda:
            if sources:
                copy_all(targets, sources)
            return
        device = sources[on_cuda[0]].device
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            copy_all(targets, sources, non_blocking=True)
        stream.synchronize()
