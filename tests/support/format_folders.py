"""Small datasets in the formats of other libraries, and the samples that are in them.

To have a format checked by tests/datasets/test_format_contract.py, add a line to FOLDERS.
"""

from __future__ import annotations

import csv
import datetime
import importlib
import io
import json
import shutil
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from penstock.data import CSVWriter, JSONWriter, MDSWriter, index_folder
from penstock.data.formats.index import INDEX, write_index
from penstock.data.formats.megatron import index_megatron
from penstock.data.formats.parquet.shards import local_tail, shard_of_tail
from penstock.data.formats.parquet.table_files import TABLE_FILE, encoded_rows, live_counts
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
        shards.append(index_megatron(folder / f"{name}.bin", f"{name}.bin"))
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


VALUES: dict[str, Callable[[int], Any]] = {
    "int": lambda n: n - 20,
    "float": lambda n: n / 3,
    "str": lambda n: "ä" * (n % 5),
    "bytes": lambda n: bytes([n]) * (n % 4),
    "uint8": np.uint8,
    "ndarray": lambda n: np.arange(n % 4 + 1, dtype=np.int16),
    "json": lambda n: {"n": [n, None]},
}
"""Value of sample n, by encoding."""


def written(folder: Path, writer: Any, columns: dict[str, str]) -> Samples:
    """Samples that a writer of ours wrote: mosaicml-streaming writes the same files, see test_mosaicml_files.py."""
    samples = [{name: VALUES[kind](n) for name, kind in columns.items()} for n in range(40)]
    with writer(folder, columns, size_limit=1000) as out:
        for sample in samples:
            out.write(sample)
    return samples


def table() -> tuple[Samples, pyarrow.Table]:
    """Return rows of values of several types, and the same as a table."""
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
    tokens = pyarrow.array([row["tokens"] for row in rows], pyarrow.list_(pyarrow.uint16()))
    return rows, pyarrow.Table.from_pylist(rows).set_column(0, "tokens", tokens)


def parquet(folder: Path) -> Samples:
    """Two files of pyarrow, one of them compressed, in row groups of 7 rows."""
    rows, whole = table()
    for name, part, compression in (("a", whole[:33], "none"), ("b", whole[33:], "zstd")):
        pyarrow.parquet.write_table(part, folder / f"{name}.parquet", row_group_size=7, compression=compression)
    index_folder(folder)
    return rows


def parquet_table(folder: Path) -> Samples:
    """Two files of a table, as index_table lists them: every third row is deleted, the first file lacks a column and
    has a narrower one, and there is a partition."""
    rows, whole = table()
    narrow = whole.set_column(whole.column_names.index("number"), "small", whole["number"].cast("float"))
    shards = []
    for name, part in (("a", narrow[:33].drop_columns("flag")), ("b", whole[33:])):
        path = folder / f"{name}.parquet"
        pyarrow.parquet.write_table(part, path, row_group_size=7)
        plain, footer = shard_of_tail(path.name, partial(local_tail, path))
        deleted = np.arange(plain.samples) % 3 == 1
        columns: list[Any] = [[each, each] for each in (*whole.column_names, "day")]
        columns[-1] = ["day", None, "date32[day]", "2026-01-01"]
        if name == "a":
            columns[whole.column_names.index("flag")] = ["flag", None]
            columns[whole.column_names.index("number")] = ["number", "small", "double"]
        counts = live_counts(deleted, footer.groups)
        settings = {"column_names": [each[0] for each in columns], "table": columns}
        of_table = replace(plain, format=TABLE_FILE, samples=sum(counts), blocks=counts, settings=settings)
        shards.append(replace(of_table, deleted=encoded_rows(deleted)))
    indexed(folder, shards)
    day = {"day": datetime.date(2026, 1, 1)}
    first = [{**row, "flag": None, **day} for number, row in enumerate(rows[:33]) if number % 3 != 1]
    return first + [{**row, **day} for number, row in enumerate(rows[33:]) if number % 3 != 1]


def arrow(folder: Path, compression: str | None = None) -> Samples:
    """A file and a stream of pyarrow, in record batches of 7 rows."""
    rows, whole = table()
    options = pyarrow.ipc.IpcWriteOptions(compression=compression)
    for name, make, part in (
        ("a.arrow", pyarrow.ipc.new_file, whole[:33]),
        ("b.arrow", pyarrow.ipc.new_stream, whole[33:]),
    ):
        with make(str(folder / name), whole.schema, options=options) as writer:
            writer.write_table(part, max_chunksize=7)
    index_folder(folder)
    return rows


def json_lines(folder: Path) -> Samples:
    """Lines of different lengths, some of them empty, and a last one without its end."""
    samples = [{"n": n, "text": "ä\n" * (n % 5), "list": [n] * (n % 3)} for n in range(40)]
    lines = [json.dumps(sample, ensure_ascii=n % 2 == 0) for n, sample in enumerate(samples)]
    (folder / "a.jsonl").write_bytes(b"\xef\xbb\xbf\n" + "\n\r\n\n".join(lines[:25]).encode())
    (folder / "b.jsonl").write_text("\r\n".join(lines[25:]) + "\n\n")
    index_folder(folder)
    return samples


def csv_rows(folder: Path) -> Samples:
    """Rows that the module csv wrote: with quotes, separators and lines in values."""
    texts = ["plain", 'with "quotes"', "with, comma", "with\nline", "", "tab\t", "ä" * 50, 'a ""b"" c']
    samples = [{"number": str(n), "text": texts[n % len(texts)], "other": texts[n * 3 % len(texts)]} for n in range(40)]
    for name, part in (("a.csv", samples[:23]), ("b.csv", samples[23:])):
        with (folder / name).open("w", newline="", encoding="utf-8-sig" if name == "b.csv" else "utf-8") as file:
            writer = csv.DictWriter(file, list(samples[0]), lineterminator="\r\n" if name == "a.csv" else "\n")
            writer.writeheader()
            writer.writerows(part)
            file.write("\n")
    index_folder(folder)
    return samples


def webdataset(folder: Path) -> Samples:
    """Archives of each form that tarfile writes, with folders, links and long names in them."""
    samples: Samples = []
    for number, form in enumerate((tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)):
        with tarfile.open(folder / f"{number}.tar", "w", format=form) as archive:

            def add(name: str, data: bytes, kind: bytes = tarfile.REGTYPE, archive: tarfile.TarFile = archive) -> None:
                member = tarfile.TarInfo(name)
                member.size, member.type = len(data), kind
                archive.addfile(member, io.BytesIO(data))

            add("folder", b"", tarfile.DIRTYPE)
            for row in range(12):
                key = f"folder.d/{'long' * (30 if form != tarfile.USTAR_FORMAT and row % 4 == 1 else 1)}{row:03}"
                array = np.arange(row, dtype=np.float32)
                stored = io.BytesIO()
                np.save(stored, array)
                add(f"{key}.TXT", f"täxt {row}".encode())
                add("__meta__/a.json", b"no sample")
                add(f"{key}.cls", str(row).encode())
                add(f"{key}.part.json", json.dumps({"row": row}).encode())
                add(f"{key}.npy", stored.getvalue())
                add(f"{key}.pth", bytes(range(row * 20)))
                samples.append(
                    {
                        "__key__": key,
                        "txt": f"täxt {row}",
                        "cls": row,
                        "part.json": {"row": row},
                        "npy": array,
                        "pth": bytes(range(row * 20)),
                    }
                )
            add("README", b"no dot")
    with pytest.warns(UserWarning, match=r"3 members of archives are left out, .* such as 'README'"):
        index_folder(folder)
    return samples


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


TEXTS = {kind: kind for kind in ("int", "float", "str")}
FOLDERS: dict[str, Callable[[Path], Samples]] = {
    "mds": partial(written, writer=MDSWriter, columns={kind: kind for kind in VALUES if kind != "float"}),
    "json": partial(written, writer=JSONWriter, columns=TEXTS),
    "csv": partial(written, writer=CSVWriter, columns=TEXTS),
    "parquet": parquet,
    "parquet_table": parquet_table,
    "megatron": megatron,
    "arrow": arrow,
    "arrow, compressed": partial(arrow, compression="zstd"),
    "saved dataset": saved_dataset,
    "tfrecord": tfrecord,
    "json_lines": json_lines,
    "csv_rows": csv_rows,
    "webdataset": webdataset,
}
"""Function that writes a dataset into an empty folder and returns its samples, by format."""

FOLDERS_BESIDE = {"array_record": array_record}
"""The same of formats whose libraries are not installed for `make test`: tests/frameworks/run_formats.py."""
