"""Conversion of one part (conversion_plan.Part): read its samples, write them, read the result back, and compare."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from penstock.data.cache.shard_cache import ShardCache
from penstock.data.cache.shard_versions import origin_of
from penstock.data.converting.conversion_plan import ConversionPlan
from penstock.data.converting.part_files import MDSPart, ParquetPart, PartFiles
from penstock.data.converting.row_digest import RowDigest
from penstock.data.converting.target_columns import stored_rows
from penstock.data.formats.index import read_index
from penstock.data.formats.readers import open_shard
from penstock.data.formats.shards import ReadOptions, Shard, rows_of
from penstock.data.remote.folders import RemoteFolder, joined
from penstock.proto.errors import DatasetError

__all__ = ["PartConverter", "shard_digests", "source_of"]

ROWS = 256
"""Number of rows that are read and written at a time."""
FETCHES = 16
"""Number of shards that are fetched at the same time, for a part that consists of several small shards of a remote
source."""


def source_of(source: str, options: Any, cache: str, *, limit: int | None, timeout_s: float) -> ShardCache:
    """Return the cache through which the source of a conversion is read. `cache`: folder for the files of a remote
    source."""
    return ShardCache(RemoteFolder(source, options), cache, limit=limit, timeout_s=timeout_s)


@dataclass
class PartConverter:
    """Converter of parts of a plan (each some consecutive samples of the source), in this process."""

    plan: ConversionPlan

    def __post_init__(self) -> None:
        plan = self.plan
        self._source = source_of(
            plan.source, plan.source_options, plan.cache, limit=plan.cache_limit, timeout_s=plan.timeout_s
        )
        self._shards = read_index(self._source.index().read_all(), plan.source)
        self._is_remote = RemoteFolder(plan.source, plan.source_options).local is None
        self._dest = RemoteFolder(plan.dest, plan.dest_options)
        self._options = ReadOptions(
            images="file", encoded=plan.encoded, columns=[column.name for column in plan.columns]
        )

    def convert(self, number: int) -> None:
        """Convert the part with this number. Raises DatasetError, which names the part and the cause, and any error of
        the source's files."""
        folder, files, digest = self.plan.folder_of(number), self._files(self.plan.folder_of(number)), RowDigest()
        pieces = list(self.plan.parts[number].pieces(self._shards))
        whole = where = _named(*pieces[0]) if len(pieces) == 1 else f"{pieces[0][0].name} to {pieces[-1][0].name}"
        try:
            self._fetch([shard for shard, _, _ in pieces])
            for shard, begin, end in pieces:
                where = _named(shard, begin, end)
                self._write(files, digest, shard, range(begin, end))
            where = whole
            shards = files.finish()
            if self.plan.verify:
                self._verify(folder, shards, digest)
            files.publish(
                {"convert": {"key": self.plan.key, "part": number, "rows": digest.rows, "digest": digest.hexdigest()}}
            )
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise DatasetError(
                f"{self._dest.url_of(folder)} could not be written: {reason}. Make space, or give a folder that you "
                "can write to, and convert again; in the same folder, finished parts are kept"
            ) from error
        except DatasetError as error:
            raise type(error)(f"{where}: {error.message}") from error
        finally:
            files.abandon()

    def _fetch(self, shards: Sequence[Shard]) -> None:
        """Fetch the shards of a remote source, several at a time: they are small, so most of the time is spent on
        waiting for the remote's answer."""
        if self._is_remote and len(shards) > 1:
            with ThreadPoolExecutor(FETCHES) as threads:
                list(threads.map(self._hold, shards))

    def _hold(self, shard: Shard) -> None:
        with self._source.hold(shard):
            pass

    def _write(self, files: PartFiles, digest: RowDigest, shard: Shard, samples: range) -> None:
        """Convert samples of one shard, and add them to `files` and `digest`."""
        with self._reader(shard) as reader:
            for begin in range(samples.start, samples.stop, ROWS):
                rows = rows_of(reader, range(begin, min(begin + ROWS, samples.stop)))
                stored = stored_rows(rows, self.plan.columns, self.plan.names, first=begin)
                files.write(stored, [digest.add(row, self.plan.names) for row in stored])

    def _files(self, folder: str) -> PartFiles:
        plan = self.plan
        if plan.to == "mds":
            settings = {**plan.settings, "timeout_s": plan.timeout_s}
            if self._dest.local is None:
                settings["storage_options"] = plan.dest_options
                return MDSPart(joined(plan.dest, folder), plan.columns, settings, plan.names)
            return MDSPart(str(self._dest.local / folder), plan.columns, settings, plan.names)
        arrow = importlib.import_module("pyarrow")
        schema = arrow.ipc.read_schema(arrow.py_buffer(bytes.fromhex(plan.schema)))
        return ParquetPart(self._dest, folder, schema, plan.names, timeout_s=plan.timeout_s, **plan.settings)

    @contextlib.contextmanager
    def _reader(self, shard: Shard) -> Iterator[Any]:
        with self._source.hold(shard) as held:
            reader = open_shard(shard, held.paths, self._options)
            try:
                yield reader
            finally:
                reader.close()

    def _verify(self, folder: str, shards: list[Shard], written: RowDigest) -> None:
        """Read a part of the conversion back after it was written, and raise DatasetError if its rows differ from those
        written."""
        digest = RowDigest()
        address = str(self._dest.local / folder) if self._dest.local else joined(self.plan.dest, folder)
        with TemporaryDirectory(prefix="penstock-verify-") as scratch:
            cache = ShardCache(RemoteFolder(address, self.plan.dest_options), Path(scratch))
            try:
                for shard in shards:
                    with cache.hold(shard) as held:
                        reader = open_shard(shard, held.paths, self._options)
                        for begin in range(0, len(reader), ROWS):
                            for row in rows_of(reader, range(begin, min(begin + ROWS, len(reader)))):
                                digest.add(row, self.plan.names)
                        reader.close()
            finally:
                cache.close()
        if (digest.rows, digest.hexdigest()) != (written.rows, written.hexdigest()):
            raise DatasetError(
                f"{self._dest.url_of(folder)} must have {written.rows} rows with digest {written.hexdigest()}, but "
                f"reading it back gives {digest.rows} with {digest.hexdigest()}. If a column's type does not hold all "
                f"of its values, give its type, for example with {self.plan.names.column_type('NAME', 'json')}; "
                "otherwise check the disk, and convert again"
            )

    def close(self) -> None:
        self._source.close()
        self._dest.close()


def _named(shard: Shard, begin: int, end: int) -> str:
    return f"{shard.name}, samples {begin} to {end - 1}"


def shard_digests(shards: list[Shard], source: RemoteFolder) -> list[str]:
    """Return one digest for each shard, of its files as the index lists them, and for a local source of their sizes and
    times. So for a remote source a digest changes only if a file's size or hash in the index does."""
    return [origin_of(shard, source.local) for shard in shards]
