"""Merging of the indexes of several folders into one index, on this machine or at a remote."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from penstock.data.arguments import truth
from penstock.data.formats.index import INDEX, OWN_INDEX, SPLITS_NOTE, entry_text, shard_below
from penstock.data.formats.shards import Shard
from penstock.data.indexes.joined_index import GivenIndex, joined_index, shards_in
from penstock.data.remote.folders import RemoteFolder
from penstock.data.writing.publish import check_no_versions, publish
from penstock.data.writing.uploads import local_folder, writable_remote
from penstock.proto.errors import DatasetError, InvalidArgumentError

Folder = str | os.PathLike[str]


def merge_index(
    folder: Folder | tuple[Folder, str],
    parts: Sequence[Folder] | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
    timeout_s: float = 600.0,
    append: bool = False,
) -> Sequence[Shard]:
    """Merge the indexes of all datasets below `folder` into one index there, in the order of their paths; return its
    shards.

        merge_index("s3://bucket/data")  # from data/part-0/index.json, data/part-1/index.json, ...

    It gets the name of the others, index.json or _penstock_index.json. An index in `folder` itself is replaced. One
    below another indexed folder is left out, because the upper index may list its shards already.

    Args:
        folder: a local folder or a URL; (local folder, URL) reads from the URL and writes to both.
        parts: paths or URLs of the folders to merge, in this order; None: all that have an index. Give `parts` for an
            object store with millions of shards, because otherwise all files are listed.
        storage_options: keyword arguments for fsspec's filesystem.
        timeout_s: seconds for each file.
        append: True: publish a new version of the dataset in `folder`: the shards of its newest version, then those of
            the parts that it does not have.

    Raises DatasetError if there is no index, or one cannot be read; ShardUnavailableError.
    """
    truth("append", append)
    local = None
    if isinstance(folder, tuple):
        local, folder = RemoteFolder(local_folder("folder", folder[0])), folder[1]
    text = os.fspath(folder)
    remote = writable_remote(text if "://" in text else str(local_folder("folder", folder)), storage_options)
    try:
        if not append:
            check_no_versions(remote.names(deadline_s=timeout_s), remote.url)
        below = _all_below(remote, timeout_s) if parts is None else [_below(text, os.fspath(part)) for part in parts]
        if not below:
            raise DatasetError(f"{remote.url} must have at least one folder with an {INDEX} below it, got none")
        files = [_index_in(remote, name, timeout_s) for name in below]
        given = [
            (name, GivenIndex(remote, f"{name}/{file}", timeout_s)) for name, file in zip(below, files, strict=True)
        ]
        made = [entry_text(shard_below(name, shard)) for name, index in given for _, shard in index.entries()]
        splits = {tuple(index.notes.get(SPLITS_NOTE, ())) for _, index in given}
        if len(splits) > 1 and max(map(len, splits)) > 1:
            got = " and ".join(map(str, sorted(splits)))
            raise DatasetError(f"{remote.url}: all parts must have the same splits, got {got}. Index each split alone")
        notes: dict[str, Any] | None = {SPLITS_NOTE: list(*splits)} if len(splits) == 1 and any(splits) else None
        index, shards = joined_index(made, notes), shards_in(made)
        if append:
            _, shards = publish(remote, shards, timeout_s=timeout_s)
            index, file = GivenIndex(remote, INDEX, timeout_s).data if local is not None else b"", INDEX
        else:
            file = OWN_INDEX if {*files} == {OWN_INDEX} else INDEX
            _replace(remote, file, index, timeout_s)
        if local is not None:
            _replace(local, file, index, timeout_s)
    finally:
        remote.close()
    return shards


def _index_in(remote: RemoteFolder, folder: str, timeout_s: float) -> str:
    return OWN_INDEX if remote.exists(f"{folder}/{OWN_INDEX}", deadline_s=timeout_s) else INDEX


def _replace(remote: RemoteFolder, name: str, index: bytes, timeout_s: float) -> None:
    remote.write(name, index, deadline_s=timeout_s)
    other = INDEX if name == OWN_INDEX else OWN_INDEX
    if remote.exists(other, deadline_s=timeout_s):
        remote.remove(other, deadline_s=timeout_s)


def _all_below(remote: RemoteFolder, timeout_s: float) -> list[str]:
    paths = {
        PurePosixPath(name).parent
        for name in remote.find(deadline_s=timeout_s)
        if name.rpartition("/")[2] in (INDEX, OWN_INDEX)
    }
    found: list[PurePosixPath] = []
    for path in sorted(paths, key=lambda path: path.parts):
        if path.parts and not any(path.is_relative_to(other) for other in found):
            found.append(path)
    return [str(path) for path in found]


def _below(folder: str, part: str) -> str:
    """Return a dataset's path below `folder`; `part` may be its index. Raise InvalidArgumentError for others."""
    inside = part.removesuffix(OWN_INDEX).removesuffix(INDEX).rstrip("/").removeprefix(folder.rstrip("/"))
    if inside == part.rstrip("/") or not inside.startswith("/") or not inside.strip("/"):
        raise InvalidArgumentError(f"parts must name folders below {folder!r}, got {part!r}. Leave out other folders")
    return inside.strip("/")
