"""What each rank saves, and where it will lie: torch's plan, made once and kept while the state keeps its topology.

torch.distributed.checkpoint plans a save anew each time: a write item for each tensor on each rank, a gather of all
of them, a scatter. For an unchanged model the outcome is the same, so here it is agreed on once (`agree`) and then only
compared (`Collected.signature`). What differs from save to save are the lengths of objects: each rank tells its own.

A layout is complete before anything is written: the length of a tensor's archive follows from its dtype and shape
(torch_frames.py). So torch's `.metadata` can be made at once too, and nobody has to report back for it.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

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
from penstock.client.checkpoint.values.torch_frames import ALIGNMENT, frame_of
from penstock.client.checkpoint.values.torch_private import StorageInfo
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
    "key_of",
    "lay_out",
]

DCP_VERSION = "1.0.0"
"""Of torch's checkpoint format, as FileSystemWriter writes it."""

Key = tuple[str, tuple[int, ...] | None]
"""What is saved: its name and, for a part of a tensor, where that begins."""
Chunk = tuple[torch.dtype, tuple[int, ...]]
"""dtype and shape of the part of a tensor that is saved."""


def key_of(index: MetadataIndex) -> Key:
    return index.fqn, None if index.offset is None else tuple(index.offset)


@dataclass(frozen=True)
class LocalItem:
    """Something that one rank could save."""

    item: WriteItem
    framed: bool
    """A plain tensor, whose archive is its frame and its values; else torch.save's bytes, as long as they are."""

    key: Key = field(init=False)
    _chunk: Chunk | None = field(init=False)

    def __post_init__(self) -> None:
        data = self.item.tensor_data
        object.__setattr__(self, "key", key_of(self.item.index))
        object.__setattr__(self, "_chunk", data and (data.properties.dtype, tuple(data.chunk.sizes)))

    @property
    def chunk(self) -> Chunk:
        """Of a tensor."""
        assert self._chunk is not None
        return self._chunk


class TensorItems:
    """Makes write items of whole plain tensors, as torch's planner does.

    What is said of tensors of one dtype and shape is one object: so it is made once, pickled once, and loaded once.
    """

    def __init__(self) -> None:
        self._known: dict[Any, TensorWriteData] = {}

    def of(self, name: str, tensor: torch.Tensor) -> LocalItem:
        shape = tensor.shape
        kind = tensor.dtype, shape, tensor.requires_grad, tensor.is_pinned()
        data = self._known.get(kind)
        if data is None:
            chunk = ChunkStorageMetadata(torch.Size([0] * len(shape)), shape)
            data = self._known[kind] = TensorWriteData(chunk, TensorProperties.create_from_tensor(tensor), shape)
        index = MetadataIndex(name, data.chunk.offsets, 0)
        return LocalItem(WriteItem(index, WriteItemType.TENSOR, tensor_data=data), True)


def encode_items(items: Sequence[LocalItem], paths: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    """As JSON, for the other ranks. paths: name -> the keys that lead to it."""
    rows: list[Any] = []
    for one in items:
        data, offset = one.item.tensor_data, one.item.index.offset
        tensor = None
        if data is not None:
            dtype = str(data.properties.dtype).removeprefix("torch.")
            chunk = [list(data.chunk.offsets), list(data.chunk.sizes)]
            tensor = [dtype, data.properties.requires_grad, list(data.size), *chunk]
        rows.append([one.item.index.fqn, offset and list(offset), one.item.type.name, one.framed, tensor])
    return {"items": rows, "paths": [[name, list(path)] for name, path in paths.items()]}


def decode_items(value: dict[str, Any]) -> tuple[list[LocalItem], dict[str, tuple[Any, ...]]]:
    items = []
    known: dict[str, TensorWriteData] = {}
    for fqn, offset, kind, framed, tensor in value["items"]:
        data = None
        if tensor is not None and (data := known.get(str(tensor))) is None:
            dtype, requires_grad, size, offsets, sizes = tensor
            properties = TensorProperties(dtype=getattr(torch, dtype), requires_grad=requires_grad)
            chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            data = known[str(tensor)] = TensorWriteData(chunk, properties, torch.Size(size))
        index = MetadataIndex(fqn, None if offset is None else torch.Size(offset))
        items.append(LocalItem(WriteItem(index, WriteItemType[kind], tensor_data=data), framed))
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

    def places(self, lengths: dict[Key, int]) -> tuple[list[tuple[LocalItem, int, int]], int]:
        """Offset and length of each of the others, and the length of the file."""
        places, offset = [], self.framed_bytes
        for one in self.others:
            offset = _aligned(offset)
            places.append((one, offset, lengths[one.key]))
            offset += lengths[one.key]
        return places, offset


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

    def files(self, lengths: Sequence[dict[Key, int]]) -> list[list[tuple[str, int]]]:
        """(name, bytes) of the files of each rank. lengths: by rank, of what is not framed."""
        return [
            [(file.name, file.places(lengths[rank])[1]) for file in layout.files]
            for rank, layout in enumerate(self.layouts)
        ]

    def pickled(self, lengths: Sequence[dict[Key, int]]) -> bytes:
        """`.metadata`, as torch's reader wants it. Made anew only if a length has changed."""
        asked = [dict(one) for one in lengths]
        if self._made is None or self._made[0] != asked:
            places: dict[MetadataIndex, StorageInfo] = {}
            for rank, layout in enumerate(self.layouts):
                for file in layout.files:
                    for one, offset in file.framed:
                        length = frame_of(*one.chunk).length
                        places[one.item.index] = StorageInfo(file.name, offset, length)
                    for one, offset, length in file.places(lengths[rank])[0]:
                        places[one.item.index] = StorageInfo(file.name, offset, length)
            self.metadata.storage_data = places
            self._made = asked, pickle.dumps(self.metadata)
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
    objects = BytesStorageMetadata()
    for one in items:
        data = one.item.tensor_data
        if one.item.type is WriteItemType.BYTE_IO:
            stored[one.item.index.fqn] = objects
        elif one.item.type is WriteItemType.TENSOR and data is not None and data.chunk.sizes == data.size:
            stored[one.item.index.fqn] = TensorStorageMetadata(data.properties, data.size, [data.chunk])
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
        framed = {one.key: one.framed for one in items}
        saved.append([LocalItem(item, framed[key_of(item.index)]) for item in plan.items])
    return saved, metadata


def _compare(everybody: Sequence[tuple[list[LocalItem], Any]]) -> dict[Key, list[int]]:
    holders: dict[Key, list[int]] = {}
    kinds: dict[str, tuple[int, str]] = {}
    for rank, (items, _) in enumerate(everybody):
        for one in items:
            data = one.item.tensor_data
            kind = f"a {data.properties.dtype} tensor of {list(data.size)}" if data is not None else "an object"
            first, other = kinds.setdefault(one.item.index.fqn, (rank, kind))
            if kind != other:
                raise CheckpointError(
                    f"{one.item.index.fqn!r} is {other} on rank {first} and {kind} on rank {rank}: a checkpoint has "
                    "one value under a name. Give what differs by rank a name with the rank in it"
                )
            holders.setdefault(one.key, []).append(rank)
    return {key: ranks for key, ranks in holders.items() if len(ranks) > 1}


def lay_out(items: Sequence[LocalItem], prefix: str, buckets: int, hint: str | None) -> RankLayout:
    """Where in which files the items of one rank lie; arguments as for `assign`."""
    sizes = [Item(one.item.index.fqn, frame_of(*one.chunk).length if one.framed else None) for one in items]
    files = []
    for bucket in assign(sizes, prefix, buckets, hint):
        framed, offset = [], 0
        for one in (items[place] for place in bucket.items if items[place].framed):
            offset = _aligned(offset)
            framed.append((one, offset))
            offset += frame_of(*one.chunk).length
        others = tuple(items[place] for place in bucket.items if not items[place].framed)
        files.append(FileLayout(bucket.name, tuple(framed), offset, others))
    return RankLayout(tuple(files))


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
