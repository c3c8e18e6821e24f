"""Small datasets in the formats of other libraries, and the samples that are in them.

To have a format checked by tests/datasets/test_format_contract.py, add a line to FOLDERS.
"""

from __future__ import annotations

import datetime
import importlib
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.ipc
import pytest

from penstock.data import index_folder
from penstock.data.formats.index import INDEX, write_index
from penstock.data.formats.megatron.token_documents import megatron_shard
from penstock.data.formats.shards import Shard

__all__ = ["FOLDERS", "FOLDERS_BESIDE", "Made", "indexed", "plainly", "saved_rows"]

DATA = Path(__file__).parents[1] / "data"
Samples = list[dict[str, Any]]


@dataclass(frozen=True)
class Made:
    """Dataset in a folder."""

    folder: Path
    samples: Samples
    """Samples in the order of their numbers, as the format's own library has them."""


def indexed(folder: Path, shards: Sequence[Shard]) -> None:
    """Write the index of shards that lie in a folder."""
    (folder / INDEX).write_bytes(write_index(shards))


def plainly(value: Any) -> Any:
    """Return a sample in a form that == compares, with dtypes."""
    if isinstance(value, dict):
        return {name: plainly(each) for name, each in value.items()}
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.tolist())
    if isinstance(value, np.generic):
        return (value.dtype.str, value.item())
    return [plainly(each) for each in value] if isinstance(value, list) else value


def megatron(folder: Path) -> Samples:
    """Files that megatron-core wrote, see tests/data/megatron/make.py."""
    expected = json.loads((DATA / "megatron" / "expected.json").read_text())
    samples: Samples = []
    shards = []
    for name, dtype in (("text", np.uint16), ("sentences", np.int32)):
        for end in ("bin", "idx"):
            shutil.copy(DATA / "megatron" / f"{name}.{end}", folder)
        shards.append(megatron_shard(folder / f"{name}.bin", f"{name}.bin"))
        samples += [
            {
                "tokens": np.array([token for one in document for token in one], dtype),
                "sequence_lengths": np.array([len(one) for one in document], np.int32),
            }
            for document in expected[name]
        ]
    indexed(folder, shards)
    return samples


def saved_dataset(folder: Path) -> Samples:
    """Rows that Hugging Face datasets saved, see tests/data/saved_datasets/make.py."""
    for path in (DATA / "saved_datasets" / "chosen").iterdir():
        shutil.copy(path, folder)
    index_folder(folder)
    return saved_rows("chosen")


def saved_rows(name: str) -> Samples:
    rows = json.loads((DATA / "saved_datasets" / "expected.json").read_text())[name]
    image = bytes.fromhex(
        "89504e470d0a1a0a0000000d49484452000000010000000108000000003a7e9b550000000a49444154789c6360000000020001"
        "48afa4710000000049454e44ae426082"
    )
    return [
        {
            **row,
            "input_ids": np.array(row["input_ids"], np.int32),
            "image": {"bytes": image, **row["image"]},
        }
        for row in rows
    ]


def arrow(folder: Path, compression: str | None = None) -> Samples:
    """A file and a stream of pyarrow, in record batches of 7 rows."""
    rows = [
        {
            "tokens": np.arange(i, i + i % 6, dtype=np.uint16) if i % 5 else None,
            "text": f"row {i} ü" if i % 3 else None,
            "raw": bytes([i]) * (i % 4),
            "number": i / 2,
            "flag": i % 2 == 0,
            "nested": {"a": [i, None], "b": {"c": str(i)}},
            "when": datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC) + datetime.timedelta(seconds=i),
        }
        for i in range(60)
    ]
    table = pyarrow.Table.from_pylist(rows)
    table = table.set_column(
        0, "tokens", pyarrow.array([row["tokens"] for row in rows], pyarrow.list_(pyarrow.uint16()))
    )
    options = pyarrow.ipc.IpcWriteOptions(compression=compression)
    for name, make, part in (
        ("a.arrow", pyarrow.ipc.new_file, table[:33]),
        ("b.arrow", pyarrow.ipc.new_stream, table[33:]),
    ):
        with make(str(folder / name), table.schema, options=options) as writer:
            writer.write_table(part, max_chunksize=7)
    index_folder(folder)
    return rows


def tfrecord(folder: Path) -> Samples:
    """Examples that TensorFlow wrote, see tests/data/tfrecord/make.py."""
    pytest.importorskip("google_crc32c")
    for path in (DATA / "tfrecord").glob("*.tfrecord*"):
        shutil.copy(path, folder)
    index_folder(folder)
    made = json.loads((DATA / "tfrecord" / "expected.json").read_text())
    kinds: dict[str | None, Callable[[list[Any]], Any]] = {
        "bytes_list": lambda values: [bytes.fromhex(value) for value in values],
        "float_list": lambda values: np.array(values, np.float32),
        "int64_list": lambda values: np.array(values, np.int64),
        None: lambda values: None,
    }
    return [
        {name: kinds[kind](values) for name, (kind, values) in example.items()}
        for file in made.values()
        for example in file
    ]


def array_record(folder: Path) -> Samples:
    """Records that the package array_record writes now, in two files: the smallest file has 64 KiB."""
    library = importlib.import_module("array_record.python.array_record_module")
    samples: Samples = [{"record": f"record {i} ".encode() * (i % 7)} for i in range(50)]
    for name, part, options in (("a", samples[:20], "group_size:1"), ("b", samples[20:], "group_size:4,uncompressed")):
        writer = library.ArrayRecordWriter(str(folder / f"{name}.array_record-00000-of-00001"), options)
        for sample in part:
            writer.write(sample["record"])
        writer.close()
    index_folder(folder)
    return samples


FOLDERS: dict[str, Callable[[Path], Samples]] = {
    "megatron": megatron,
    "arrow": arrow,
    "arrow, compressed": partial(arrow, compression="zstd"),
    "saved dataset": saved_dataset,
    "tfrecord": tfrecord,
}
"""Function that writes a dataset into an empty folder and returns its samples, by format."""

FOLDERS_BESIDE = {"array_record": array_record}
"""The same of formats whose libraries are not installed for `make test`: tests/frameworks/run_formats.py."""
