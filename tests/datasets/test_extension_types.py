"""Extension types of Arrow have the same values in every file that may hold them."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from format_folders import plainly

from penstock.data import StreamingDataset, convert_dataset, index_folder
from penstock.proto.errors import DatasetError

ROWS = 20


def stored(kind: Any, values: list[Any]) -> Any:
    return pyarrow.ExtensionArray.from_storage(kind, pyarrow.array(values, kind.storage_type))


def in_lists(array: Any) -> Any:
    """A list of the values of each two rows."""
    return pyarrow.ListArray.from_arrays([0, *range(2, 2 * ROWS + 1, 2)], pyarrow.concat_arrays([array, array]))


TENSOR = pyarrow.fixed_shape_tensor(pyarrow.float32(), [2, 3])
TURNED = pyarrow.fixed_shape_tensor(pyarrow.int16(), [2, 3, 4], permutation=[2, 1, 0])
CYCLIC = pyarrow.fixed_shape_tensor(pyarrow.int16(), [2, 3, 4], permutation=[2, 0, 1])
NUMBERS = np.arange(ROWS * 24)
TENSORS = NUMBERS[: ROWS * 6].astype(np.float32).reshape(ROWS, 2, 3)
UUIDS = [uuid.UUID(int=number).bytes for number in range(ROWS)]
TEXTS = [f'{{"n": {number}}}' for number in range(ROWS)]
BOOLS = [number % 3 == 0 for number in range(ROWS)]
tensors = stored(TENSOR, TENSORS.reshape(ROWS, 6).tolist())
turned = stored(TURNED, NUMBERS.reshape(ROWS, 24).tolist())
bools = stored(pyarrow.bool8(), list(map(int, BOOLS)))
uuids = stored(pyarrow.uuid(), UUIDS)
texts = stored(pyarrow.json_(), TEXTS)

COLUMNS: dict[str, tuple[Any, list[Any]]] = {
    "tensor": (tensors, list(TENSORS)),
    "turned": (turned, list(turned.to_numpy_ndarray())),
    "bool8": (bools, BOOLS),
    "json": (texts, TEXTS),
    "uuid": (uuids, UUIDS),
    "opaque": (stored(pyarrow.opaque(pyarrow.int32(), "kind", "vendor"), list(range(ROWS))), list(range(ROWS))),
    "nulls": (stored(pyarrow.uuid(), [None, *UUIDS[1:]]), [None, *UUIDS[1:]]),
    "no tensor": (stored(TENSOR, [None, *TENSORS.reshape(ROWS, 6)[1:].tolist()]), [None, *TENSORS[1:]]),
    "null in tensor": (
        stored(TENSOR, [[None, 1, 2, 3, 4, 5], *TENSORS.reshape(ROWS, 6)[1:].tolist()]),
        [[[None, 1.0, 2.0], [3.0, 4.0, 5.0]], *TENSORS[1:]],
    ),
    "list of json": (in_lists(texts), [(TEXTS * 2)[2 * row : 2 * row + 2] for row in range(ROWS)]),
    "list of bool8": (in_lists(bools), [(BOOLS * 2)[2 * row : 2 * row + 2] for row in range(ROWS)]),
    "list of tensors": (in_lists(tensors), [[*TENSORS, *TENSORS][2 * row : 2 * row + 2] for row in range(ROWS)]),
    "struct": (
        pyarrow.StructArray.from_arrays([uuids, bools], ["id", "ok"]),
        [{"id": one, "ok": other} for one, other in zip(UUIDS, BOOLS, strict=True)],
    ),
    "map": (
        pyarrow.MapArray.from_arrays(range(ROWS + 1), pyarrow.array(map(str, range(ROWS))), bools),
        [[(str(row), BOOLS[row])] for row in range(ROWS)],
    ),
}


def write_arrow(table: Any, folder: Path, compression: str | None = None) -> None:
    options = pyarrow.ipc.IpcWriteOptions(compression=compression)
    with pyarrow.ipc.new_file(folder / "a.arrow", table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=12)


def write_packed(table: Any, folder: Path) -> None:
    write_arrow(table, folder, "zstd")


def write_parquet(table: Any, folder: Path) -> None:
    pyarrow.parquet.write_table(table, folder / "a.parquet", row_group_size=12)


def same(found: list[Any], expected: list[Any]) -> bool:
    return bool(plainly(found) == plainly(expected))


@pytest.mark.parametrize("write", [write_arrow, write_packed, write_parquet])
@pytest.mark.parametrize("name", COLUMNS)
def test_values_are_the_same(name: str, write: Callable[[Any, Path], None], tmp_path: Path) -> None:
    """One by one, in order, and as columns of a batch."""
    array, expected = COLUMNS[name]
    write(pyarrow.table({"c": array}), tmp_path)
    index_folder(tmp_path)
    with closing(StreamingDataset(str(tmp_path))) as dataset:
        assert same([dataset[row]["c"] for row in range(ROWS)], expected)
        assert same([sample["c"] for sample in dataset[:]], expected)
        columns = dataset.get_columns(np.arange(ROWS))
        if columns is not None:
            values = columns["c"]
            assert same(values if isinstance(values, list) else values.tolist(), expected)


def test_types_of_parquet_itself_are_read(tmp_path: Path) -> None:
    """Without Arrow's own schema in the file: JSON and UUID are types of Parquet itself."""
    table = pyarrow.table({"texts": texts, "uuids": uuids})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", store_schema=False)
    index_folder(tmp_path)
    with closing(StreamingDataset(str(tmp_path))) as dataset:
        assert [(sample["texts"], sample["uuids"]) for sample in dataset[:]] == [*zip(TEXTS, UUIDS, strict=True)]


@pytest.mark.parametrize("write", [write_arrow, write_packed, write_parquet])
def test_doubtful_tensors_are_refused(write: Callable[[Any, Path], None], tmp_path: Path) -> None:
    """By name, and only if the column is read: pyarrow and the specification differ in such a permutation."""
    doubtful = stored(CYCLIC, NUMBERS.reshape(ROWS, 24).tolist())
    write(pyarrow.table({"c": doubtful, "id": uuids}), tmp_path)
    index_folder(tmp_path)
    with closing(StreamingDataset(str(tmp_path))) as dataset:
        for rows in (slice(3, 4), slice(None)):
            with pytest.raises(DatasetError, match=r"column 'c': a tensor's permutation must be its own inverse"):
                dataset[rows]
    with closing(StreamingDataset(str(tmp_path), columns=["id"])) as dataset:
        assert [sample["id"] for sample in dataset[:]] == UUIDS


def test_extension_in_a_union_is_refused(tmp_path: Path) -> None:
    union = pyarrow.UnionArray.from_sparse(pyarrow.array([0] * ROWS, pyarrow.int8()), [uuids])
    write_arrow(pyarrow.table({"c": union}), tmp_path)
    index_folder(tmp_path)
    words = r"column 'c': an extension type must not be within a union"
    with closing(StreamingDataset(str(tmp_path))) as dataset, pytest.raises(DatasetError, match=words):
        dataset[3]


def test_extensions_are_converted(tmp_path: Path) -> None:
    (tmp_path / "from").mkdir()
    names = ["tensor", "turned", "bool8", "json", "uuid", "list of json"]
    write_arrow(pyarrow.table({name: COLUMNS[name][0] for name in names}), tmp_path / "from")
    index_folder(tmp_path / "from")
    done = convert_dataset(tmp_path / "from", tmp_path / "to", "mds", processes=1)
    assert done.samples == ROWS
    with closing(StreamingDataset(str(tmp_path / "to"))) as dataset:
        for row, sample in enumerate(dataset[:]):
            for name in names:
                assert np.array_equal(sample[name], COLUMNS[name][1][row]), name
