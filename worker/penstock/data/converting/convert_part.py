"""Conversion of one part of a dataset (see conversion_plan.py), and the program of a process that shares the parts of a
conversion with others (see job_processes.py).

A part is a folder with its own index. It gets its name when it is complete, after its rows were read back and compared.
At a remote, where nothing can be renamed, its index is written last. So a part that has its index is finished.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

from penstock.data.cache.shard_cache import ShardCache
from penstock.data.converting.conversion_plan import ConversionPlan, part_folder
from penstock.data.converting.row_digest import RowDigest
from penstock.data.converting.target_columns import arrow_value, given_json, stored_row
from penstock.data.formats.index import INDEX, read_index, write_index
from penstock.data.formats.parquet.parquet_shards import parquet_shards
from penstock.data.formats.readers import open_shard
from penstock.data.formats.shards import ReadOptions, Shard, rows_of
from penstock.data.job_processes import serve_jobs
from penstock.data.remote.folders import RemoteFolder, joined
from penstock.data.writing.writers import MDSWriter
from penstock.proto.errors import DatasetError
from penstock.runtime.files.atomic_files import sync_folder, write_whole

__all__ = ["UNFINISHED", "converting", "read_rows"]

UNFINISHED = ".converting-"
"""Beginning of the names of folders in which parts are written."""
PARQUET_FILE = "shard.00000.parquet"
ROWS = 256
"""Number of rows that are read at a time."""
FETCHES = 16
"""Number of shards that are fetched at the same time, for a part that consists of several small shards of a remote
source."""

Row = Mapping[str, Any]


@contextlib.contextmanager
def converting(plan: bytes) -> Iterator[Callable[[int], dict[str, Any]]]:
    """Yield a function that converts the part with a given number, and returns this number and the part's index.
    `plan`: encoded ConversionPlan."""
    converter = PartConverter(ConversionPlan.decoded(plan))
    try:
        yield lambda number: {"part": number, "index": converter.convert(number).decode()}
    finally:
        converter.close()


class PartConverter:
    """Converter of parts of a plan, in this process."""

    def __init__(self, plan: ConversionPlan) -> None:
        self.plan = plan
        self._dest = RemoteFolder(plan.dest, plan.dest_options)
        remote = RemoteFolder(plan.source, plan.source_options)
        self._is_remote = remote.local is None
        self._source = ShardCache(remote, plan.cache, limit=plan.cache_limit, timeout_s=plan.timeout_s)
        self._shards = read_index(self._source.index().read_all(), plan.source)
        self._options = ReadOptions(
            images="file", encoded=plan.encoded, columns=[column.name for column in plan.columns]
        )
        self._where = ""
        """Samples of the source that are converted now, for errors."""

    def convert(self, number: int) -> bytes:
        """Convert the part with this number, and return its index. Raises DatasetError, which names the samples and the
        cause, and any error of the source's files."""
        name, local = part_folder(number), self._dest.local
        try:
            if local is not None:
                local.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(prefix=UNFINISHED, dir=local) as scratch:
                folder = Path(scratch, name)
                folder.mkdir()
                index = self._written(number, folder)
                if local is None:
                    self._dest.write(f"{name}/{INDEX}", index, deadline_s=self.plan.timeout_s)
                else:
                    write_whole(folder / INDEX, index)
                    folder.rename(local / name)
                    sync_folder(local)
                return index
        except OSError as error:
            where = local / name if local else gettempdir()
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise DatasetError(
                f"{where} could not be written: {reason}. Make space, or give a folder that you can write to and that "
                "no other process converts into; then convert again. Finished parts are kept"
            ) from error
        except DatasetError as error:
            raise type(error)(f"{self._where}: {error.message}") from error

    def _written(self, number: int, folder: Path) -> bytes:
        """Write a part's files into a local folder, upload them if the result is remote, compare them with the source,
        and return the part's index."""
        digest, address = RowDigest(), str(folder)
        write = _write_mds if self.plan.to == "mds" else _write_parquet
        with contextlib.closing(self._rows(number, digest)) as rows:
            shards = write(folder, self.plan, rows)
        if self._dest.local is None:
            address = joined(self.plan.dest, folder.name)
            for path in folder.iterdir():
                self._dest.upload(f"{folder.name}/{path.name}", path, deadline_s=self.plan.timeout_s)
        if self.plan.verify:
            self._verify(address, shards, digest)
        return write_index(shards, {"convert": {"key": self.plan.key, "digest": digest.hexdigest()}})

    def _rows(self, number: int, digest: RowDigest) -> Generator[tuple[Row, int], None, None]:
        """Yield each row of a part as it is stored, and its size in bytes. Add the rows to `digest`."""
        pieces = [(self._shards[shard], range(begin, end)) for shard, begin, end in self.plan.parts[number]]
        self._where = whole = f"{pieces[0][0].name} to {pieces[-1][0].name}"
        self._fetch([shard for shard, _ in pieces])
        for shard, samples in pieces:
            self._where = f"{shard.name}, samples {samples.start} to {samples.stop - 1}"
            for sample, row in enumerate(read_rows(self._source, shard, samples, self._options), samples.start):
                stored = stored_row(row, self.plan.columns, sample)
                yield stored, digest.add(stored)
        if len(pieces) > 1:
            self._where = whole

    def _fetch(self, shards: Sequence[Shard]) -> None:
        """Fetch the shards of a remote source, several at a time: they are small, so most of the time is spent on
        waiting for the remote's answer."""
        if self._is_remote and len(shards) > 1:
            with ThreadPoolExecutor(FETCHES) as threads:
                list(threads.map(lambda shard: self._source.hold(shard).release(), shards))

    def _verify(self, address: str, shards: Sequence[Shard], written: RowDigest) -> None:
        """Read a part back after it was written, and raise DatasetError if its rows differ from those written."""
        digest = RowDigest()
        with (
            TemporaryDirectory(prefix="penstock-verify-") as scratch,
            contextlib.closing(ShardCache(RemoteFolder(address, self.plan.dest_options), scratch)) as cache,
        ):
            for shard in shards:
                for row in read_rows(cache, shard, range(shard.samples), self._options):
                    digest.add(row)
        if (digest.rows, digest.hexdigest()) != (written.rows, written.hexdigest()):
            raise DatasetError(
                f"{self._dest.url} must have {written.rows} rows of it with digest {written.hexdigest()}, but reading "
                f"them back gives {digest.rows} with {digest.hexdigest()}. If a column's type does not hold all of "
                f"its values, give its type, for example with {given_json('NAME')}; otherwise check the disk, and "
                "convert again"
            )

    def close(self) -> None:
        self._source.close()
        self._dest.close()


def read_rows(cache: ShardCache, shard: Shard, samples: range, options: ReadOptions) -> Iterator[dict[str, Any]]:
    """Yield some samples of a shard in their order."""
    with cache.hold(shard) as held, contextlib.closing(open_shard(shard, held.paths, options)) as reader:
        for begin in range(0, len(samples), ROWS):
            yield from rows_of(reader, samples[begin : begin + ROWS])


def _write_mds(folder: Path, plan: ConversionPlan, rows: Iterable[tuple[Row, int]]) -> list[Shard]:
    """Write rows, each with its size, as any number of MDS shards, and return these."""
    writer = MDSWriter(folder, {column.name: column.type for column in plan.columns}, **plan.settings)
    writer.name = folder.name
    writer.remedy_of = lambda name: f"Give the column another type, for example with {given_json(name)}"
    for row, _ in rows:
        writer.write(row)
    return writer.flush()


def _write_parquet(folder: Path, plan: ConversionPlan, rows: Iterable[tuple[Row, int]]) -> list[Shard]:
    """Write rows, each with its size, as one Parquet file, and return its shard."""
    arrow, parquet = map(importlib.import_module, ("pyarrow", "pyarrow.parquet"))
    schema = arrow.ipc.read_schema(arrow.py_buffer(bytes.fromhex(plan.schema)))
    path, compression = folder / PARQUET_FILE, plan.settings["compression"]
    with parquet.ParquetWriter(path, schema, compression=compression, write_page_checksum=True) as file:
        for group in _groups(rows, plan.settings["group_bytes"]):
            file.write_table(_table(arrow, schema, group), row_group_size=len(group))
    with path.open("rb") as written:
        os.fsync(written.fileno())
    return parquet_shards([(PARQUET_FILE, path)])


def _groups(rows: Iterable[tuple[Row, int]], group_bytes: int) -> Iterator[list[Row]]:
    """Yield the rows of each row group."""
    group, total = [], 0
    for row, size in rows:
        group.append(row)
        total += size
        if total >= group_bytes:
            yield group
            group, total = [], 0
    if group:
        yield group


def _table(arrow: Any, schema: Any, rows: Sequence[Row]) -> Any:
    arrays = []
    for field in schema:
        try:
            arrays.append(arrow.array([arrow_value(row[field.name]) for row in rows], field.type))
        except (ValueError, TypeError, OverflowError, arrow.ArrowException) as error:
            raise DatasetError(
                f"column {field.name!r} must have values of type {field.type}: {error}. Give its type with "
                f"{given_json(field.name)}"
            ) from None
    return arrow.Table.from_arrays(arrays, schema=schema)


if __name__ == "__main__":
    sys.exit(serve_jobs(converting))
