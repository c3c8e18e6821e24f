"""What each rank saves, and where it will lie: torch's plan, made once and kept while the state keeps its topology.

torch.distributed.checkpoint plans a save anew each time: a write item for each tensor on each rank, a gather of all
of them, a scatter. For an unchanged model the outcome is the same, so here it is agreed on once (`agree`) and then only
compared (`Collected.signature`). What differs from save to save are the lengths of objects: each rank tells its own.

A layout is complete before anything is written: the length of a tensor's archive follows from its dtype and shape
(torch_frames.py). So torch's `.metadata` can be described at once too (index_description.py), and nobody has to report
back for it.

A state has thousands of entries, and the first save plans each of them while the training waits. So an entry is one
tuple, what is said of tensors of one dtype and shape is one object, and torch's own, slower, kinds of items are made
where torch's planner is asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from penstock.client.checkpoint.saving.file_layout import Item, assign
from penstock.client.checkpoint.saving.index_description import Stored, described
from penstock.client.checkpoint.values.torch_frames import ALIGNMENT, TorchFrame, frame_of
from penstock.proto.errors import CheckpointError

__all__ = [
    "FileLayout",
    "GlobalPlan",
    "LocalItem",
    "RankLayout",
    "TensorItems",
    "agree",
    "decode_items",
    "encode_items",
    "lay_out",
]

DCP_VERSION = "1.0.0"
"""Of torch's checkpoint format, as FileSystemWriter writes it."""

Key = tuple[str, tuple[int, ...] | None]
"""What is saved: its name and, for a part of a tensor, where that begins."""


class LocalItem(NamedTuple):
    """Something that one rank could save."""

    key: Key
    hint: int | None
    """Where torch's reader looks first for the part among the tensor's parts."""
    data: TensorWriteData | None
    """None for an object."""
    frame: TorchFrame | None
    """Of a plain tensor, whose archive is its frame and its values; else torch.save's bytes, as long as they are."""
    kind: WriteItemType

    @classmethod
    def of(cls, item: WriteItem, framed: bool) -> LocalItem:
        """One of torch's. framed: it is a plain tensor."""
        index, data = item.index, item.tensor_data
        frame = frame_of(data.properties.dtype, tuple(data.chunk.sizes)) if framed and data is not None else None
        return cls((index.fqn, index.offset), index.index, data, frame, item.type)

    @property
    def name(self) -> str:
        return self.key[0]

    @property
    def torch_index(self) -> MetadataIndex:
        """Torch's name for it."""
        return MetadataIndex(*self.key, self.hint)

    @property
    def item(self) -> WriteItem:
        """For torch's planner."""
        return WriteItem(self.torch_index, self.kind, tensor_data=self.data)


class TensorItems:
    """Makes items of whole plain tensors, as torch's planner does.

    What is said of tensors of one dtype and shape is one object: so it is made once, described once, and loaded once.
    """

    def __init__(self) -> None:
        self._known: dict[Any, tuple[torch.Size, TensorWriteData, TorchFrame]] = {}

    def of(self, name: str, tensor: torch.Tensor) -> LocalItem:
        shape = tensor.shape
        kind = tensor.dtype, shape, tensor.requires_grad, tensor.is_pinned()
        known = self._known.get(kind)
        if known is None:
            begin = torch.Size([0] * len(shape))
            properties = TensorProperties.create_from_tensor(tensor)
            data = TensorWriteData(ChunkStorageMetadata(begin, shape), properties, shape)
            known = self._known[kind] = begin, data, frame_of(tensor.dtype, tuple(shape))
        begin, data, frame = known
        return LocalItem((name, begin), 0, data, frame, WriteItemType.TENSOR)


def encode_items(items: Sequence[LocalItem], paths: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    """As JSON, for the other ranks. paths: name -> the keys that lead to it."""
    rows: list[Any] = []
    for one in items:
        data, (name, offset) = one.data, one.key
        tensor = None
        if data is not None:
            dtype = str(data.properties.dtype).removeprefix("torch.")
            chunk = [list(data.chunk.offsets), list(data.chunk.sizes)]
            tensor = [dtype, data.properties.requires_grad, list(data.size), *chunk]
        rows.append([name, offset, one.hint, one.kind.name, one.frame is not None, tensor])
    return {"items": rows, "paths": [[name, list(path)] for name, path in paths.items()]}


def decode_items(value: dict[str, Any]) -> tuple[list[LocalItem], dict[str, tuple[Any, ...]]]:
    items = []
    known: dict[str, TensorWriteData] = {}
    for fqn, offset, hint, kind, framed, tensor in value["items"]:
        data = None
        if tensor is not None and (data := known.get(str(tensor))) is None:
            dtype, requires_grad, size, offsets, sizes = tensor
            properties = TensorProperties(dtype=getattr(torch, dtype), requires_grad=requires_grad)
            chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            data = known[str(tensor)] = TensorWriteData(chunk, properties, torch.Size(size))
        index = MetadataIndex(fqn, offset, hint)
        items.append(LocalItem.of(WriteItem(index, WriteItemType[kind], tensor_data=data), framed))
    return items, {name: tuple(path) for name, path in value["paths"]}


@dataclass(frozen=True)
class FileLayout:
    """One file of one rank: archives one after the other, the framed ones first."""

    name: str
    framed: tuple[tuple[LocalItem, int], ...]
    """With the offset of each in the file."""
    framed_bytes: int
    others: tuple[LocalItem, ...]
    """Whose lengths differ from save to save."""

    def places(self, lengths: dict[Key, int]) -> tuple[list[int], int]:
        """Offset of each of the others, and the length of the file."""
        places, offset = [], self.framed_bytes
        for one in self.others:
            offset = _aligned(offset)
            places.append(offset)
            offset += lengths[one.key]
        return places, offset

    def stored(self, lengths: dict[Key, int]) -> Iterator[Stored]:
        """What torch's index says of each of its archives."""
        for one, offset in self.framed:
            assert one.frame is not None
            yield one.key, one.hint, offset, one.frame.length
        for one, offset in zip(self.others, self.places(lengths)[0], strict=True):
            yield one.key, one.hint, offset, lengths[one.key]


@dataclass(frozen=True)
class RankLayout:
    """The files of one rank."""

    files: tuple[FileLayout, ...]


@dataclass
class GlobalPlan:
    """What all ranks agreed on."""

    layouts: list[RankLayout]
    metadata: Metadata
    """Without where things are stored."""
    shared: dict[Key, list[int]]
    """What several ranks have and one saves -> those ranks."""
    _made: tuple[Any, bytes] | None = field(default=None)
    """Lengths, and the description for them."""

    def files(self, lengths: Sequence[dict[Key, int]]) -> list[list[tuple[str, int]]]:
        """(name, bytes) of the files of each rank. lengths: by rank, of what is not framed."""
        return [
            [(file.name, file.places(lengths[rank])[1]) for file in layout.files]
            for rank, layout in enumerate(self.layouts)
        ]

    def index(self, lengths: Sequence[dict[Key, int]]) -> bytes:
        """A description of `.metadata`, for the writer to make it of. Made anew only if a length has changed."""
        if self._made is None or self._made[0] != lengths:
            files = [
                (file.name, file.stored(lengths[rank]))
                for rank, layout in enumerate(self.layouts)
                for file in layout.files
            ]
            self._made = list(lengths), described(self.metadata, files)
        return self._made[1]


def agree(
    everybody: Sequence[tuple[list[LocalItem], dict[str, tuple[Any, ...]]]], buckets: int, hint: str | None
) -> GlobalPlan:
    """The plan for what all ranks have to save. Every rank makes it for itself, of the same, and gets the same.

    Args:
        everybody: what `decode_items` returned, by rank.
        buckets, hint: as for `assign`.

    Raises CheckpointError where ranks contradict each other: one name for tensors of two shapes or dtypes, or for a
    tensor and an object.
    """
    metadata = _plan_alone(*everybody[0]) if len(everybody) == 1 else None
    saved, shared = [everybody[0][0]], {}
    if metadata is None:
        shared = _compare(everybody)
        saved, metadata = _plan_together(everybody)
    metadata.storage_meta, metadata.version = StorageMeta(), DCP_VERSION
    layouts = [lay_out(items, f"__{rank}_", buckets, hint) for rank, items in enumerate(saved)]
    return GlobalPlan(layouts, metadata, shared)


def _plan_alone(items: list[LocalItem], paths: dict[str, tuple[Any, ...]]) -> Metadata | None:
    """The plan of a single rank that saves nothing but whole tensors and objects: no other could have any of it.

    torch's planner would come to the same, and take four times as long.
    """
    stored: dict[str, BytesStorageMetadata | TensorStorageMetadata] = {}
    objects, tensors = BytesStorageMetadata(), dict[int, TensorStorageMetadata]()
    for (name, _), _, data, _, kind in items:
        if data is None:
            stored[name] = objects
        elif known := tensors.get(id(data)):
            stored[name] = known
        elif kind is WriteItemType.TENSOR and data.chunk.sizes == data.size:
            stored[name] = tensors[id(data)] = TensorStorageMetadata(data.properties, data.size, [data.chunk])
        else:
            return None
    return Metadata(stored, planner_data=dict(paths)) if len(stored) == len(items) else None


def _plan_together(
    everybody: Sequence[tuple[list[LocalItem], dict[str, tuple[Any, ...]]]],
) -> tuple[list[list[LocalItem]], Metadata]:
    """What each rank saves, by torch's planner: what several have is saved by one of them."""
    plans = [SavePlan([one.item for one in items], planner_data=paths) for items, paths in everybody]
    try:
        deduplicated, metadata = DefaultSavePlanner().create_global_plan(plans)
    except (ValueError, AssertionError) as error:
        raise CheckpointError(f"the ranks' states do not make one checkpoint: {error}") from error
    saved = []
    for plan, (items, _) in zip(deduplicated, everybody, strict=True):
        own = {one.key: one for one in items}
        indexes = [item.index for item in plan.items]
        saved.append([own[index.fqn, index.offset]._replace(hint=index.index) for index in indexes])
    return saved, metadata


def _compare(everybody: Sequence[tuple[list[LocalItem], Any]]) -> dict[Key, list[int]]:
    holders: dict[Key, list[int]] = {}
    kinds: dict[str, tuple[int, str]] = {}
    for rank, (items, _) in enumerate(everybody):
        for one in items:
            data = one.data
            kind = f"a {data.properties.dtype} tensor of {list(data.size)}" if data is not None else "an object"
            first, other = kinds.setdefault(one.name, (rank, kind))
            if kind != other:
                raise CheckpointError(
                    f"{one.name!r} is {other} on rank {first} and {kind} on rank {rank}: a checkpoint has "
                    "one value under a name. Give what differs by rank a name with the rank in it"
                )
            holders.setdefault(one.key, []).append(rank)
    return {key: ranks for key, ranks in holders.items() if len(ranks) > 1}


def lay_out(items: Sequence[LocalItem], prefix: str, buckets: int, hint: str | None) -> RankLayout:
    """Where in which files the items of one rank lie; arguments as for `assign`."""
    sizes = [Item(key[0], None if frame is None else frame.length) for key, _, _, frame, _ in items]
    files = []
    for bucket in assign(sizes, prefix, buckets, hint):
        framed, others, offset = [], [], 0
        for one in (items[place] for place in bucket.items):
            if one.frame is None:
                others.append(one)
                continue
            offset = _aligned(offset)
            framed.append((one, offset))
            offset += one.frame.length
        files.append(FileLayout(bucket.name, tuple(framed), offset, tuple(others)))
    return RankLayout(tuple(files))


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
