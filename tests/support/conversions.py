"""Conversions of datasets, and what is in their results."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

from format_folders import plainly

from penstock.data import (
    StreamingDataset,
    convert_dataset,
)


def rows_in(folder: Any, **options: Any) -> list[Any]:
    with closing(StreamingDataset(str(folder), **options)) as dataset:
        return [plainly(sample) for sample in dataset[:]]


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def to_mds(source: Any, dest: Any, **settings: Any) -> Any:
    return convert_dataset(source, dest, "mds", **{"processes": 1, **settings})


def to_parquet(source: Any, dest: Any, **settings: Any) -> Any:
    return convert_dataset(source, dest, "parquet", **{"processes": 1, **settings})


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
