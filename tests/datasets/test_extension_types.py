"""Columns of Arrow's extension types: the same values from each format, row by row, together, and in batches."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from penstock.data import StreamingDataset, StreamingLoader, index_folder
from penstock.data.converting.convert import convert_dataset
from penstock.data.formats.parquet.extension_values import meaning_of

ROWS = 40
FLAT = [[float(row + place) for place in range(6)] for row in range(ROWS)]
UUIDS = [uuid.UUID(int=row) for row in range(ROWS)]


def tensors(permutation: list[int] | None = None) -> Any:
    kind = pa.fixed_shape_tensor(pa.float32(), (2, 3), permutation=permutation)
    return pa.ExtensionArray.from_storage(kind, pa.array(FLAT, pa.list_(pa.float32(), 6)))


def stored(kind: Any, values: list[Any]) -> Any:
    return pa.ExtensionArray.from_storage(kind, pa.array(values, kind.storage_type))


def columns() -> dict[str, Any]:
    ids = stored(pa.uuid(), [one.bytes for one in UUIDS])
    return {
        "tensor": tensors(),
        "turned": tensors([1, 0]),
        "flag": stored(pa.bool8(), [row % 3 for row in range(ROWS)]),
        "maybe": stored(pa.bool8(), [row % 3 if row % 4 else None for row in range(ROWS)]),
        "text": stored(pa.json_(), [f'{{"a": {row}}}' for row in range(ROWS)]),
        "id": ids,
        "ids": pa.StructArray.from_arrays([ids, tensors()], ["id", "tensor"]),
        "foreign": stored(pa.opaque(pa.int32(), "point", "a database"), list(range(ROWS))),
    }


def expected(row: int) -> dict[str, Any]:
    flat = np.array(FLAT[row], np.float32).reshape(2, 3)
    return {
        "tensor": flat,
        "turned": flat.T,
        "flag": row % 3 > 0,
        "maybe": row % 3 > 0 if row % 4 else None,
        "text": f'{{"a": {row}}}',
        "id": str(UUIDS[row]),
        "ids": {"id": str(UUIDS[row]), "tensor": flat},
        "foreign": row,
    }


@pytest.fixture(params=["parquet", "arrow", "compressed arrow"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Folder of one indexed file with all columns."""
    table = pa.table(columns())
    if request.param == "parquet":
        parquet.write_table(table, tmp_path / "a.parquet", row_group_size=16)
    else:
        options = pa.ipc.IpcWriteOptions(compression="zstd" if request.param != "arrow" else None)
        with pa.ipc.new_file(str(tmp_path / "a.arrow"), table.schema, options=options) as writer:
            writer.write_table(table, max_chunksize=16)
    index_folder(tmp_path)
    return tmp_path


def assert_equal(found: Any, wanted: Any) -> None:
    if isinstance(wanted, dict):
        assert list(found) == list(wanted)
        for name in wanted:
            assert_equal(found[name], wanted[name])
    elif isinstance(wanted, np.ndarray):
        assert (found.dtype, found.shape, found.flags.writeable) == (wanted.dtype, wanted.shape, True)
        np.testing.assert_array_equal(found, wanted)
    else:
        assert (type(found), found) == (type(wanted), wanted)


def test_rows_are_what_the_types_mean(folder: Path) -> None:
    dataset = StreamingDataset(local=folder)
    for row in (0, 7, 19, ROWS - 1):
        assert_equal(dataset[row], expected(row))
    for row, found in enumerate(dataset[0:ROWS]):
        assert_equal(found, expected(row))


def test_permutation_is_that_of_the_format() -> None:
    """Arrow's own example: data of shape (100, 200, 500) in memory mean (500, 100, 200) with permutation 2, 0, 1."""
    kind = pa.fixed_shape_tensor(pa.int32(), (2, 3, 4), permutation=[2, 0, 1])
    memory = np.arange(24, dtype=np.int32).reshape(2, 3, 4)
    found = meaning_of(kind).one(memory.ravel())
    assert found.shape == (4, 2, 3)
    assert all(found[k, i, j] == memory[i, j, k] for i in range(2) for j in range(3) for k in range(4))
    both = meaning_of(kind).many(np.stack([memory.ravel(), memory.ravel() + 1]))
    np.testing.assert_array_equal(both, [found, found + 1])


def test_batches_are_those_of_rows(folder: Path) -> None:
    names = ["tensor", "turned", "flag", "text", "id", "ids", "foreign"]
    dataset = StreamingDataset(local=folder, columns=names)
    batches = list(StreamingLoader(dataset, batch_size=10))
    assert [batch["tensor"].shape for batch in batches] == [(10, 2, 3)] * 4
    assert torch.cat([batch["turned"] for batch in batches]).tolist() == [
        expected(row)["turned"].tolist() for row in range(ROWS)
    ]
    assert torch.cat([batch["flag"] for batch in batches]).dtype == torch.bool
    assert [one for batch in batches for one in batch["id"]] == [str(one) for one in UUIDS]
    assert [one for batch in batches for one in batch["ids"]["id"]] == [str(one) for one in UUIDS]


def test_tensors_become_arrays_of_mds(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "mds"
    convert_dataset(folder, out, "mds", columns=["tensor", "flag", "id"])
    dataset = StreamingDataset(local=out)
    for row in (0, ROWS - 1):
        wanted = expected(row)
        np.testing.assert_array_equal(dataset[row]["tensor"], wanted["tensor"])
        assert (bool(dataset[row]["flag"]), dataset[row]["id"]) == (wanted["flag"], wanted["id"])
