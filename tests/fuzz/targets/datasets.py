"""Decoders of what an untrusted dataset may contain: its index, its packed files, its shards."""

from __future__ import annotations

import base64
import io
import os
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
from pyroaring import BitMap64
from targets.target import Target, pieces, script

from penstock.data.formats.compressed_files import COMPRESSIONS, pack, unpack
from penstock.data.formats.index import INDEX, read_index, write_index
from penstock.data.formats.parquet.footer import row_groups
from penstock.data.formats.parquet.table_files import decoded_rows, encoded_rows
from penstock.data.formats.readers import open_shard
from penstock.data.formats.shards import Shard, ShardFile, StoredFile
from penstock.data.formats.tfrecord.example_messages import example_of
from penstock.data.writing.tables.iceberg import vector_rows
from penstock.proto.errors import DatasetError

__all__ = ["TARGETS"]

MDS = Path(__file__).parents[2] / "data" / "mds"
OTHERS = MDS.parent
"""Folder with files of other libraries."""
FOLDERS = ("encodings", "fitting", "json", "xsv")
LIMIT = 1 << 16


def _index(data: bytes) -> None:
    shards = read_index(data, "here")
    assert read_index(write_index(shards), "again") == shards


def _index_seeds() -> list[bytes]:
    kinds = [["a", "b", "int64"], ["day", None, "date32[day]", "2026-01-01"], ["new", None]]
    kinds += [["n", "n", {"list": {"map": [None, {"struct": [["x", "x", "double"]]}]}}]]
    settings = {"column_names": ["a", "day", "new", "n"], "table": kinds}
    file = ShardFile(StoredFile("a.parquet", 9))
    table = Shard("parquet_table", 2, (file,), settings=settings, blocks=(2,), deleted="eJxjBgAABAAE")
    wider = pyarrow.schema([("n", pyarrow.list_(pyarrow.float64()))]).serialize().to_pybytes()
    types = {"column_names": ["n"], "types": base64.b64encode(wider).decode()}
    disagreeing = Shard("arrow", 2, (file,), settings=types)
    indexes = [(MDS / name / INDEX).read_bytes() for name in ("none", "large", "json", "xsv", "csv-packed")]
    return [*indexes, write_index([table]), write_index([disagreeing])]


def _unpack(data: bytes) -> None:
    """Unpack data: the first byte selects the compression, the rest is the packed data."""
    names = sorted(COMPRESSIONS)
    if not data:
        raise DatasetError("nothing")
    assert len(unpack(data[1:], names[data[0] % len(names)], limit=LIMIT)) <= LIMIT


def _unpack_seeds() -> list[bytes]:
    text = b"water " * 50
    return [bytes([i]) + pack(data, name) for i, name in enumerate(sorted(COMPRESSIONS)) for data in (b"", text)]


def _footer(data: bytes) -> None:
    try:
        assert all(group.nbytes >= 0 and group.rows >= 0 for group in row_groups(data))
    except ValueError as error:
        raise DatasetError(str(error)) from error


def _footer_seeds() -> list[bytes]:
    file = io.BytesIO()
    columns = {"list": [[1], []], "text": ["a", None], "struct": [{"a": 0.5}, {"a": 1.0}]}
    pyarrow.parquet.write_table(pyarrow.table(columns), file, row_group_size=1)
    data = file.getvalue()
    return [data[-8 - int.from_bytes(data[-8:-4], "little") : -8]]


def _shards() -> list[Shard]:
    return [read_index((MDS / name / INDEX).read_bytes(), name)[0] for name in FOLDERS]


def _shard(data: bytes) -> None:
    """A script: which dataset's first shard, and its first file; then its second file if it has one."""
    steps = list(pieces(data, 2))
    if not steps:
        raise DatasetError("nothing")
    _read_shard(_shards()[steps[0][0] % len(FOLDERS)], [content for _, content in steps])


def _read_shard(shard: Shard, contents: list[bytes]) -> None:
    handles, paths, files = [], [], []
    try:
        for i, file in enumerate(shard.files):
            content = contents[i] if i < len(contents) else b""
            handles.append(os.memfd_create(file.raw.name))
            os.write(handles[-1], content)
            paths.append(Path(f"/proc/self/fd/{handles[-1]}"))
            files.append(ShardFile(StoredFile(file.raw.name, len(content))))
        reader = open_shard(replace(shard, files=tuple(files)), paths)
        try:
            for i in range(len(reader)):
                assert isinstance(reader[i], dict)
        finally:
            reader.close()
    finally:
        for handle in handles:
            os.close(handle)


def _shard_seeds() -> list[bytes]:
    seeds = []
    for number, (folder, shard) in enumerate(zip(FOLDERS, _shards(), strict=True)):
        contents = [(MDS / folder / file.raw.name).read_bytes() for file in shard.files]
        seeds.append(script(*((number, content) for content in contents)))
    return seeds


def _example(data: bytes) -> None:
    try:
        example_of(data)
    except ValueError as error:
        raise DatasetError(str(error)) from error


def _example_seeds() -> list[bytes]:
    data = (OTHERS / "tfrecord" / "a.tfrecord").read_bytes()
    return [data[12 : 12 + int.from_bytes(data[:8], "little")]]


def _deleted(data: bytes) -> None:
    """Two bytes of the number of rows, then the text."""
    rows = int.from_bytes(data[:2], "little")
    assert decoded_rows(data[2:].decode("latin-1"), rows, "here").shape == (rows,)


def _deleted_seeds() -> list[bytes]:
    return [rows.to_bytes(2, "little") + encoded_rows(np.arange(rows) % 3 == 1).encode() for rows in (3, 8, 9_000)]


def _vector(data: bytes) -> None:
    """A vector of Iceberg. Its checksum is made to fit, because a fuzzer does not find out one."""
    vector = (1681511377).to_bytes(4, "little") + data
    blob = len(vector).to_bytes(4, "big") + vector + zlib.crc32(vector).to_bytes(4, "big")
    try:
        rows = vector_rows(blob, 1 << 16)
        assert len(rows) <= 1 << 16
    except ValueError as error:
        raise DatasetError(str(error)) from error


def _vector_seeds() -> list[bytes]:
    return [BitMap64(rows).serialize() for rows in ([], [1, 5], range(0, 1 << 16, 3), range(9_000))]


TARGETS = [
    Target("index", _index, _index_seeds, examples=100),
    Target("unpack", _unpack, _unpack_seeds),
    Target("parquet-footer", _footer, _footer_seeds),
    Target("deleted-rows", _deleted, _deleted_seeds),
    Target("vector", _vector, _vector_seeds),
    Target("shard", _shard, _shard_seeds, examples=200),
    Target("example", _example, _example_seeds),
]
