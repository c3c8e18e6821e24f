"""Folders like `label=1/`: columns, as pyarrow reads them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.csv
import pyarrow.dataset
import pyarrow.parquet
import pytest
import torch

from penstock.data import StreamingDataset, StreamingLoader, convert_dataset, index_folder
from penstock.proto.errors import DatasetError, InvalidArgumentError

VALUES = [
    "1",
    "2",
    "-3",
    "007",
    "2147483647",
    "2147483648",
    "x y",
    "ü",
    "1.5",
    "+1",
    "",
    "a=b",
    "__HIVE_DEFAULT_PARTITION__",
]


def quoted(text: str) -> str:
    return text.replace("ü", "%C3%BC").replace(" ", "%20")


def read(folder: Path, **options: Any) -> list[dict[str, Any]]:
    index_folder(folder)
    return sorted(StreamingDataset(folder, **options)[:], key=lambda row: row["i"])


def test_columns_are_those_of_pyarrow(tmp_path: Path) -> None:
    rng = random.Random(1)
    compared = 0
    for number in range(200):
        root = tmp_path / str(number)
        values = rng.sample(VALUES, 3) if number % 2 else ["1", "2", "-3", "__HIVE_DEFAULT_PARTITION__"]
        for file in range(rng.randint(1, 4)):
            folders = [
                f"{key}={quoted(rng.choice(values))}" for key in rng.sample(["a", "b", "c d"], rng.randint(0, 2))
            ]
            place = root.joinpath(*folders, *(["plain"] if rng.random() < 0.2 else []))
            place.mkdir(parents=True, exist_ok=True)
            pyarrow.parquet.write_table(pyarrow.table({"i": [2 * file, 2 * file + 1]}), place / f"{file}.parquet")
        try:
            expected = pyarrow.dataset.dataset(root, format="parquet", partitioning="hive").to_table()
        except pyarrow.ArrowInvalid:  # a column that has no value at all: "No non-null segments"
            continue
        rows = expected.sort_by("i").to_pylist()
        assert read(root) == rows
        compared += 1
        batch = StreamingDataset(root).get_columns(np.arange(len(rows)))
        assert batch is not None
        for name in expected.column_names[1:]:
            if not expected[name].null_count:
                integers = expected.schema.field(name).type == pyarrow.int32()
                assert getattr(batch[name], "dtype", None) == (np.int64 if integers else None)  # as of Python numbers
    assert compared > 150


@pytest.mark.parametrize("format", ["parquet", "arrow", "jsonl", "csv"])
def test_every_format_of_rows(tmp_path: Path, format: str) -> None:
    for label in (0, 1):
        place = tmp_path / "from" / f"label={label}" / "lang=de"
        place.mkdir(parents=True)
        table = pyarrow.table({"label": [9, 9], "i": [label, label + 2]})  # the folder's value counts, as for pyarrow
        if format == "parquet":
            pyarrow.parquet.write_table(table, place / "a.parquet")
        elif format == "arrow":
            with pyarrow.ipc.new_file(place / "a.arrow", table.schema) as file:
                file.write_table(table)
        elif format == "csv":
            pyarrow.csv.write_csv(table, place / "a.csv")
        else:
            (place / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    rows = read(tmp_path / "from")
    kind: type = str if format == "csv" else int
    assert rows == [{"i": kind(i), "label": i % 2, "lang": "de"} for i in range(4)]
    assert read(tmp_path / "from", columns=["lang", "i"]) == [{"lang": "de", "i": kind(i)} for i in range(4)]
    labels = StreamingDataset(tmp_path / "from", columns=["label"])
    assert labels[:] == [{"label": 0}, {"label": 0}, {"label": 1}, {"label": 1}]
    batches = list(StreamingLoader(labels, global_batch_size=2))
    assert torch.cat([batch["label"] for batch in batches]).tolist() == [0, 0, 1, 1]
    with pytest.raises((InvalidArgumentError, DatasetError), match=r"column.* '?no"):
        _ = StreamingDataset(tmp_path / "from", columns=["no"])[0]
    convert_dataset(tmp_path / "from", tmp_path / "to", "mds")
    assert sorted(StreamingDataset(tmp_path / "to")[:], key=lambda row: row["i"]) == rows


def test_partitions_of_splits_are_never_one_split(tmp_path: Path) -> None:
    def indexed(*folders: str) -> Path:
        root = tmp_path / str(len(list(tmp_path.iterdir())))
        for folder in folders:
            (root / folder).mkdir(parents=True)
            (root / folder / "a.jsonl").write_text(json.dumps({"of": folder}) + "\n")
        index_folder(root)
        return root

    def read(root: Path, split: str | None = None) -> list[str]:
        return [row["of"] for row in StreamingDataset(root, split=split)[:]]

    root = indexed("lang=de/split=train", "lang=de/split=my%20own", "lang=en/split=train")
    assert read(root, "train") == ["lang=de/split=train", "lang=en/split=train"]
    assert read(root, "my own") == ["lang=de/split=my%20own"]
    assert StreamingDataset(root, split="train")[0]["split"] == "train"
    with pytest.raises(InvalidArgumentError, match="split must be one of train, my own, got None"):
        StreamingDataset(root)
    for folders in (["part=test", "part=train"], ["train=0", "train=1"], ["part=dev-1", "part=x"]):
        root = indexed(*folders)
        assert read(root) == read(root, "*") == folders
        with pytest.raises(InvalidArgumentError, match=r"split must be \['\*'\], as it was indexed, got 'train'"):
            StreamingDataset(root, split="train")
    assert read(indexed("lang=contest", "lang=de"), "train") == ["lang=contest", "lang=de"]
