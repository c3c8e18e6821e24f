"""Versions of a dataset that grows. Each version has an index file of its own:

    index-000001.json        index of version 1
    index-000002.json        index of version 2: the shards of version 1, and those that were appended
    index.json               copy of the index of the newest version

The versions of a table are its snapshots, under the table's own numbers (writing/index_table.py).

The number is in each index, among its *notes* (entries for Penstock alone). The index of a version and its shards never
change, so publishing the next version (writing/publish.py) does not disturb a job.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from penstock.data.cache.shard_cache import ShardCache
from penstock.data.formats.descriptors import Descriptor
from penstock.data.formats.index import INDEX, VERSION_NOTE, file_notes, version_index
from penstock.proto.errors import DatasetError, InvalidArgumentError, ShardUnavailableError

Version = int | Literal["newest"] | None
"""Version as a user gives it: a number from 1, or from 0 of a table; "newest" or None for the newest one."""


def check_version(name: str, version: Version) -> None:
    if version not in (None, "newest") and (type(version) is not int or version < 0):
        raise InvalidArgumentError(f'{name} must be a number of at least 0, "newest" or None, got {version!r}')


def version_of(notes: Mapping[str, Any]) -> int | None:
    """Return the version number in an index's notes; None if the dataset has no versions."""
    number = notes.get(VERSION_NOTE)
    return number if type(number) is int and number >= 0 else None


def open_version(
    make: Callable[[str], ShardCache], version: Version, name: str
) -> tuple[ShardCache, Descriptor, int | None]:
    """Return the cache that `make` makes for the version's index file, the index, and the number (or None). Raises
    DatasetError for a missing version, ShardUnavailableError for an index that cannot be fetched."""
    if isinstance(version, int):
        return _numbered(make, version, name)
    newest = make(INDEX)
    try:
        index = newest.index()
        number = version_of(file_notes(index))
        if number is None:
            return newest, index, None
        noted = version_of(newest.newest_notes())
        number = number if noted is None else noted
    except BaseException:
        newest.close()
        raise
    newest.close()
    return _numbered(make, number, name)


def _numbered(make: Callable[[str], ShardCache], version: int, name: str) -> tuple[ShardCache, Descriptor, int]:
    cache = make(version_index(version))
    try:
        index = cache.index()
        found = version_of(file_notes(index))
        if found != version:
            got = "a damaged file, which names no version" if found is None else f"that of version {found}"
            raise DatasetError(
                f"{name}: {version_index(version)} must be the index of version {version}, got {got}. Restore the "
                f"file, or give another version. If {version} is the newest version, {INDEX} is a copy of the file"
            )
    except BaseException as error:
        cache.close()
        if isinstance(error, ShardUnavailableError) and isinstance(error.__cause__, FileNotFoundError):
            raise DatasetError(
                f"{name} must have version {version}, but its index {version_index(version)} is missing. "
                "Restore it; index_table writes that of a table's snapshot"
            ) from error
        raise
    return cache, index, version
