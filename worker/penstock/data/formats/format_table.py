"""Table of the formats of shards: their files, the check of their entries in the index, their readers. To add a format,
write a module or package beside this one, and a row in FORMATS."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from penstock.data.formats.array_record import open_array_record
from penstock.data.formats.arrow.reader import check_arrow, header_shard, open_arrow, open_arrow_part, read_header
from penstock.data.formats.file_ranges import part_shard
from penstock.data.formats.mds import check_mds, open_mds
from penstock.data.formats.megatron import open_megatron
from penstock.data.formats.parquet.reader import check_parquet, open_parquet, open_row_group, read_footer
from penstock.data.formats.parquet.shards import footer_shard
from penstock.data.formats.records.csv_rows import CSVRowsReader, check_csv_rows, open_csv_rows
from penstock.data.formats.records.energon_folder import check_tar
from penstock.data.formats.records.json_lines import JSONLinesReader, open_json_lines
from penstock.data.formats.records.record_file import RecordPart, offsets_shard, part_of, read_table
from penstock.data.formats.records.tar_samples import TarReader, open_tar
from penstock.data.formats.shards import ReadOptions, Shard, ShardReader
from penstock.data.formats.text_shards import check_json, check_separated, open_json, open_separated
from penstock.data.formats.tfrecord.example_messages import check_records
from penstock.data.formats.tfrecord.tfrecord_file import TFRecordReader, open_tfrecord

__all__ = ["FORMATS", "MAX_BYTES", "Format", "PartReading", "reads_by_column"]

MAX_BYTES = (1 << 32) - 1
"""Largest size in bytes of a file that is addressed by 32-bit offsets."""
UNLIMITED = 1 << 44

_WITH_OFFSETS = ("data", "meta")


@dataclass(frozen=True, slots=True)
class PartReading:
    """Functions of a format that read single parts of a file, fetched without the rest (file_ranges.py)."""

    table: Callable[[Shard], Shard]
    """Return the bytes that the readers of all parts need, such as Parquet's footer, as a shard without samples."""
    read: Callable[[Shard, Path], Any]
    """(whole shard, path of the table) -> the checked table. May raise any error."""
    open: Callable[[Shard, int, Path, Any, ReadOptions], ShardReader]
    """(whole shard, part, path of the part, table, options) -> reader. Raises ShardCorruptError, DatasetError."""


@dataclass(frozen=True, slots=True)
class Format:
    name: str
    file_kinds: tuple[str, ...]
    """Kinds of files that a shard consists of ("data", "meta"), in the order of `Shard.files`."""
    check: Callable[[dict[str, Any]], None]
    """Check the settings in a shard's entry in the index. Raises InvalidField."""
    open: Callable[[Shard, Sequence[Path], ReadOptions], ShardReader]
    """(shard, paths of its raw files, options) -> reader. Raises ShardCorruptError, DatasetError."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Settings in the index that only mosaicml-streaming's own reader needs."""
    max_bytes: int = UNLIMITED
    by_part: PartReading | None = None
    """None if files are always fetched whole."""
    by_column: bool = False
    """True if the reader can return the columns of several rows (see `shards.columns_of_rows`)."""


def _unchecked(settings: dict[str, Any]) -> None:
    """A file of this format describes itself."""
    del settings


def _of_records(open_part: Callable[[Shard, Path, RecordPart, ReadOptions], ShardReader]) -> PartReading:
    """Return the functions that read parts of a file of records, which has a file of offsets."""

    def opened(shard: Shard, part: int, path: Path, table: memoryview, options: ReadOptions) -> ShardReader:
        return open_part(part_shard(shard, part), path, part_of(shard, part, table), options)

    return PartReading(offsets_shard, read_table, opened)


_of_mosaicml = partial(Format, defaults={"size_limit": None}, max_bytes=MAX_BYTES)

FORMATS: Mapping[str, Format] = {
    known.name: known
    for known in (
        _of_mosaicml("mds", ("data",), check_mds, open_mds),
        _of_mosaicml("json", _WITH_OFFSETS, check_json, open_json),
        _of_mosaicml("xsv", _WITH_OFFSETS, partial(check_separated, any_separator=True), open_separated),
        _of_mosaicml("csv", _WITH_OFFSETS, check_separated, open_separated),
        _of_mosaicml("tsv", _WITH_OFFSETS, check_separated, open_separated),
        # Penstock's own format: mosaicml-streaming has no index of plain Parquet files.
        Format(
            "parquet",
            ("data",),
            check_parquet,
            open_parquet,
            by_part=PartReading(footer_shard, read_footer, open_row_group),
            by_column=True,
        ),
        # Files of other libraries, read as they are.
        Format("megatron", _WITH_OFFSETS, _unchecked, open_megatron),
        Format(
            "arrow",
            ("data",),
            check_arrow,
            open_arrow,
            by_part=PartReading(header_shard, read_header, open_arrow_part),
            by_column=True,
        ),
        Format("array_record", ("data",), check_records, open_array_record),
        Format(
            "tfrecord",
            _WITH_OFFSETS,
            check_records,
            open_tfrecord,
            by_part=_of_records(lambda shard, path, part, options: TFRecordReader(shard, path, part)),
        ),
        Format(
            "json_lines",
            _WITH_OFFSETS,
            _unchecked,
            open_json_lines,
            by_part=_of_records(lambda shard, path, part, options: JSONLinesReader(shard, path, part)),
        ),
        Format(
            "csv_rows",
            _WITH_OFFSETS,
            check_csv_rows,
            open_csv_rows,
            by_part=_of_records(lambda shard, path, part, options: CSVRowsReader(shard, path, part)),
        ),
        Format(
            "webdataset",
            _WITH_OFFSETS,
            check_tar,
            open_tar,
            by_part=_of_records(lambda shard, path, part, options: TarReader(shard, path, part, options)),
        ),
    )
}


def reads_by_column(name: str) -> bool:
    known = FORMATS.get(name)
    return known is not None and known.by_column
