"""Conversion of one part of a dataset, and the program of the processes that share the parts (job_processes.py).

A part is a folder with its own index. It gets its name when complete, and read back and compared; at a remote, where
nothing can be renamed, its index is written last. So a part with an index is finished.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

import msgspec

from penstock.data.cache.shard_cache import ShardCache
from penstock.data.converting.row_digest import RowDigest
from penstock.data.converting.target_columns import TargetColumn, arrow_value, given_json, stored_row
from penstock.data.formats.index import INDEX, read_index, write_index
from penstock.data.formats.parquet.shards import parquet_shards
from penstock.data.formats.readers import open_shard
from penstock.data.formats.shards import ReadOptions, Shard, rows_of
from penstock.data.job_processes import serve_jobs
from penstock.data.remote.folders import RemoteFolder, joined
from penstock.data.writing.writers import MDSWriter
from penstock.proto.errors import DatasetError
from penstock.runtime.files.atomic_files import sync_folder, write_whole

UNFINISHED = ".converting-"
"""Beginning of the names of folders in which parts are written."""
PARQUET_FILE = "shard.00000.parquet"
ROWS = 256
FETCHES = 16
"""Shards that are fetched at the same time, because with small ones most time goes by waiting for the remote."""

Row = Mapping[str, Any]
PART_BYTES = 64 << 20
"""Bytes above which a shard is divided; a part ends once it has half of this. So most shards are one part, and small
ones are joined: each costs about ten file operations and three waits for the disk. A killed run loses those in work."""
SHARD_BYTES = 16 << 10
"""Bytes that count for a shard besides its size, because opening one takes at least about 0.5 ms."""

Piece = tuple[int, int, int]
"""(number of the shard, its first sample, the sample after the last one)."""


@dataclass(frozen=True)
class ConversionPlan:
    source: str
    dest: str
    to: str
    """Format of the result: "mds" or "parquet"."""
    columns: Sequence[TargetColumn]
    schema: str
    """Serialized Arrow schema of the columns, in hexadecimal; "" for MDS."""
    encoded: bool
    """Values of MDS columns are copied as they are stored, without decoding."""
    settings: Mapping[str, Any]
    """Keyword arguments of the writer of the result's files."""
    parts: Sequence[Sequence[Piece]]
    """Pieces of shards of which each part consists."""
    key: str
    """Digest of all that decides the result's content. Parts that were finished under the same key are kept."""
    timeout_s: float
    cache: str
    """Folder on this machine that caches the files of a remote source."""
    cache_limit: int


def part_folder(number: int) -> str:
    return f"part-{number:06}"


def parts_of(shards: Sequence[Shard]) -> list[list[Piece]]:
    """Join small shards; divide a large one between its blocks, or between any samples if it has none."""
    parts: list[list[Piece]] = []
    size = PART_BYTES
    for number, shard in enumerate(shards):
        end = 0
        for samples in filter(None, shard.blocks or _even_pieces(shard)):
            begin, end = end, end + samples
            if size >= PART_BYTES // 2:
                parts.append([])
                size = 0
            if parts[-1] and parts[-1][-1][0] == number:
                _, begin, _ = parts[-1].pop()
            parts[-1].append((number, begin, end))
            size += SHARD_BYTES + shard.size * samples // shard.samples
    return parts


def _even_pieces(shard: Shard) -> list[int]:
    pieces = max(1, -(-shard.size // PART_BYTES))
    bounds = [shard.samples * piece // pieces for piece in range(pieces + 1)]
    return [end - begin for begin, end in pairwise(bounds)]


@contextlib.contextmanager
def converting(plan: bytes) -> Iterator[Callable[[int], dict[str, Any]]]:
    """Yield a function that converts the part with a given number, and returns this number and the part's index."""
    converter = PartConverter(msgspec.json.decode(plan, type=ConversionPlan))
    try:
        yield lambda number: {"part": number, "index": converter.convert(number).decode()}
    finally:
        converter.close()


class PartConverter:
    def __init__(self, plan: ConversionPlan) -> None:
        self.plan = plan
        self._dest = RemoteFolder(plan.dest)
        self._source = ShardCache(
            RemoteFolder(plan.source),
            plan.cache,
            limit=plan.cache_limit,
            timeout_s=plan.timeout_s,
            threads=FETCHES,
        )
        self._shards = read_index(self._source.index().read_all(), plan.source)
        self._options = ReadOptions(
            images="file", encoded=plan.encoded, columns=[column.name for column in plan.columns]
        )
        self._where = ""
        """Samples of the source that are converted now, for errors."""

    def convert(self, number: int) -> bytes:
        """Convert a part and return its index. Raises DatasetError, with samples and cause, or errors of the source."""
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
                f"{where} could not be written: {reason}. Make space, or give another folder. Finished parts are kept"
            ) from error
        except DatasetError as error:
            raise type(error)(f"{self._where}: {error.message}") from error

    def _written(self, number: int, folder: Path) -> bytes:
        digest, address = RowDigest(), str(folder)
        write = _write_mds if self.plan.to == "mds" else _write_parquet
        with contextlib.closing(self._rows(number, digest)) as rows:
            shards = write(folder, self.plan, rows)
        if self._dest.local is None:
            address = joined(self.plan.dest, folder.name)
            for path in folder.iterdir():
                self._dest.upload(f"{folder.name}/{path.name}", path, deadline_s=self.plan.timeout_s)
        self._verify(address, shards, digest)
        return write_index(shards, {"convert": {"key": self.plan.key, "digest": digest.hexdigest()}})

    def _rows(self, number: int, digest: RowDigest) -> Generator[tuple[Row, int], None, None]:
        pieces = [(self._shards[shard], range(begin, end)) for shard, begin, end in self.plan.parts[number]]
        self._where = whole = f"{pieces[0][0].name} to {pieces[-1][0].name}"
        self._source.fetch_ahead([shard for shard, _ in pieces])
        for shard, samples in pieces:
            self._where = f"{shard.name}, samples {samples.start} to {samples.stop - 1}"
            for sample, row in enumerate(read_rows(self._source, shard, samples, self._options), samples.start):
                stored = stored_row(row, self.plan.columns, sample)
                yield stored, digest.add(stored)
        if len(pieces) > 1:
            self._where = whole

    def _verify(self, address: str, shards: Sequence[Shard], written: RowDigest) -> None:
        digest = RowDigest()
        with (
            TemporaryDirectory(prefix="penstock-verify-") as scratch,
            contextlib.closing(ShardCache(RemoteFolder(address), scratch)) as cache,
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
    with cache.hold(shard) as held, contextlib.closing(open_shard(shard, held.paths, options)) as reader:
        for begin in range(0, len(samples), ROWS):
            yield from rows_of(reader, samples[begin : begin + ROWS])


def _write_mds(folder: Path, plan: ConversionPlan, rows: Iterable[tuple[Row, int]]) -> list[Shard]:
    writer = MDSWriter(folder, {column.name: column.type for column in plan.columns}, **plan.settings)
    writer.name = folder.name
    writer.remedy_of = lambda name: f"Give the column another type, for example with {given_json(name)}"
    for row, _ in rows:
        writer.write(row)
    return writer.flush()


def _write_parquet(folder: Path, plan: ConversionPlan, rows: Iterable[tuple[Row, int]]) -> list[Shard]:
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
