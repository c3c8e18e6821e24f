"""Samples of plain files with a JSON object on each line. Lines without text do not count."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock.data.formats.records.record_file import RecordFile, offsets_of, opened, store_offsets
from penstock.data.formats.shards import ReadOptions, Shard
from penstock.proto.errors import ShardCorruptError

__all__ = ["JSONLinesReader", "index_json_lines", "open_json_lines"]

READ_AT_ONCE = 16 << 20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class JSONLinesReader(RecordFile):
    """Reader of a file of JSON lines. A sample is the object of a line."""

    def _decoded(self, index: int, record: bytes) -> dict[str, Any]:
        try:
            sample = json.loads(record.decode())
        except (ValueError, RecursionError) as error:
            self._corrupt(index, f"must be a line of JSON in UTF-8: {error}")
        if not isinstance(sample, dict):
            self._corrupt(index, f"must be a JSON object, got {type(sample).__name__}")
        return sample


def open_json_lines(shard: Shard, paths: Sequence[Path], options: ReadOptions) -> JSONLinesReader:
    """Return the reader of a shard, see format_table.Format.open."""
    del options  # there are neither pickles nor images
    return JSONLinesReader(shard, *paths)


def index_json_lines(path: Path, name: str) -> Shard:
    """Return the shard of a file of JSON lines, and write the file of their offsets beside it. `name`: its path in the
    dataset's folder. Raises DatasetError; ShardCorruptError if the first line is no JSON object."""
    size, offsets = _lines(path, name)
    shard = Shard("json_lines", len(offsets) - 1, store_offsets(path, name, size, offsets))
    if shard.samples:
        reader = JSONLinesReader(shard, path, offsets_of(path))
        _ = reader[0]  # raises an error now instead of in the middle of training
    return shard


def _lines(path: Path, name: str) -> tuple[int, np.ndarray[Any, np.dtype[np.int64]]]:
    """Return (size of a file in bytes, offsets of its lines that have text, and of its end)."""
    file, size = opened(path, name)
    begins = [np.zeros(1, np.int64)]
    for at in range(0, size, READ_AT_ONCE):
        chunk = np.frombuffer(file.read(READ_AT_ONCE, at), np.uint8)
        begins.append(np.flatnonzero(chunk == ord("\n")) + (at + 1))
    lines = np.concatenate(begins)
    if file.read(len(BYTE_ORDER_MARK), 0) == BYTE_ORDER_MARK:
        lines[0] = len(BYTE_ORDER_MARK)
    if lines[-1] == size:
        lines = lines[:-1]
    ends = np.append(lines[1:], size)
    # An empty line belongs to the line before it. Only short ones can be empty.
    short = np.flatnonzero(ends - lines <= 2)
    empty = [at for at in short.tolist() if not file.read(int(ends[at] - lines[at]), int(lines[at])).strip()]
    kept = np.delete(lines, empty)
    if size and file.read(size - int(ends[-1]), int(ends[-1])):
        raise ShardCorruptError(f"{name}: it grew while it was indexed")
    return size, np.append(kept, size)
