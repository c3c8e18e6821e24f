"""Index of Parquet files that other programs wrote, so that StreamingDataset can read their folder."""

from __future__ import annotations

import os
from pathlib import Path

from penstock.data.formats.index import INDEX, write_index
from penstock.data.formats.parquet.parquet_reader import parquet_shards
from penstock.data.formats.shards import Shard
from penstock.proto.errors import DatasetError
from penstock.runtime.files.atomic_files import write_whole

__all__ = ["index_parquet"]


def index_parquet(folder: str | os.PathLike[str]) -> list[Shard]:
    """Write an index of all Parquet files in a local folder and its subfolders, in the order of their paths.
    StreamingDataset can then read them. Returns the shards. Raises DatasetError."""
    root = Path(folder)
    files = sorted(root.rglob("*.parquet"))
    if not files:
        raise DatasetError(f"{root}: neither this folder nor one below it has a *.parquet file")
    shards = parquet_shards((path.relative_to(root).as_posix(), path) for path in files)
    write_whole(root / INDEX, write_index(shards))
    return shards
