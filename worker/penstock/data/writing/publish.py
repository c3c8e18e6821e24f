"""Publishing of a dataset's next version: the shards of the newest version and those that were appended.

The version's own index is written first, then index.json, which makes it visible. Jobs that read an older version keep
its index and shards. Publishing the same shards again changes nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from penstock.data.cache.dataset_versions import version_of
from penstock.data.cache.file_locks import take_within
from penstock.data.formats.index import (
    INDEX,
    OWN_INDEX,
    PRECEDED_NOTE,
    SPLITS_NOTE,
    VERSION_NOTE,
    entry_text,
    version_index,
)
from penstock.data.formats.shards import Shard
from penstock.data.indexes.joined_index import GivenIndex, joined_index, shards_in
from penstock.data.remote.folders import RemoteFolder
from penstock.proto.errors import DatasetError

LOCK = ".penstock-publishing"
"""File in a local dataset's folder that is locked while a version is published."""
_COLUMNS = ("column_names", "column_encodings", "columns")


def publish(remote: RemoteFolder, added: Sequence[Shard], *, timeout_s: float) -> tuple[int, Sequence[Shard]]:
    """Publish a version with the complete files `added`; return the number and all shards of the version that is then
    the newest. Shards that it has already are left out; if none is left, only a folder without versions gets one,
    version 1.

    Writers on one machine, or on one file system with locks, may publish at the same time, and wait `timeout_s` for
    each other. On an object store, two simultaneous writers may lose the shards of one, so let only one process publish
    there.

    Raises DatasetError if the columns are not those of the dataset, ShardUnavailableError.
    """
    with _sole_publisher(remote, timeout_s):
        made, given = list[bytes](), newest_index(remote, timeout_s=timeout_s)
        notes = {} if given is None else given.notes
        kept = {SPLITS_NOTE: notes[SPLITS_NOTE]} if SPLITS_NOTE in notes else {}
        before, new = version_of(notes), {shard.name: shard for shard in added}
        first: Shard | None = None
        for text, shard in given.entries() if given else ():
            first = first or shard
            new.pop(shard.name, None)
            made.append(text)
        check_columns(remote.url, first, new.values())

        def write(name: str, notes: dict[str, Any]) -> None:
            remote.write(name, joined_index(made, notes), deadline_s=timeout_s)

        number = before or 0
        if given is not None and before is None:
            number = 1
            write(version_index(1), {**notes, VERSION_NOTE: 1, PRECEDED_NOTE: given.digest})
        if new or given is None:
            made += map(entry_text, new.values())
            names, number = set(remote.names(deadline_s=timeout_s)), number + 1
            while version_index(number) in names:  # a process was killed before it published this one
                number += 1
            write(version_index(number), {VERSION_NOTE: number, **kept})
        if before is None or new:
            write(INDEX, {VERSION_NOTE: number, **kept})
            if remote.exists(OWN_INDEX, deadline_s=timeout_s):  # of files that were indexed, before they got versions
                remote.remove(OWN_INDEX, deadline_s=timeout_s)
        return number, shards_in(made)


def newest_index(remote: RemoteFolder, *, timeout_s: float) -> GivenIndex | None:
    """Return the index of a dataset's newest version; None for a folder without an index."""
    names = remote.names(deadline_s=timeout_s)
    return next((GivenIndex(remote, name, timeout_s) for name in (OWN_INDEX, INDEX) if name in names), None)


def check_no_versions(names: Sequence[str], url: str) -> None:
    """Refuse to replace a dataset that has versions, because jobs may be reading an older one."""
    if any(map(_is_version_index, names)):
        raise DatasetError(f"{url} must not have versions when it is replaced. Use append=True, or give another folder")


def _is_version_index(name: str) -> bool:
    number = name.removeprefix("index-").removesuffix(".json")
    return number.isdecimal() and name == version_index(int(number))


def check_columns(url: str, old: Shard | None, new: Iterable[Shard]) -> None:
    """Raise DatasetError unless new shards have the columns of the old one, because a batch has rows of both."""
    for shard in new if old else ():
        for name in _COLUMNS:
            before, now = old and old.settings.get(name), shard.settings.get(name)
            if before != now:
                raise DatasetError(
                    f"{url}: {name} of the appended shards must be {before}, as in the dataset, got {now}"
                )


@contextlib.contextmanager
def _sole_publisher(remote: RemoteFolder, timeout_s: float) -> Iterator[None]:
    if remote.local is None:
        yield
        return
    remote.local.mkdir(parents=True, exist_ok=True)
    lock = take_within(str(remote.local), LOCK, timeout_s)
    if lock is None:
        raise DatasetError(f"{remote.url}: another process has held {LOCK} for {timeout_s:g} s. Wait for it, or end it")
    try:
        yield
    finally:
        lock.remove()
        lock.release()
