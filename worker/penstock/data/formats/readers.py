from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.data.formats.columnar.reader import BlocksReader
from penstock.data.formats.fields import unknown_columns
from penstock.data.formats.format_table import FORMATS
from penstock.data.formats.media.clips import ClipReader
from penstock.data.formats.shards import DEFAULT_OPTIONS, ReadOptions, Shard, ShardReader, rows_of
from penstock.proto.errors import DatasetError, InvalidArgumentError, ShardCorruptError


def open_shard(
    shard: Shard, paths: Sequence[Path], options: ReadOptions = DEFAULT_OPTIONS, *, source: str = ""
) -> ShardReader:
    """Return a reader of a shard's raw (decompressed) files, in the order of `shard.files`. `source`: their address,
    for errors. Raises ShardCorruptError if they differ from the index, and DatasetError for a column that may not be
    read (pickles) or does not exist, and for a package that is not installed."""
    return _opened(lambda: _reader(shard, paths, options), shard, options, source)


def check_columns(shards: Sequence[Shard], columns: Sequence[str] | None, where: str) -> None:
    """Raise InvalidArgumentError if the index shows that a column does not exist. Only the first shard's entry is
    compared, because the shards of a dataset should have the same columns; an index may list none."""
    known = shards[0].settings.get("column_names", shards[0].settings.get("columns")) if shards else None
    added = shards[0].settings.get("partitions", ()) if shards else ()
    if known is not None and (error := unknown_columns(where, columns or (), [*known, *added])):
        raise InvalidArgumentError(error)


def open_part(
    shard: Shard, part: int, path: Path, table: Any, options: ReadOptions = DEFAULT_OPTIONS, *, source: str
) -> ShardReader:
    """Return a reader of one part (block or span) of a shard, in a file of its own at `path` (file_ranges.py). `table`:
    as the format's `PartReading.read` returned it. Raises ShardCorruptError, and DatasetError as `open_shard` does."""
    by_part = FORMATS[shard.format].by_part
    assert by_part is not None
    first = sum(shard.parts[:part])
    return _opened(lambda: by_part.open(shard, part, path, table, options), shard, options, source, first)


def _opened(
    make: Callable[[], ShardReader], shard: Shard, options: ReadOptions, source: str, first: int = 0
) -> ShardReader:
    """`first`: number in the shard of the reader's first sample."""
    try:
        reader = make()
        partitions = shard.settings.get("partitions", {})
        if partitions or options.columns is not None or options.fill:
            reader = _projected(reader, options, partitions)
    except ShardCorruptError as error:
        raise ShardCorruptError(f"{source}: {error.message}" if source else error.message) from error
    reader.name = source or reader.name
    return ClipReader(reader, options.clips, first) if options.clips else reader


def _projected(reader: ShardReader, options: ReadOptions, partitions: Mapping[str, int | str | None]) -> ShardReader:
    """`partitions`: values that all samples have, besides the file's or in their place."""
    if not isinstance(reader, BlocksReader):
        return _Projected(reader, options, partitions)
    if partitions:
        reader.add_constants(partitions)
    reader.fill_nulls(options.fill)
    if options.columns is not None:
        reader.select(options.columns)
    return reader


class _Projected:
    def __init__(self, reader: ShardReader, options: ReadOptions, partitions: Mapping[str, Any]) -> None:
        self._reader, self._columns, self._partitions = reader, options.columns, partitions
        self._fill = options.fill

    @property
    def name(self) -> str:
        return self._reader.name

    @name.setter
    def name(self, name: str) -> None:
        self._reader.name = name

    def __len__(self) -> int:
        return len(self._reader)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._chosen(self._reader[index])

    def get_many(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        return [self._chosen(sample) for sample in rows_of(self._reader, rows)]

    def close(self) -> None:
        self._reader.close()

    def _chosen(self, sample: dict[str, Any]) -> dict[str, Any]:
        sample = {**{name: value for name, value in sample.items() if name not in self._partitions}, **self._partitions}
        for name, value in self._fill.items():
            if sample.get(name) is None:
                sample[name] = value
        if self._columns is None:
            return sample
        try:
            return {name: sample[name] for name in self._columns}
        except KeyError as error:
            raise DatasetError(
                f"{self.name}: a sample must have the column {error} of `columns`, got {', '.join(map(str, sample))}"
            ) from error


def _reader(shard: Shard, paths: Sequence[Path], options: ReadOptions) -> ShardReader:
    known = FORMATS.get(shard.format)
    if known is None or len(paths) != len(known.file_kinds):
        raise DatasetError(
            f"{shard.name}: format {shard.format!r} with {len(paths)} files is unknown. Upgrade Penstock"
        )
    return known.open(shard, paths, options)
