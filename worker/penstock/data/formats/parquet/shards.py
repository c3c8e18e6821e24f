"""Shards of Parquet files, from the files' footers alone. mosaicml-streaming 0.13.0 has no Parquet shards, so an index
that lists them is an extension of Penstock."""

from __future__ import annotations

import importlib
import io
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from penstock.data.formats.columnar.common_types import CommonTypes
from penstock.data.formats.contents import check_content, of_footer
from penstock.data.formats.descriptors import Descriptor
from penstock.data.formats.fields import check_same_columns, check_unique
from penstock.data.formats.file_ranges import file_range
from penstock.data.formats.parquet.footer import RowGroup, footer_length, row_groups, tail_of
from penstock.data.formats.shards import Shard, ShardFile, StoredFile
from penstock.proto.errors import DatasetError, PenstockError, ShardCorruptError

PARQUET = "parquet"
"""Name of the format in the index."""
Tail = tuple[bytes, int]
"""Bytes from the footer's beginning to the file's end, and the size of the whole file."""


def pyarrow_parquet() -> Any:
    """Raises DatasetError if pyarrow is not installed."""
    try:
        return importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise DatasetError("Parquet files need the package pyarrow. Run pip install 'penstock[parquet]'") from error


def parquet_shards(files: Iterable[tuple[str, Path]]) -> list[Shard]:
    """Return a shard for each (path relative to the dataset's folder, file). All files must have columns of the same
    names, and of types that fit, because a loader makes batches of rows from any of them. Raises DatasetError."""
    return shards_of_tails((name, partial(local_tail, path)) for name, path in files)


def shards_of_tails(files: Iterable[tuple[str, Callable[[], Tail]]]) -> list[Shard]:
    """Return a shard for each (name, function that returns the end of the file). Raises DatasetError as parquet_shards;
    the functions' errors become ShardCorruptError, but those of Penstock stay."""
    shards, types = [], CommonTypes()
    for name, tail_and_size in files:
        shard, footer = shard_of_tail(name, tail_and_size)
        check_unique(name, shard.settings["column_names"])
        shards.append(shard)
        types.add(name, footer.schema)
    check_same_columns(shards)
    settings = shards[0].settings
    return [
        replace(shard, settings={**settings, **own} if own else settings)
        for shard, own in zip(shards, types.settings(), strict=True)
    ]


def shard_of_tail(name: str, tail_and_size: Callable[[], Tail]) -> tuple[Shard, Footer]:
    """Return the shard of a file, and its footer. Raises as `shards_of_tails`."""
    pyarrow_parquet()
    try:
        tail, size = tail_and_size()
        footer = Footer.parse(tail)
        rows = sum(group.rows for group in footer.groups)
        if rows != footer.metadata.num_rows:
            raise ValueError(
                f"the row groups must have {footer.metadata.num_rows} rows, as the footer says, got {rows}"
            )
    except PenstockError:
        raise
    except Exception as error:  # errors of pyarrow, of the system, and of the file's source
        if isinstance(error, OSError) and error.errno is not None:  # pyarrow's own OSError has no number
            raise ShardCorruptError(
                f"{name} cannot be read: {error}. Check that the file exists and that this user may read it"
            ) from error
        raise ShardCorruptError(
            f"{name} must be a Parquet file: {error}. Write the file again, or move it out of the folder"
        ) from error
    shard = Shard(
        PARQUET,
        rows,
        (ShardFile(StoredFile(name, size)),),
        settings={"column_names": list(footer.schema.names)},
        blocks=tuple(group.rows for group in footer.groups),
        decoded_bytes=sum(group.nbytes for group in footer.groups),
        ranges=_ranges_of(footer.groups, size - len(tail)),
        content=of_footer(tail),
    )
    return shard, footer


@dataclass(frozen=True, slots=True)
class Footer:
    groups: list[RowGroup]
    metadata: Any
    """pyarrow's FileMetaData."""
    schema: Any
    """pyarrow's Schema."""

    @staticmethod
    def parse(tail: bytes) -> Footer:
        """`tail`: bytes from the footer to the file's end. Raises ValueError, or an error of pyarrow."""
        if footer_length(tail[-8:], len(tail) + 4) != len(tail):
            raise ValueError("the footer must have the length that the dataset's index lists")
        groups = row_groups(tail[:-8])  # checked before pyarrow reads it (footer.py)
        metadata = pyarrow_parquet().read_metadata(io.BytesIO(tail))
        return Footer(groups, metadata, metadata.schema.to_arrow_schema())


def footer_shard(shard: Shard) -> Shard:
    """Return the footer of a shard's file as a shard without samples (`format_table.PartReading.table`)."""
    return Shard(PARQUET, 0, (file_range(shard, shard.ranges[-1], shard.size),))


def footer_of(shard: Shard, tail: bytes) -> Footer:
    """Raises ValueError if the footer does not match the dataset's index, or an error of pyarrow."""
    check_content(shard, of_footer(tail), shard.name)
    footer = Footer.parse(tail)
    rows = tuple(group.rows for group in footer.groups)
    if _ranges_of(footer.groups, shard.ranges[-1]) != shard.ranges or (
        shard.format == PARQUET and shard.blocks != rows  # of a table, the reader compares the live rows
    ):
        raise ValueError("the row groups must be those in the dataset's index, but differ")
    return footer


def _ranges_of(groups: Sequence[RowGroup], footer: int) -> tuple[int, ...]:
    """Return `Shard.ranges`; empty unless all row groups lie before the footer, at offset `footer`."""
    ranges = [(group.begin, group.end) if group.rows else (footer, footer) for group in groups]
    if not all(0 < begin <= end <= footer for begin, end in ranges):
        return ()
    return (*(at for pair in ranges for at in pair), footer)


def local_tail(path: Path) -> Tail:
    opened = Descriptor(path)  # a plain file, so that nothing waits for a pipe or a device
    return tail_of(opened), os.fstat(opened.fileno()).st_size
