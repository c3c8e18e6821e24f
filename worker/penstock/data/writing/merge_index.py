"""One index of all that the indexes of several folders list, here or in another place."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from penstock.data.formats.index import INDEX, join_indexes, read_index, write_index
from penstock.data.formats.shards import Shard
from penstock.data.remote.folders import RemoteFolder
from penstock.data.writing.uploads import local_folder, writable_place
from penstock.proto.errors import DatasetError, InvalidArgumentError

__all__ = ["merge_index"]

Folder = str | os.PathLike[str]


def merge_index(
    folder: Folder | tuple[Folder, str],
    parts: Sequence[Folder] | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
    timeout_s: float = 600.0,
) -> list[Shard]:
    """Write an index of all that the indexes below `folder` list, in the order of their paths; returns what it lists.

    An index in `folder` itself is replaced; one below another is left out, for that one may list its shards already.

    Args:
        folder: of this machine, or a URL; (folder of this machine, URL) reads from the URL and writes to both.
        parts: folders below it with an index each, by their paths or addresses, in the order that they are to have;
            None: all there are. Give them for an object store with millions of shards, which are listed otherwise.
        storage_options: for fsspec.
        timeout_s: seconds for each file.

    Raises DatasetError if there is no index, or one cannot be read; ShardUnavailableError.
    """
    local = None
    if isinstance(folder, tuple):
        local, folder = RemoteFolder(local_folder("folder", folder[0])), folder[1]
    text = os.fspath(folder)
    place = writable_place(text if "://" in text else str(local_folder("folder", folder)), storage_options)
    try:
        below = _all_below(place, timeout_s) if parts is None else [_below(text, os.fspath(part)) for part in parts]
        if not below:
            raise DatasetError(f"{place.url}: no {INDEX} in any folder below it")
        shards = join_indexes(
            (name, read_index(place.read(f"{name}/{INDEX}", deadline_s=timeout_s), place.url_of(f"{name}/{INDEX}")))
            for name in below
        )
        for each in (place, local):
            if each is not None:
                each.write(INDEX, write_index(shards), deadline_s=timeout_s)
    finally:
        place.close()
    return shards


def _all_below(place: RemoteFolder, timeout_s: float) -> list[str]:
    """The folders with an index, without those below another one."""
    paths = [
        PurePosixPath(name).parent for name in place.find(deadline_s=timeout_s) if f"/{name}".endswith(f"/{INDEX}")
    ]
    found: list[PurePosixPath] = []
    for path in sorted(paths, key=lambda path: path.parts):
        if path.parts and not any(path.is_relative_to(other) for other in found):
            found.append(path)
    return [str(path) for path in found]


def _below(folder: str, part: str) -> str:
    """The path of a part relative to the folder."""
    inside = part.removesuffix(INDEX).rstrip("/").removeprefix(folder.rstrip("/"))
    if inside == part.rstrip("/") or not inside.startswith("/") or not inside.strip("/"):
        raise InvalidArgumentError(f"parts: {part!r} must be a folder below {folder!r}")
    return inside.strip("/")
