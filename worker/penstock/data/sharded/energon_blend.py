"""Sources and datasets from a metadataset file, in which Megatron Energon lists folders by split and how to mix them.
In version 1 a split has a list `datasets`, in version 2 one of `blend`, `blend_epochized`, `concat` and `path`.

A path is relative to the file that contains it. If it leads to another metadataset file, the folders of that file are
inserted: their weights or repetitions are multiplied by the entry's, whose subflavors override theirs.
"""

from __future__ import annotations

import copy
import os
import posixpath
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import torch.utils.data
import xxhash

from penstock.data.formats.records.energon_folder import load_yaml, sample_loader_of
from penstock.data.loading.streaming_loader import BLOCK
from penstock.data.remote.folders import RemoteFolder
from penstock.data.sharded.layers.mixture import Mixture
from penstock.data.sharded.sources.logical_shards import LogicalShards
from penstock.data.streaming_dataset import StreamingDataset
from penstock.data.streams import Stream, prepared_folder, stream_names
from penstock.proto.errors import DatasetError, InvalidArgumentError

SampleLoader = Callable[[dict[str, Any]], dict[str, Any]]
READ_S = 60.0


def energon_blend(
    path: str | os.PathLike[str],
    split: str = "train",
    *,
    shards: int,
    shuffle: bool = True,
    shuffle_block: int | None = BLOCK,
    local: str | os.PathLike[str] | None = None,
    sample_loaders: Mapping[str, SampleLoader] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> Mixture | LogicalShards:
    """Return a source for training, made from one split of an Energon metadataset file.

        loader = ShardLoader(energon_blend("blend.yaml", shards=64), batch_size=32)

    A split of the kind `blend` becomes an endless Mixture with the same weights: a folder that is read to its end
    begins again. `blend_epochized`, `concat` and a single folder become one finite source: an epoch has each sample of
    a folder as often as the folder's `repetitions` say. Index each folder first, by index_folder. If any folder has
    subflavors (values that Energon adds to each sample), each sample has the field `__subflavors__`.

    Args:
        path: path or URL of the metadataset file.
        split: name of the split to read, such as "train".
        shards, shuffle, shuffle_block: see LogicalShards.
        local: folder for the caches of remote folders, one subfolder for each; None: the user's cache folder.
        sample_loaders: function by a folder's name, from a sample (a dict of its files in the archive) to a dict. Each
            folder whose dataset.yaml names a `sample_loader` needs one, because code in a data folder is never run.
        storage_options: keyword arguments for fsspec's filesystem, for remote folders.
        options: other keyword arguments of StreamingDataset, for each folder.

    Raises:
        InvalidArgumentError: an argument is invalid.
        DatasetError: a file or a folder cannot be read, or has a setting that Penstock does not support.
        ShardUnavailableError: a remote folder, or its index, cannot be read.
    """
    plan = _plan(path, split, storage_options)
    datasets = _opened(plan, local, sample_loaders or {}, {"storage_options": storage_options, **options})
    names = stream_names([member.path for member in plan.members])
    settings: dict[str, Any] = {"shards": shards, "shuffle": shuffle, "shuffle_block": shuffle_block}
    settings["capture_rng"] = bool(sample_loaders) or any(dataset.clips_draw for dataset in datasets)
    if plan.kind != "blend":
        pieces = [
            (name, dataset if not number else copy.copy(dataset))
            for name, dataset, member in zip(names, datasets, plan.members, strict=True)
            for number in range(member.repetitions)
        ]
        return LogicalShards([piece for _, piece in pieces], names=[name for name, _ in pieces], **settings)
    sources = [LogicalShards([each], names=[name], **settings) for name, each in zip(names, datasets, strict=True)]
    return Mixture(sources, [member.weight for member in plan.members], names=names)


def energon_concat(
    path: str | os.PathLike[str],
    split: str = "val",
    *,
    local: str | os.PathLike[str] | None = None,
    sample_loaders: Mapping[str, SampleLoader] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> torch.utils.data.ConcatDataset[dict[str, Any]]:
    """Return a dataset for validation: all samples of a split of an Energon metadataset file, each once, folder by
    folder. Weights and repetitions are ignored, as in Energon. Arguments and errors as in `energon_blend`.

        loader = MapLoader(energon_concat("blend.yaml", "val"), batch_size=32)
    """
    plan = _plan(path, split, storage_options)
    return torch.utils.data.ConcatDataset(
        _opened(plan, local, sample_loaders or {}, {"storage_options": storage_options, **options})
    )


class _Member(StreamingDataset):
    """Folder of a blend, whose samples pass through the user's sample loader, or get subflavors, or both."""

    def __init__(self, *args: Any, subflavors: Mapping[str, Any] | None, loader: SampleLoader | None, **options: Any):
        super().__init__(*args, **options)
        self._subflavors, self._loader = subflavors, loader

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return [self._made(sample) for sample in found] if isinstance(found, list) else self._made(found)

    def _made(self, sample: dict[str, Any]) -> dict[str, Any]:
        if self._loader is not None:
            sample = {"__key__": sample["__key__"], **self._loader(sample)}
        return sample if self._subflavors is None else {**sample, "__subflavors__": dict(self._subflavors)}


def _plan(path: str | os.PathLike[str], split: str, storage_options: Mapping[str, Any] | None) -> BlendPlan:
    def read(path: str) -> bytes:
        folder, _, name = path.rpartition("/")
        remote = RemoteFolder(folder, storage_options)
        try:
            return remote.read(name, deadline_s=READ_S)
        finally:
            remote.close()

    given = os.fspath(path)
    return read_plan(given if "://" in given else os.path.abspath(given), split, read)


def _opened(
    plan: BlendPlan,
    local: str | os.PathLike[str] | None,
    loaders: Mapping[str, SampleLoader],
    options: dict[str, Any],
) -> list[StreamingDataset]:
    known = {member.name for member in plan.members}
    unknown = [name for name in loaders if name not in known]
    if unknown:
        raise InvalidArgumentError(
            f"sample_loaders must name folders of the blend ({', '.join(sorted(known))}), got {', '.join(unknown)}"
        )
    return [_dataset(plan, member, local, loaders.get(member.name), options) for member in plan.members]


def _cache_name(plan: BlendPlan, member: BlendMember) -> str:
    """Folders of one name get a hash of their path, because a cache is of one remote."""
    if len({one.path for one in plan.members if one.name == member.name}) == 1:
        return member.name
    return f"{member.name}-{xxhash.xxh3_64_hexdigest(member.path.encode())}"


def _dataset(
    plan: BlendPlan,
    member: BlendMember,
    local: str | os.PathLike[str] | None,
    loader: SampleLoader | None,
    options: dict[str, Any],
) -> StreamingDataset:
    cache = Path(local) / _cache_name(plan, member) if local is not None and "://" in member.path else None
    stream = Stream(member.path, cache, member.split, storage_options=options["storage_options"] or {})
    folder = prepared_folder(stream)
    if folder is None:
        raise DatasetError(f"{member.path} must have .nv-meta/split.yaml. Run `energon prepare` and index_folder")
    named = sample_loader_of(folder)
    if named and loader is None:
        raise DatasetError(
            f"{member.path}: dataset.yaml names the sample_loader {named!r}, which is not run, because code in a data "
            f"folder is never run. Import the function yourself, and pass sample_loaders={{{member.name!r}: function}}"
        )
    if loader is None and not plan.flavored:
        return StreamingDataset(member.path, cache, split=member.split, **options)
    subflavors = member.subflavors if plan.flavored else None
    return _Member(member.path, cache, split=member.split, subflavors=subflavors, loader=loader, **options)


DEEPEST = 16
"""Largest number of links in a chain of metadataset files."""
_KINDS: Mapping[str, Kind] = {
    "datasets": "blend",
    "blend": "blend",
    "blend_epochized": "blend_epochized",
    "concat": "concat",
}
_REFUSED = {
    "join": "samples of several folders cannot be joined. Write the joined samples to archives of their own",
    "joiner": "samples of several folders cannot be joined. Write the joined samples to archives of their own",
    "subset": "a part of a folder cannot be chosen. List the archives of the part as a split in its split.yaml",
    "aux": "files beside the archives cannot be read. Write them into the archives",
    "dataset_config": "index_folder reads dataset.yaml. Give your file this name, and index the folder again",
    "split_config": "index_folder reads split.yaml. Give your file this name, and index the folder again",
}
_DEFAULTS = {"dataset_config": "dataset.yaml", "split_config": "split.yaml"}

T = TypeVar("T")
Kind = Literal["blend", "blend_epochized", "concat"]
Read = Callable[[str], bytes]
"""From a path or URL to the file's content."""


@dataclass(frozen=True)
class BlendMember:
    path: str
    split: str
    subflavors: Mapping[str, Any]
    weight: Fraction = Fraction(1)
    repetitions: int = 1

    @property
    def name(self) -> str:
        return self.path.rstrip("/").rpartition("/")[2]


@dataclass(frozen=True)
class BlendPlan:
    kind: Kind
    members: tuple[BlendMember, ...]
    flavored: bool


def read_plan(path: str, split: str, read: Read) -> BlendPlan:
    kind, members = _Reader(read).split(path, split, {}, 0)
    if not members:
        raise DatasetError(f"{path}: the split {split!r} must have at least one folder, got none. Add one to the file")
    return BlendPlan(kind, tuple(members), any(member.subflavors for member in members))


class _Entry(msgspec.Struct):
    """Folder or metadataset file that a split names. `subflavor`: field of old files."""

    path: Annotated[str, msgspec.Meta(min_length=1)]
    split_part: Any = None
    subflavors: dict[Any, Any] | None = None
    subflavor: Any = None
    weight: Annotated[float, msgspec.Meta(ge=0, le=1e300)] = 1.0
    repetitions: float = 1.0
    shuffle_over_epochs_multiplier: Annotated[int, msgspec.Meta(ge=1)] = 1


class _File(msgspec.Struct):
    splits: dict[str, Any]
    kind: Literal["Metadataset", "MetadatasetV2"] = msgspec.field(name="__class__", default="Metadataset")


def _converted(path: str, value: Any, kind: type[T], what: str) -> T:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise DatasetError(f"{path}: {what} is invalid: {error}. Correct the file") from None


class _Reader:
    def __init__(self, read: Read) -> None:
        self._read = read

    def split(self, path: str, split: str, outer: Mapping[str, Any], depth: int) -> tuple[Kind, list[BlendMember]]:
        """`outer`: subflavors from the files that lead to this one; `depth`: their number."""
        if depth > DEEPEST:
            raise DatasetError(
                f"{path}: metadataset files must not name each other more than {DEEPEST} deep. Remove the cycle"
            )
        splits = self._splits(path)
        if split not in splits:
            raise InvalidArgumentError(f"{path}: split must be one of {', '.join(splits)}, got {split!r}")
        content = splits[split]
        listed = [key for key in _KINDS if isinstance(content, dict) and key in content]
        if not listed:
            return self._member(path, self._entry(path, content), split, outer, depth)
        self._refuse(path, content)
        if len(content) > 1:
            raise DatasetError(
                f"{path}: the split {split!r} must have path or one of {', '.join(_KINDS)}, got {[*content]}"
            )
        kind, entries = _KINDS[listed[0]], _converted(path, content[listed[0]], list[Any], listed[0])
        return kind, self._joined(path, kind, [self._entry(path, each) for each in entries], split, outer, depth)

    def _joined(
        self, path: str, kind: Kind, entries: list[_Entry], split: str, outer: Mapping[str, Any], depth: int
    ) -> list[BlendMember]:
        weights = [Fraction(str(entry.weight)) for entry in entries]
        total = sum(weights)
        if kind == "blend" and not total:
            raise DatasetError(f"{path}: at least one weight must be above 0, got {len(weights)} weights of 0")
        members: list[BlendMember] = []
        for entry, weight in zip(entries, weights, strict=True):
            inner, found = self._member(path, entry, split, outer, depth)
            if inner not in (kind, "concat"):
                raise DatasetError(
                    f"{path}: {entry.path} must not be a {inner} within a {kind}, as in Energon. Use one of them"
                )
            if kind == "blend":
                found = [replace(one, weight=one.weight * weight / total) for one in found]
            if kind == "blend_epochized":
                if entry.repetitions < 1 or not entry.repetitions.is_integer():
                    raise DatasetError(
                        f"{path}: repetitions must be a whole number >= 1, got {entry.repetitions}. For fractions use "
                        "`blend`"
                    )
                found = [replace(one, repetitions=one.repetitions * int(entry.repetitions)) for one in found]
            members += found
        return members

    def _member(
        self, path: str, entry: _Entry, split: str, outer: Mapping[str, Any], depth: int
    ) -> tuple[Kind, list[BlendMember]]:
        own = entry.subflavors or {}
        if entry.subflavor is not None:
            own = {"__subflavor__": entry.subflavor, **own}
        where, part, flavors = _beside(path, entry.path), str(entry.split_part or split), {**own, **outer}
        if where.endswith((".yaml", ".yml")):
            return self.split(where, part, flavors, depth + 1)
        if where.endswith((".jsonl", ".json")):
            raise DatasetError(
                f"{path}: {entry.path} must be a folder, got a file of lines. Index its folder as a source of its own"
            )
        return "concat", [BlendMember(where, part, flavors)]

    def _splits(self, path: str) -> dict[str, Any]:
        try:
            content = load_yaml(path, self._read(path).decode())
        except ValueError as error:
            raise DatasetError(f"{path} cannot be read: {error}. Correct the file") from error
        return _converted(path, content, _File, "the metadataset").splits

    def _entry(self, path: str, value: Any) -> _Entry:
        if isinstance(value, dict):
            self._refuse(path, value)
        return _converted(path, value, _Entry, "an entry of a split")

    def _refuse(self, path: str, entry: Mapping[str, Any]) -> None:
        """Raise DatasetError for a setting with which Penstock could not yield Energon's samples."""
        for field, why in _REFUSED.items():
            if entry.get(field) not in (None, _DEFAULTS.get(field)):
                raise DatasetError(f"{path}: {field} must be left out, because {why}")


def _beside(path: str, target: str) -> str:
    if "://" in target or target.startswith("/"):
        return target
    scheme, mark, rest = path.rpartition("://")
    return scheme + mark + posixpath.normpath(posixpath.join(posixpath.dirname(rest), target))
