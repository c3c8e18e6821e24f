"""Samples of plain files with a JSON object on each line. Lines of white space alone are left out."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from penstock.data.formats.contents import CHANGED, new_whole, whole
from penstock.data.formats.raw_files import check_uncompressed, open_file
from penstock.data.formats.records.record_file import RecordFile, record_shard
from penstock.data.formats.shards import Shard
from penstock.proto.errors import ShardCorruptError

READ_AT_ONCE = 16 << 20
SPACES = np.frombuffer(b" \t\r\n\v\f", np.uint8)
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class JSONLinesReader(RecordFile):
    def _decoded(self, index: int, record: bytes) -> dict[str, Any]:
        try:
            sample = json.loads(record.decode())
        except (ValueError, RecursionError) as error:
            self._undecodable(index, f"must be a line of JSON in UTF-8: {error}")
        if not record.endswith(b"\n") and index != len(self) - 1:
            why = "must end at a line's end, but the file was changed after it was indexed"
            self._corrupt(index, why, CHANGED)
        if not isinstance(sample, dict):
            self._undecodable(index, f"must be a JSON object, got {type(sample).__name__}")
        return sample


def index_json_lines(path: Path, name: str, out: Path) -> Shard:
    """Write the file of a JSON lines file's offsets to the index's folder `out`, and return the shard. Raises
    DatasetError if it cannot be written; ShardCorruptError if the first line is not a JSON object."""
    size, offsets, content = _lines(path, name)
    shard = replace(record_shard("json_lines", path, out, name, size, offsets), content=content)
    if shard.samples:
        reader = JSONLinesReader(shard, path, out / shard.files[1].raw.name)
        _ = reader[0]  # raises an error now instead of in the middle of training
    return shard


def _lines(path: Path, name: str) -> tuple[int, np.ndarray[Any, np.dtype[np.int64]], str]:
    file, size = open_file(path, name)
    digest = new_whole()
    check_uncompressed(file, name)
    begins, spaces = [np.zeros(1, np.int64)], [np.zeros(1, np.int64)]
    for at in range(0, size, READ_AT_ONCE):
        data = file.read(READ_AT_ONCE, at)
        digest.update(data)
        chunk = np.frombuffer(data, np.uint8)
        found = np.flatnonzero(chunk == ord("\n")) + 1
        first = np.append(chunk, ord(" "))[found]  # the first byte beyond the chunk may be a space
        begins.append(found + at)
        spaces.append(found[np.isin(first, SPACES)] + at)
    if os.fstat(file.fileno()).st_size != size:
        raise ShardCorruptError(f"{name} must not change while it is indexed. Index it again when its writer has ended")
    lines = np.concatenate(begins)
    lines[0] = len(BYTE_ORDER_MARK) if file.read(len(BYTE_ORDER_MARK), 0) == BYTE_ORDER_MARK else 0
    ends = np.append(lines[1:], size)
    # A line without text belongs to the line before it. Only a line that begins with a space can be without text.
    candidates = np.searchsorted(lines, np.concatenate(spaces)[1:]).tolist()
    empty = [at for at in [0, *candidates] if not file.read(int(ends[at] - lines[at]), int(lines[at])).strip()]
    kept = np.delete(lines, empty)
    return size, np.append(kept, size), whole(digest)
