"""Choice of the reader class for a shard, by its format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from penstock.data.formats.format_table import FORMATS
from penstock.data.formats.shards import DEFAULT_OPTIONS, ReadOptions, Shard, ShardReader
from penstock.proto.errors import DatasetError, ShardCorruptError

__all__ = ["open_shard"]


def open_shard(
    shard: Shard, paths: Sequence[Path], options: ReadOptions = DEFAULT_OPTIONS, *, source: str = ""
) -> ShardReader:
    """Return a reader of a shard. `paths`: its raw files, in the order of `shard.files`. `source`: address that the
    files came from, for errors.

    Raises ShardCorruptError if the files differ from the index, and DatasetError for a column with pickles unless the
    options allow it.
    """
    if not source:
        return _reader(shard, paths, options)
    try:
        reader = _reader(shard, paths, options)
    except ShardCorruptError as error:
        raise ShardCorruptError(f"{source}: {error.message}") from error
    reader.name = source
    return reader


def _reader(shard: Shard, paths: Sequence[Path], options: ReadOptions) -> ShardReader:
    known = FORMATS.get(shard.format)
    if known is None or len(paths) != len(known.parts):
        raise DatasetError(
            f"{shard.name}: this version of Penstock has no reader for a shard of format {shard.format!r} that "
            f"consists of {len(paths)} files: upgrade Penstock, or write the dataset in another format"
        )
    return known.open(shard, paths, options)
