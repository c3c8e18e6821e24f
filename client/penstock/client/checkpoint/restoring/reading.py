"""Reader of a checkpoint's files. Every byte is verified by a hash before its use.

Each archive (one saved value as torch.save writes it) is hashed separately (`CheckpointFile.parts`), so a rank reads
only what it needs, in threads, because reading and hashing release the interpreter lock. Values for the user's tensors
stay in memory until everything is verified (`FillRequest`), which takes as much memory as these tensors; those for new
tensors are copied at once."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

from penstock.client.checkpoint.restoring.entries import ReadRequest
from penstock.client.checkpoint.restoring.index import SavedValue
from penstock.client.checkpoint.restoring.sources import RUN, Source, SourceFile, bytes_of
from penstock.client.checkpoint.values.objects import load_tensor
from penstock.client.checkpoint.values.tensor_classes import Part, joined
from penstock.client.checkpoint.values.torch_frames import frame_of, is_plain
from penstock.client.checkpoint.values.torch_private import copy_all, find_state_dict_object
from penstock.proto.errors import CheckpointCorruptError, CheckpointError
from penstock.proto.state.checkpoint_files import CheckpointFile

SMALL = 8 << 20
"""Bytes that a restore reads without threads, because Python's work for each entry takes longer."""
MAX_UNNEEDED_BYTES = 4 << 10
"""Bytes per tensor that a kept read buffer may waste; with more it is freed, after its values were copied."""
GAP = 64 << 10


@dataclass(frozen=True)
class FillRequest:
    name: str
    target: torch.Tensor
    source: torch.Tensor
    before: list[torch.Tensor] = field(default_factory=list, compare=False)
    """The target's values before it was filled, if they are kept."""

    @staticmethod
    def check(fills: list[FillRequest]) -> None:
        """Raise CheckpointError if two of the requests would fill one tensor with different values."""
        seen: dict[tuple[Any, ...], FillRequest] = {}
        fills = [fill for fill in fills if fill.target.numel()]
        if len({fill.target.data_ptr() for fill in fills}) == len(fills):
            return
        for fill in fills:
            target = fill.target
            memory = target.device, target.data_ptr(), target.dtype, target.shape, target.stride()
            other = seen.setdefault(memory, fill)
            if other.name != fill.name and not _same(other.source, fill.source, target.dtype):
                raise CheckpointError(
                    f"{other.name!r} and {fill.name!r} share one tensor, but were saved with different values"
                )

    @staticmethod
    def all_of(fills: list[FillRequest], *, keep: bool) -> None:
        """Fill the tensors. `keep`: keep their present values in the sources, for `undo`."""
        with torch.no_grad():
            if not keep:
                if fills:
                    copy_all([fill.target.detach() for fill in fills], [fill.source for fill in fills])
                return
            for fill in fills:
                target = fill.target.detach()
                before = target.to("cpu", copy=True)
                target.copy_(fill.source)
                if before.dtype == fill.source.dtype:
                    fill.source.copy_(before)
                    before = fill.source
                fill.before.append(before)

    @staticmethod
    def undo(fills: list[FillRequest]) -> None:
        with torch.no_grad():
            for fill in reversed(fills):
                if fill.before:
                    fill.target.detach().copy_(fill.before.pop())


@dataclass(frozen=True)
class _Piece:
    """Part of one saved tensor, and the tensor to copy it into. `item`: torch's ranges in both; None: all of it."""

    target: torch.Tensor
    own: bool
    item: ReadItem | None

    @property
    def is_new(self) -> bool:
        return self.own and self.target.device.type == "cpu"


@dataclass
class _Archive:
    name: str
    offset: int
    length: int
    shape: tuple[torch.dtype, tuple[int, ...]] | None
    pieces: list[_Piece]


def read(
    source: Source,
    files: Mapping[str, CheckpointFile],
    index: Mapping[str, SavedValue],
    wanted: dict[str, ReadRequest],
    load: Callable[[str, bytes], Any],
    threads: int,
) -> tuple[dict[str, Any], list[FillRequest]]:
    """Read the requested values. Return tensors and objects by name, and requests to copy values into the user's
    tensors, which the caller carries out once all values are checked."""
    by_file: dict[str, list[_Archive]] = defaultdict(list)
    for name, archive in _archives(index, wanted):
        by_file[name].append(archive)
    found: dict[str, Any] = {name: want.tensor for name, want in wanted.items()}
    fills: list[FillRequest] = []
    objects: dict[str, bytes] = {}
    whole: dict[str, list[Part]] = defaultdict(list)
    tasks = []
    with ExitStack() as opened:
        for name, archives in by_file.items():
            file = files.get(name)
            if file is None:
                raise CheckpointCorruptError(f"the checkpoint's manifest must list the file {name}")
            handle = source.open(file)
            opened.callback(handle.close)
            if file.xxh3 and not file.parts:
                _check_whole(handle, file)
            reader = _Reader(handle, file, fills, objects, whole)
            tasks += [(reader, run) for run in _runs(archives)]
        if sum(archive.length for archives in by_file.values() for archive in archives) <= SMALL:
            for reader, run in tasks:
                reader.read(run)
        else:
            with ThreadPoolExecutor(max(threads, source.least_threads)) as pool:
                for _ in pool.map(lambda task: task[0].read(task[1]), tasks):
                    pass
    FillRequest.check(fills)
    for name, data in objects.items():
        found[name] = load(name, data)
    for name, parts in whole.items():
        found[name] = joined(name, found[name], parts)
    return found, fills


def _archives(index: Mapping[str, SavedValue], wanted: dict[str, ReadRequest]) -> Iterator[tuple[str, _Archive]]:
    for name, want in wanted.items():
        tensor, _, archives = index[name]
        if want.tensor is None or tensor is None:
            yield archives[0].file, _Archive(name, *archives[0][2:], None, [])
        elif type(want.tensor) in (torch.Tensor, torch.nn.Parameter) and len(archives) == 1:
            shape = tensor.properties.dtype, tuple(tensor.chunks[0].sizes)
            yield archives[0].file, _Archive(name, *archives[0][2:], shape, [_Piece(want.tensor, want.own, None)])
        else:
            pieces: dict[torch.Size | None, list[_Piece]] = defaultdict(list)
            for item in create_default_local_load_plan({name: want.tensor}, Metadata({name: tensor})).items:
                target = find_state_dict_object({name: want.tensor}, item.dest_index)
                pieces[item.storage_index.offset].append(_Piece(target, want.own, item))
            for chunk, archive in zip(tensor.chunks, archives, strict=True):
                if chunk.offsets in pieces:
                    shape = tensor.properties.dtype, tuple(chunk.sizes)
                    yield archive.file, _Archive(name, *archive[2:], shape, pieces[chunk.offsets])


def _runs(archives: list[_Archive]) -> Iterator[list[_Archive]]:
    run: list[_Archive] = []
    for archive in sorted(archives, key=lambda one: one.offset):
        if run:
            begin, end = run[0].offset, run[-1].offset + run[-1].length
            if archive.offset - end > GAP or archive.offset + archive.length - begin > RUN:
                yield run
                run = []
        run.append(archive)
    if run:
        yield run


class _Reader:
    def __init__(
        self,
        handle: SourceFile,
        file: CheckpointFile,
        fills: list[FillRequest],
        objects: dict[str, bytes],
        whole: dict[str, list[Part]],
    ) -> None:
        self._handle = handle
        self._whole = whole
        self._file = file
        self._parts = file.spans
        self._fills = fills
        self._objects = objects

    def read(self, run: list[_Archive]) -> None:
        begin = run[0].offset
        end = self._end(run[-1])
        view = self._checked(run, begin, end)
        keep = _is_kept(run, end - begin)
        for archive in run:
            start = archive.offset - begin
            if archive.shape is None:
                self._objects[archive.name] = bytes(view[start : start + archive.length])
            else:
                values = _values(view[start : start + archive.length], archive.name, archive.shape)
                for piece in archive.pieces:
                    self._fill(archive.name, piece, values, keep=keep)

    def _checked(self, run: list[_Archive], begin: int, end: int) -> memoryview:
        """Return the bytes of the first copy in which all archives are undamaged."""
        damage: CheckpointCorruptError | None = None
        for data in self._handle.copies(begin, end - begin):
            view = bytes_of(data)
            try:
                for archive in run:
                    self._check(archive, view[archive.offset - begin : self._end(archive) - begin])
                return view
            except CheckpointCorruptError as error:
                damage = error
        assert damage is not None
        raise damage

    def _end(self, archive: _Archive) -> int:
        """Offset after the last byte that the archive's hash covers, with the padding."""
        if archive.offset in self._parts:
            return max(self._parts[archive.offset][0], archive.offset + archive.length)
        return archive.offset + archive.length

    def _check(self, archive: _Archive, data: memoryview) -> None:
        if not self._file.parts:
            return  # the file was checked as a whole
        written = self._parts.get(archive.offset, (0, "no checksum"))[1]
        found = xxhash.xxh3_64_hexdigest(data)
        if found != written:
            raise CheckpointCorruptError(
                f"{archive.name!r} in the file {self._file.name} must have the checksum {written}, got {found}"
            )

    def _fill(self, name: str, piece: _Piece, values: torch.Tensor, *, keep: bool) -> None:
        if not is_plain(values):
            self._whole[name].append(Part(values, piece.item))
            return
        target = piece.target.detach()
        if piece.item is not None:
            values = _narrow(values, piece.item.storage_offsets, piece.item.lengths)
            target = _narrow(target, piece.item.dest_offsets, piece.item.lengths)
        if piece.is_new:
            target.copy_(values)
        else:
            self._fills.append(FillRequest(name, target, values if keep else values.clone()))


def _is_kept(run: list[_Archive], nbytes: int) -> bool:
    """True to keep a read buffer until the user's tensors are filled from it. See MAX_UNNEEDED_BYTES."""
    needed = count = 0
    for archive in run:
        dtype, shape = archive.shape or (torch.uint8, ())
        for piece in archive.pieces:
            if not piece.is_new:
                needed += math.prod(piece.item.lengths if piece.item else shape) * dtype.itemsize
                count += 1
    return nbytes - needed <= MAX_UNNEEDED_BYTES * count


def _values(archive: memoryview, name: str, shape: tuple[torch.dtype, tuple[int, ...]]) -> torch.Tensor:
    """Return a view of the values, if the bytes around them are those that torch.save writes."""
    frame, (dtype, sizes) = frame_of(*shape), shape
    before = len(frame.before)
    if len(archive) == frame.length and archive[:before] == frame.before:
        if not frame.nbytes:
            return torch.empty(sizes, dtype=dtype, device="cpu")
        values = torch.frombuffer(archive, dtype=dtype, count=math.prod(sizes), offset=before)
        return values if len(sizes) == 1 else values.view(sizes)
    return load_tensor(bytes(archive), name, dtype, sizes)  # written by another version of torch, or not a plain tensor


def _same(one: torch.Tensor, other: torch.Tensor, dtype: torch.dtype) -> bool:
    """Compare bytes, not values, because a NaN does not equal itself."""
    left, right = (value.to(dtype).flatten().view(torch.uint8) for value in (one, other))
    return torch.equal(left, right)


def _narrow(tensor: torch.Tensor, offsets: torch.Size, lengths: torch.Size) -> torch.Tensor:
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        if offset or length != tensor.shape[dim]:
            tensor = tensor.narrow(dim, offset, length)
    return tensor


def _check_whole(handle: SourceFile, file: CheckpointFile) -> None:
    """Check a file whose manifest has no checksums of single archives."""
    hasher = xxhash.xxh3_128()
    for begin in range(0, file.nbytes, RUN):
        *_, data = handle.copies(begin, min(RUN, file.nbytes - begin))
        hasher.update(bytes_of(data))
    if hasher.hexdigest() != file.xxh3:
        raise CheckpointCorruptError(f"the file {file.name} must have the checksum {file.xxh3}, got another")
