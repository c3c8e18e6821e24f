"""Whether the index that a dataset was opened with is still the one that lies there, here or far away.

A dataset that is written again while it is read has old rows before some moment and new ones behind it. Hashes in the
index find that out, where shards are verified. This finds it out for shards that are read where they lie, and for a
cache's folder that another job fills anew: who writes a dataset removes or replaces its index.

What is fetched without a hash is of the dataset whose index lies in the cache as long as the place's index is as old as
it was when that was fetched. Its content says nothing: without hashes, data of the same sizes have the same index.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from penstock.data.formats.index import INDEX
from penstock.data.remote.folders import RemoteFolder
from penstock.proto.errors import DatasetError, PenstockError
from penstock.runtime.files.atomic_files import write_whole
from penstock.runtime.files.plain_files import read_plain

__all__ = ["IndexWatch", "RemoteIndex"]

ASK_S = 10.0
"""For the place to say how old its index is."""


@dataclass
class IndexWatch:
    """Of one index file."""

    path: Path
    digest: bytes
    """Of what it held."""
    hashed: bool
    """It has a hash of each shard: who writes the same one again has the same data."""
    in_place: bool
    """The shards lie beside it; else it is a copy in a cache, which may be removed."""
    seen: tuple[int, int, int] | None
    """Its size, time in ns and inode, when it was found to be the same."""
    older_ns: int | None = None
    """Without hashes, once it was written again as it was: shards that are younger than this were written again too."""

    @staticmethod
    def of(path: Path, content: bytes, *, hashed: bool, in_place: bool) -> IndexWatch:
        return IndexWatch(path, _digest(content), hashed, in_place, _seen(path))

    def check(self, shard: Sequence[Path]) -> None:
        """Raises DatasetError if the dataset was written again; `shard`: the files that were just opened. One look at
        the index; its content is read if it was touched."""
        seen = _seen(self.path)
        if seen is None:
            if self.in_place:
                self._refuse(self.path, "removed")
            return
        if seen != self.seen:
            if self.seen is None or not self._is_same():
                self._refuse(self.path, "written again")
            if not self.hashed and self.older_ns is None:
                self.older_ns = self.seen[1]
            self.seen = seen
        if self.older_ns is not None:
            for path in shard:
                found = _seen(path)
                if found is None or found[1] > self.older_ns:
                    self._refuse(path, "written again")

    def _refuse(self, path: Path, what: str) -> NoReturn:
        raise DatasetError(
            f"{path} was {what} since the dataset was opened: its rows would be of two datasets. Write new data to a "
            "new folder, or open the dataset anew"
        )

    def _is_same(self) -> bool:
        try:
            return _digest(read_plain(self.path)) == self.digest
        except OSError:
            return False


@dataclass(frozen=True)
class RemoteIndex:
    """The index of a place, from which one was fetched into a cache."""

    place: RemoteFolder
    record: Path
    """Where it is kept for all processes of the host how old the place's was then."""

    def fetched(self) -> None:
        """To be called before it is fetched: if it is replaced meanwhile, that is found out later."""
        write_whole(self.record, (self._version() or "").encode())

    def check(self) -> None:
        """Raises DatasetError if the place's index was replaced or removed since then. Says nothing where the place
        does not tell how old it is, or does not answer now: it is asked again for the next shard."""
        try:
            before = self.record.read_text()
        except FileNotFoundError:
            return
        now = self._version() if before else ""
        if now is not None and now != before:
            raise DatasetError(
                f"{self.place.url_of(INDEX)} was {'written again' if now else 'removed'} since it was fetched into "
                f"{self.record.parent.parent}, and it has no hashes by which shards of the two could be told apart. "
                "Write new data to a new address, with hashes; or give another cache folder to read what is there now"
            )

    def _version(self) -> str | None:
        """ "" if it is not there; None if that is not known."""
        try:
            return self.place.version(INDEX, deadline_s=ASK_S)
        except FileNotFoundError:
            return ""
        except PenstockError:
            raise
        except Exception:
            return None


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


def _seen(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns, found.st_ino
