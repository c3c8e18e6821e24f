"""Table of the formats of shards: their files, the check of their entries in the index, their readers. To add a format,
write a module or package beside this one, and a row in FORMATS."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from penstock.data.formats.array_record import ArrayRecordReader
from penstock.data.formats.arrow.reader import ArrowReader, check_arrow, header_shard, open_arrow_part, read_header
from penstock.data.formats.file_ranges import part_shard
from penstock.data.formats.mds import MDSReader, check_mds
from penstock.data.formats.megatron import MegatronReader
from penstock.data.formats.parquet.reader import ParquetReader, check_parquet, open_row_group, read_footer
from penstock.data.formats.parquet.shards import footer_shard
from penstock.data.formats.parquet.table_files import TABLE_FILE as TABLE_FILE
from penstock.data.formats.parquet.table_files import check_table_file
from penstock.data.formats.records.csv_rows import CSVRowsReader, check_csv_rows
from penstock.data.formats.records.energon_folder import check_tar
from penstock.data.formats.records.json_lines import JSONLinesReader
from penstock.data.formats.records.record_file import RecordFile, offsets_shard, part_of, read_table
from penstock.data.formats.records.tar_samples import TarReader
from penstock.data.formats.shards import ReadOptions, Shard, ShardReader
from penstock.data.formats.text_shards import JSONReader, XSVReader, check_json, check_separated
from penstock.data.formats.tfrecord.example_messages import check_records
from penstock.data.formats.tfrecord.tfrecord_file import TFRecordReader

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
    open: Callable[[Shard, Sequence[Path], ReadOptions], ShardReader]
    """(shard, paths of its raw files, options) -> reader. Raises ShardCorruptError, DatasetError."""
    check: Callable[[dict[str, Any]], None] = lambda settings: None
    """Check the settings in a shard's entry in the index. Raises InvalidField."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Settings in the index that only mosaicml-streaming's own reader needs."""
    max_bytes: int = UNLIMITED
    by_part: PartReading | None = None
    """None if files are always fetched whole."""
    by_column: bool = False
    """True if the reader can return the columns of several rows (see `shards.columns_of_rows`)."""


def _plain(reader: Callable[..., ShardReader]) -> Callable[[Shard, Sequence[Path], ReadOptions], ShardReader]:
    """For files without pickles, whose images stay as stored."""
    return lambda shard, paths, options: reader(shard, *paths)


def _of_records(
    name: str, reader: type[RecordFile], check: Callable[[dict[str, Any]], None] = lambda settings: None
) -> Format:
    """Return the format of a file of records, which has a file of offsets (records/record_file.py)."""

    def open_part(shard: Shard, part: int, path: Path, table: memoryview, options: ReadOptions) -> ShardReader:
        return reader(part_shard(shard, part), path, part_of(shard, part, table), options)

    by_part = PartReading(offsets_shard, read_table, open_part)
    return Format(
        name,
        _WITH_OFFSETS,
        lambda shard, paths, options: reader(shard, paths[0], paths[1], options),
        check,
        by_part=by_part,
    )


_of_mosaicml = partial(Format, defaults={"size_limit": None}, max_bytes=MAX_BYTES)

FORMATS: Mapping[str, Format] = {
    known.name: known
    for known in (
        _of_mosaicml("mds", ("data",), lambda shard, paths, options: MDSReader(shard, paths[0], options), check_mds),
        _of_mosaicml("json", _WITH_OFFSETS, _plain(JSONReader), check_json),
        _of_mosaicml("xsv", _WITH_OFFSETS, _plain(XSVReader), partial(check_separated, any_separator=True)),
        _of_mosaicml("csv", _WITH_OFFSETS, _plain(XSVReader), check_separated),
        _of_mosaicml("tsv", _WITH_OFFSETS, _plain(XSVReader), check_separated),
        # Penstock's own format: mosaicml-streaming has no index of plain Parquet files.
        Format(
            "parquet",
            ("data",),
            _plain(ParquetReader),
            check_parquet,
            by_part=PartReading(footer_shard, read_footer, open_row_group),
            by_column=True,
        ),
        # A name of its own, so that releases that do not know deleted rows refuse it.
        Format(
            TABLE_FILE,
            ("data",),
            _plain(ParquetReader),
            check_table_file,
            by_part=PartReading(footer_shard, read_footer, open_row_group),
            by_column=True,
        ),
        # Files of other libraries, read as they are.
        Format("megatron", _WITH_OFFSETS, _plain(MegatronReader)),
        Format(
            "arrow",
            ("data",),
            _plain(ArrowReader),
            check_arrow,
            by_part=PartReading(header_shard, read_header, open_arrow_part),
            by_column=True,
        ),
        Format("array_record", ("data",), _plain(ArrayRecordReader), check_records),
        _of_records("tfrecord", TFRecordReader, check_records),
        _of_records("json_lines", JSONLinesReader),
        _of_records("csv_rows", CSVRowsReader, check_csv_rows),
        _of_records("webdataset", TarReader, check_tar),
    )
}


def reads_by_column(name: str) -> bool:
    known = FORMATS.get(name)
    return known is not None and known.by_column
