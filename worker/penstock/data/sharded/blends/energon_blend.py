"""Sources and datasets made from a metadataset file, in which Megatron Energon lists folders and how to mix them.
energon_plan.py parses the file."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.utils.data
import xxhash

from penstock.data.formats.records.energon_folder import sample_loader_of
from penstock.data.loading.streaming_loader import BLOCK
from penstock.data.remote.folders import RemoteFolder
from penstock.data.sharded.blends.energon_plan import BlendMember, BlendPlan, read_plan
from penstock.data.sharded.layers.mixture import Mixture
from penstock.data.sharded.sources.logical_shards import LogicalShards
from penstock.data.streaming_dataset import StreamingDataset
from penstock.data.streams import Stream, prepared_folder, stream_names
from penstock.proto.errors import DatasetError, InvalidArgumentError

__all__ = ["energon_blend", "energon_concat"]

SampleLoader = Callable[[dict[str, Any]], dict[str, Any]]
READ_S = 60.0
"""Seconds to wait for the content of a metadataset file."""


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

    A split of the kind `blend` becomes an endless Mixture with the same weights: a folder that is read to its end is
    begun again, independently of the others. `blend_epochized`, `concat` and a single folder become one finite source:
    an epoch has each sample of a folder as many times as the folder's `repetitions` say. Index each folder first, by
    index_folder.

    Args:
        path: path or URL of the metadataset file.
        split: name of the split to read, such as "train".
        shards, shuffle, shuffle_block: see LogicalShards.
        local: folder for the caches of remote folders, each in a subfolder with the remote folder's name (and a hash of
            its path, if several have this name); None: the user's cache folder.
        sample_loaders: dict from a folder's name to a function, for all folders with this name. It must have each
            folder whose dataset.yaml names a `sample_loader`, because code in a data folder is never run. The function
            gets a sample as a dict of its files in the archive, and returns a dict.
        storage_options: keyword arguments for fsspec's filesystem, for remote folders.
        options: other keyword arguments of StreamingDataset, for each folder.

    If any folder has subflavors (values that Energon adds to each sample), each sample has the field `__subflavors__`.

    Raises:
        InvalidArgumentError: an argument is invalid.
        DatasetError: a file or a folder cannot be read, or the file has a setting that Penstock does not support.
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
    """Return a dataset for validation: all samples of a split of an Energon metadataset file, each once, one folder
    after the other. Weights and repetitions are ignored, as in Energon.

        loader = MapLoader(energon_concat("blend.yaml", "val"), batch_size=32)

    Arguments and errors as in `energon_blend`.
    """
    plan = _plan(path, split, storage_options)
    return torch.utils.data.ConcatDataset(
        _opened(plan, local, sample_loaders or {}, {"storage_options": storage_options, **options})
    )


class _Member(StreamingDataset):
    """Dataset of one prepared folder of a blend, whose samples are passed through the user's sample loader, or get
    subflavors (Energon's word for values that are added to each sample), or both."""

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
    """Return an opened dataset for each folder of a blend's plan."""
    known = {member.name for member in plan.members}
    unknown = [name for name in loaders if name not in known]
    if unknown:
        raise InvalidArgumentError(
            f"sample_loaders must name folders of the blend ({', '.join(sorted(known))}), got {', '.join(unknown)}. "
            "Correct the names"
        )
    return [_dataset(plan, member, local, loaders.get(member.name), options) for member in plan.members]


def _cache_name(plan: BlendPlan, member: BlendMember) -> str:
    """Return the name of the subfolder for a folder's cache. Folders of one name in different places get a hash of
    their path, because a cache holds the files of one remote."""
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
        raise DatasetError(
            f"{member.path} must be a folder that Energon prepared, but has no .nv-meta/split.yaml. Correct the path, "
            "or run `energon prepare` and index_folder"
        )
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
