"""Errors whose cause lies beside the bytes: they name it, and no remedy that does not help."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from penstock.data import StreamingDataset, index_folder, index_parquet
from penstock.proto.errors import DatasetError

EMPTY_STATE: dict[str, object] = {
    "_data_files": [],
    "_fingerprint": "3ba9a640a7c90af9",
    "_format_columns": None,
    "_format_kwargs": {},
    "_format_type": None,
    "_output_all_columns": False,
    "_split": None,
}
"""state.json as datasets 5.2.0 writes it for a Dataset without rows."""


def parquet(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table({"a": list(range(100))}), path)


def test_empty_split_of_a_saved_dict(tmp_path: Path) -> None:
    """The others can be indexed alone."""
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    for split, files in (("train", [{"filename": "a.arrow"}]), ("test", [])):
        (tmp_path / split).mkdir()
        (tmp_path / split / "state.json").write_text(json.dumps({**EMPTY_STATE, "_data_files": files}))
    table = pyarrow.table({"a": [1, 2]})
    with pyarrow.ipc.new_stream(tmp_path / "train/a.arrow", table.schema) as file:
        file.write_table(table)
    with pytest.raises(DatasetError, match=r"test/state\.json lists no files.*indexed alone by the argument `split`"):
        index_folder(tmp_path)
    index_folder(tmp_path, split="train")
    assert StreamingDataset(tmp_path, split="train")[:] == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize("index", [index_parquet, index_folder])
def test_names_and_links_that_an_index_cannot_have(tmp_path: Path, index: object) -> None:
    assert callable(index)
    parquet(tmp_path / "a/a.parquet")
    (tmp_path / "a/link").symlink_to(tmp_path)
    with pytest.raises(DatasetError, match="a/link must be a file or a folder, got a link to a folder"):
        index(tmp_path / "a")
    index_parquet(tmp_path / "a/*.parquet")  # a link cannot have files that match
    parquet(tmp_path / "b/a\\b.parquet")
    with pytest.raises(DatasetError, match=r"b/a\\b\.parquet cannot be indexed: its name must be a plain path.*Rename"):
        index(tmp_path / "b")
