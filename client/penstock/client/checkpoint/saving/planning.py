"""Plan of what each rank saves and where: torch's plan, made once and kept while the state keeps its structure. An item
is saved as a unit: a tensor, a part of one that is split over ranks, or another object. An archive is the bytes that
torch.save would write for one item.

torch.distributed.checkpoint describes, gathers and scatters all tensors at each save. Here the ranks agree once
(`agree`), then only compare signatures. A tensor's archive has a length that follows from dtype and shape
(torch_frames.py), so layout and index (`described`) are complete before anything is written.

The first save plans thousands of entries while the training waits. So an entry is one tuple, tensors of one dtype and
shape share one description, and torch's slower kinds of items are made only for torch's planner."""

from __future__ import annotations

import heapq
import io
import json
import pickle
import re
from collections.abc import Iterable, Iterator, Sequence
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

from penstock.client.checkpoint.values.torch_frames import ALIGNMENT, TorchFrame, frame_of
from penstock.client.checkpoint.values.torch_private import StorageInfo
from penstock.proto.errors import CheckpointError
from penstock.proto.state.checkpoint_index import ATTRIBUTES, FORMAT

SUFFIX = ".distcp"
DCP_VERSION = "1.0.0"

Key = tuple[str, tuple[int, ...] | None]
"""Name of the value, and offset of the tensor's part: zeros for a whole tensor, None for an object."""

Stored = tuple[tuple[str, tuple[int, ...] | None], int | None, int, int]
"""Value's name, offset in its tensor (None: object) and hint, as in MetadataIndex; offset and bytes in the file."""


class LocalItem(NamedTuple):
    """Item that this rank could save. If several ranks have it, the plan chooses one."""

    key: Key
    hint: int | None
    """As in torch's MetadataIndex: 0 for a whole tensor; None for an object, or until torch's planner sets it."""
    data: TensorWriteData | None
    """Offsets, sizes, dtype of the tensor or part. None for an object."""
    frame: TorchFrame | None
    """Bytes around a plain tensor's values (torch_frames.py), so that these can be copied into its archive. None:
    unframed; torch.save writes the archive, whose length may change from save to save."""
    kind: WriteItemType

    @classmethod
    def of(cls, item: WriteItem, framed: bool) -> LocalItem:
        index, data = item.index, item.tensor_data
        frame = frame_of(data.properties.dtype, tuple(data.chunk.sizes)) if framed and data is not None else None
        return cls((index.fqn, index.offset), index.index, data, frame, item.type)

    @property
    def name(self) -> str:
        return self.key[0]

    @property
    def torch_index(self) -> MetadataIndex:
        return MetadataIndex(*self.key, self.hint)

    @property
    def item(self) -> WriteItem:
        return WriteItem(self.torch_index, self.kind, tensor_data=self.data)


class TensorItems:
    """Items for whole plain tensors, equal to torch's. One dtype and shape share one description, pickled only once."""

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
    """Layout of one file of a rank: the archives of framed items, then those of the others."""

    name: str
    framed: tuple[tuple[LocalItem, int], ...]
    """Each with the offset of its archive in bytes."""
    framed_bytes: int
    others: tuple[LocalItem, ...]

    def offsets(self, lengths: dict[Key, int]) -> tuple[list[int], int]:
        """Return the offset of the archive of each item in `others`, and the length of the file."""
        offsets, offset = [], self.framed_bytes
        for one in self.others:
            offset = _aligned(offset)
            offsets.append(offset)
            offset += lengths[one.key]
        return offsets, offset

    def stored(self, lengths: dict[Key, int]) -> Iterator[Stored]:
        for one, offset in self.framed:
            assert one.frame is not None
            yield one.key, one.hint, offset, one.frame.length
        for one, offset in zip(self.others, self.offsets(lengths)[0], strict=True):
            yield one.key, one.hint, offset, lengths[one.key]


RankLayout = tuple[FileLayout, ...]


@dataclass
class GlobalPlan:
    layouts: list[RankLayout]
    metadata: Metadata
    """torch's index, without `storage_data`, which says where each archive is."""
    shared: dict[Key, list[int]]
    """Items that several ranks have and only one saves, with the ranks that have them."""
    _made: tuple[Any, bytes] | None = field(default=None)

    def files(self, lengths: Sequence[dict[Key, int]]) -> list[list[tuple[str, int]]]:
        """Return (name, length in bytes) of the files of each rank."""
        return [
            [(file.name, file.offsets(lengths[rank])[1]) for file in layout] for rank, layout in enumerate(self.layouts)
        ]

    def index(self, lengths: Sequence[dict[Key, int]]) -> bytes:
        if self._made is None or self._made[0] != lengths:
            files = [
                (file.name, file.stored(lengths[rank])) for rank, layout in enumerate(self.layouts) for file in layout
            ]
            self._made = list(lengths), described(self.metadata, files)
        return self._made[1]


def agree(
    by_rank: Sequence[tuple[list[LocalItem], dict[str, tuple[Any, ...]]]], buckets: int, hint: str | None
) -> GlobalPlan:
    """Return the plan, equal on all ranks. Raises CheckpointError if one name has two shapes, dtypes or kinds."""
    metadata = _plan_alone(*by_rank[0]) if len(by_rank) == 1 else None
    saved, shared = [by_rank[0][0]], {}
    if metadata is None:
        shared = _compare(by_rank)
        saved, metadata = _plan_together(by_rank)
    metadata.storage_meta, metadata.version = StorageMeta(), DCP_VERSION
    layouts = [lay_out(items, f"__{rank}_", buckets, hint) for rank, items in enumerate(saved)]
    return GlobalPlan(layouts, metadata, shared)


def _plan_alone(items: list[LocalItem], paths: dict[str, tuple[Any, ...]]) -> Metadata | None:
    """Return the index of one rank's whole tensors and objects, four times faster than torch; else None."""
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
    by_rank: Sequence[tuple[list[LocalItem], dict[str, tuple[Any, ...]]]],
) -> tuple[list[list[LocalItem]], Metadata]:
    plans = [SavePlan([one.item for one in items], planner_data=paths) for items, paths in by_rank]
    try:
        deduplicated, metadata = DefaultSavePlanner().create_global_plan(plans)
    except (ValueError, AssertionError) as error:
        raise CheckpointError(f"the ranks' states cannot be combined into one checkpoint: {error}") from error
    saved = []
    for plan, (items, _) in zip(deduplicated, by_rank, strict=True):
        own = {one.key: one for one in items}
        indexes = [item.index for item in plan.items]
        saved.append([own[index.fqn, index.offset]._replace(hint=index.index) for index in indexes])
    return saved, metadata


def _compare(by_rank: Sequence[tuple[list[LocalItem], Any]]) -> dict[Key, list[int]]:
    holders: dict[Key, list[int]] = {}
    kinds: dict[str, tuple[int, str]] = {}
    for rank, (items, _) in enumerate(by_rank):
        for one in items:
            data = one.data
            kind = f"a {data.properties.dtype} tensor of {list(data.size)}" if data is not None else "an object"
            first, other = kinds.setdefault(one.name, (rank, kind))
            if kind != other:
                raise CheckpointError(
                    f"{one.name!r} is {other} on rank {first} and {kind} on rank {rank}: put the rank into its name"
                )
            holders.setdefault(one.key, []).append(rank)
    return {key: ranks for key, ranks in holders.items() if len(ranks) > 1}


def lay_out(items: Sequence[LocalItem], prefix: str, buckets: int, hint: str | None) -> RankLayout:
    sizes = [Item(key[0], None if frame is None else frame.length) for key, _, _, frame, _ in items]
    files = []
    for bucket in assign(sizes, prefix, buckets, hint):
        framed, others, offset = [], [], 0
        for one in (items[index] for index in bucket.items):
            if one.frame is None:
                others.append(one)
                continue
            offset = _aligned(offset)
            framed.append((one, offset))
            offset += one.frame.length
        files.append(FileLayout(bucket.name, tuple(framed), offset, tuple(others)))
    return tuple(files)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


# ---- files of a rank


class Item(NamedTuple):
    name: str
    nbytes: int | None
    """None for an object, whose size does not decide its file."""


@dataclass(frozen=True)
class Bucket:
    name: str
    items: tuple[int, ...]
    """Indexes in the list given to `assign`: tensors, the largest first, then objects."""


def assign(items: Sequence[Item], prefix: str, buckets: int, hint: str | None = None) -> list[Bucket]:
    """Return the files for `items`, none empty; at most `buckets`, and as many for names that begin with `hint`.

    Tensors go, the largest first, each to the file with the fewest bytes, so that the threads, one for each file,
    finish together. (The longest is at most 4/3 of the best possible: R. L. Graham, "Bounds on multiprocessing timing
    anomalies", SIAM J. Appl. Math. 17, 1969.)"""
    matching = [index for index, item in enumerate(items) if hint and item.name.startswith(hint)]
    others = sorted(set(range(len(items))) - set(matching))
    own = re.sub(r"[^A-Za-z0-9_-]", "_", hint or "")[:100]  # the length of file names is limited
    return _split(items, others, prefix, buckets) + _split(items, matching, f"{own}{prefix}", buckets)


def _split(items: Sequence[Item], indexes: Sequence[int], prefix: str, buckets: int) -> list[Bucket]:
    contents: list[list[int]] = [[] for _ in range(buckets)]
    tensors = [(nbytes, index) for index in indexes if (nbytes := items[index].nbytes) is not None]
    emptiest = [(0, number) for number in range(buckets)]
    for nbytes, index in sorted(tensors, key=lambda one: (-one[0], one[1])):
        load, number = heapq.heappop(emptiest)
        contents[number].append(index)
        heapq.heappush(emptiest, (load + nbytes, number))
    objects = [index for index in indexes if items[index].nbytes is None]
    for turn, index in enumerate(objects):
        contents[turn % buckets].append(index)
    filled = [content for content in contents if content]
    return [Bucket(f"{prefix}{number}{SUFFIX}", tuple(content)) for number, content in enumerate(filled)]


# ---- the index


_to_json = json.JSONEncoder(check_circular=False).encode  # the check takes a quarter of the time


class _Parts:
    def __init__(self) -> None:
        self._values: list[Any] = []
        self._numbers: dict[int, int] = {}

    def number(self, value: Any) -> int:
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._values)
            self._values.append(value)
        return number

    def pickled(self) -> dict[str, Any]:
        file = io.BytesIO()
        # Pickles of newer protocols contain frames with lengths, and could not be embedded in another pickle.
        pickler = pickle.Pickler(file, 3)
        pickler.dump(self._values)
        memo = pickler.memo.copy()
        return {
            "parts": file.getvalue().decode("latin-1"),
            "memo": len(memo),
            "places": [memo[id(value)][0] for value in self._values],
        }


def described(metadata: Metadata, files: Iterable[tuple[str, Iterable[Stored]]]) -> bytes:
    """Return the arguments of IndexPickle as JSON. `metadata`: torch's index without its `storage_data`."""
    parts = _Parts()
    number = parts.number
    for part in (Metadata, TensorStorageMetadata, MetadataIndex, StorageInfo, *ATTRIBUTES):
        number(part)
    tensors: list[Any] = []
    in_torch: list[Any] = []
    known: dict[int, int] = {}
    values: dict[str, list[Any]] = {name: [None, path] for name, path in metadata.planner_data.items()}
    for name, stored in metadata.state_dict_metadata.items():
        if not isinstance(stored, TensorStorageMetadata):
            continue
        if (kind := known.get(id(stored))) is None:
            kind = known[id(stored)] = len(tensors)
            dtype = str(stored.properties.dtype).removeprefix("torch.")
            tensors.append([dtype, stored.size, [[chunk.offsets, chunk.sizes] for chunk in stored.chunks]])
            chunks = [[number(chunk), number(chunk.offsets)] for chunk in stored.chunks]
            in_torch.append([number(stored.properties), number(stored.size), chunks])
        values[name][0] = kind
    names = []
    for file, (name, archives) in enumerate(files):
        names.append(name)
        for (value, _), chunk, offset, length in archives:
            values[value] += (chunk or 0, file, offset, length)
    torch_index = {
        "tensors": in_torch,
        "object": number(BytesStorageMetadata()),
        "storage_meta": number(metadata.storage_meta),
        "version": number(DCP_VERSION),
    }
    index = {"format": FORMAT, "tensors": tensors, "files": names, "values": values}
    return _to_json({"index": index, "torch": {**torch_index, **parts.pickled()}}).encode()
