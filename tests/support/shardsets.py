"""Small datasets of shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.data.writing.writers import MDSWriter

__all__ = ["numbers"]


def numbers(folder: Path, count: int, first: int = 0, **settings: Any) -> Path:
    """A dataset in which sample i has the number first + i; ten in a shard."""
    with MDSWriter(folder, {"number": "int"}, size_limit=294, **settings) as writer:
        for number in range(first, first + count):
            writer.write({"number": number})
    return folder
