"""Indexing of the files in a remote folder, for which a local one stands: with an empty file for each remote one, so
that the code that finds files and their format works, and the content while a file is indexed. Each remote file is read
once, as a whole; of Megatron-core's token files only the .idx file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

from penstock.data.formats.arrow.saved_datasets import DICT, INFO, STATE
from penstock.data.formats.records.offset_file import ENDING
from penstock.data.formats.shards import Shard
from penstock.data.remote.folders import RemoteFolder
from penstock.data.writing.dataset_files import CARD, is_hidden
from penstock.data.writing.indexable_files import INDEXABLE
from penstock.data.writing.indexing import Key, continued, index_one
from penstock.proto.errors import PenstockError

FETCHES = 4
"""Files that are fetched and indexed at the same time. Each takes its size on the disk meanwhile."""
REQUESTS = 16
"""Requests for files' sizes, or uploads of files of offsets, at the same time."""


@dataclass(frozen=True)
class StandIn:
    remote: RemoteFolder
    root: Path
    timeout_s: float

    def fill(self) -> None:
        """Make the empty files; fetch those that describe a saved Hugging Face dataset (ShardUnavailableError)."""
        names = [name for name in self.remote.find(deadline_s=self.timeout_s) if not is_hidden(name)]
        folders = {parent.as_posix() for name in names for parent in PurePosixPath(name).parents}
        for name in names:
            if name in folders:  # object stores have empty objects in place of folders
                continue
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            if path.name in (DICT, STATE, INFO) or name == CARD:
                path.write_bytes(self.remote.read(name, deadline_s=self.timeout_s))

    def index_files(self, files: Sequence[tuple[str, Path]], format: str, out: Path) -> list[Shard]:
        """Index as `indexing.index_files`. Raises ShardUnavailableError, DatasetError, and as `index_file`."""
        names = [name for name, _ in files]
        with ThreadPoolExecutor(REQUESTS) as threads:
            keys = dict(zip(names, threads.map(self._key, names), strict=True))
        return continued(self.remote.url, keys, format, out, partial(self._shards, keys, format, out))

    def _key(self, name: str) -> Key:
        size, version = self.remote.size(name, deadline_s=self.timeout_s), None
        try:
            version = self.remote.version(name, deadline_s=self.timeout_s)
        except PenstockError:
            raise
        except Exception:  # a server that tells nothing: the file is read again each time
            version = None
        return name, size, version or os.urandom(8).hex()

    def _shards(
        self, keys: dict[str, Key], format: str, out: Path, names: Sequence[str]
    ) -> Generator[tuple[str, Shard], None, None]:
        with ThreadPoolExecutor(FETCHES) as threads:
            waiting = [threads.submit(self._indexed, name, keys[name], format, out) for name in names]
            try:
                for name, each in zip(names, waiting, strict=True):
                    yield name, each.result()
            finally:
                threads.shutdown(wait=True, cancel_futures=True)

    def _indexed(self, name: str, key: Key, format: str, out: Path) -> Shard:
        path = self.root / name
        with contextlib.ExitStack() as stack:
            stack.callback(os.truncate, path, 0)
            if format == "megatron":
                os.truncate(path, key[1])
                other = Path(name).with_suffix(".idx").as_posix()
                self.remote.copy(other, self.root / other, deadline_s=self.timeout_s)
            else:
                self.remote.download(name, path, expected_size=key[1], deadline_s=self.timeout_s)
            return index_one(INDEXABLE[format].index_file, path, name, out)

    def upload(self, shards: Sequence[Shard], out: Path) -> None:
        """Upload the shards' files of offsets from `out` beside the data files. Raises ShardUnavailableError."""
        names = [file.raw.name for shard in shards for file in shard.files if file.raw.name.endswith(ENDING)]
        with ThreadPoolExecutor(REQUESTS) as threads:
            list(threads.map(lambda name: self.remote.upload(name, out / name, deadline_s=self.timeout_s), names))
