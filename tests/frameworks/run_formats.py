"""Contract of the formats whose libraries are not installed for `make test`, and what is special to each."""

from __future__ import annotations

import importlib
import pickle
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from format_folders import FOLDERS_BESIDE, Made
from tests.datasets.test_format_contract import (  # noqa: F401
    dataset,
    own,
    test_damage_is_an_error_or_other_values,
    test_files_cut_while_open_are_named,
    test_forked_and_pickled_readers_agree,
    test_missing_files_are_named,
    test_other_sizes_are_found_on_opening,
    test_samples_are_the_librarys,
    test_values_outlive_reader_and_files,
)

from penstock.data import LanceRows, MapLoader, index_folder
from penstock.data.formats import lance as lance_rows
from penstock.proto.errors import DatasetError, InvalidArgumentError, ShardCorruptError, StateMismatchError


@pytest.fixture(scope="module", params=FOLDERS_BESIDE)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp(request.param)
    return Made(folder, FOLDERS_BESIDE[request.param](folder))


def written(path: Path, records: list[bytes]) -> Path:
    writer = importlib.import_module("array_record.python.array_record_module").ArrayRecordWriter(
        str(path), "group_size:1"
    )
    for record in records:
        writer.write(record)
    writer.close()
    return path


def test_other_files_are_no_array_records(tmp_path: Path) -> None:
    path = written(tmp_path / "a.array_record", [b"x"])
    for data in (b"", b"x", bytes(1 << 17), path.read_bytes()[:-1]):
        path.write_bytes(data)
        with pytest.raises(ShardCorruptError, match=r"a.array_record must be an ArrayRecord file: .* close its writer"):
            index_folder(tmp_path)


ROWS = [
    {"number": i, "tokens": list(range(i % 20)) if i % 7 else None, "text": f"row {i}", "nested": {"a": [i]}}
    for i in range(500)
]


@pytest.fixture(scope="module")
def lance_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four files, then a version with ten more rows."""
    lance = importlib.import_module("lance")
    folder = tmp_path_factory.mktemp("lance") / "rows.lance"
    table = pyarrow.Table.from_pylist(ROWS)
    lance.write_dataset(table, str(folder), max_rows_per_file=130)
    lance.write_dataset(table.slice(0, 10), str(folder), mode="append")
    return folder


def test_lance_rows_are_read_by_number(lance_folder: Path) -> None:
    rows = LanceRows(lance_folder, version=1)
    order = random.Random(1).sample(range(500), 500)
    for at in range(0, 500, 50):
        for number, row in zip(order[at : at + 50], rows.__getitems__(order[at : at + 50]), strict=True):
            tokens = row.pop("tokens")
            assert tokens is None or tokens.dtype == np.int64
            assert {**row, "tokens": None if tokens is None else tokens.tolist()} == ROWS[number]
    assert rows[-1]["number"] == 499
    for wrong in (500, -501):
        with pytest.raises(IndexError, match=f"below 500, got {wrong}"):
            rows[wrong]
    assert LanceRows(lance_folder, columns=["text"])[509] == {"text": "row 9"}
    assert pickle.loads(pickle.dumps(rows))[7]["number"] == 7


def test_lance_rows_in_order_are_read_ahead(lance_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also from the middle, by several threads, and after a jump; a pickle leaves out what was read."""
    rows = LanceRows(lance_folder, version=1, columns=["number"])
    calls: list[int] = []
    plain = LanceRows._read

    def counted(self: LanceRows, numbers: list[int]) -> Any:
        calls.append(len(numbers))
        return plain(self, numbers)

    def read(begin: int) -> list[int]:
        return [row["number"] for row in rows[begin : begin + 7]]

    monkeypatch.setattr(LanceRows, "_read", counted)
    monkeypatch.setattr(lance_rows, "AHEAD_BYTES", 70 * 8)
    for begin in (*range(0, 500, 7), 300, *range(100, 500, 7)):
        assert read(begin) == list(range(begin, min(begin + 7, 500)))
    assert calls == [7, *[70] * 7, 3, 7, 7, *[70] * 5, 43]
    assert pickle.loads(pickle.dumps(rows))._ahead is None
    with ThreadPoolExecutor(4) as threads:
        assert [*threads.map(read, range(0, 490, 7))] == [[*range(begin, begin + 7)] for begin in range(0, 490, 7)]


def test_a_lance_state_is_of_its_version(lance_folder: Path) -> None:
    state = MapLoader(LanceRows(lance_folder, version=1), batch_size=10).state_dict()
    MapLoader(LanceRows(lance_folder, version=1), batch_size=10).load_state_dict(state)
    with pytest.raises(StateMismatchError, match="data was"):
        MapLoader(LanceRows(lance_folder, version=2), batch_size=10).load_state_dict(state)


def test_bad_lance_datasets_are_named(lance_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"nothing.lance cannot be opened: .*Correct the address"):
        LanceRows(tmp_path / "nothing.lance")
    with pytest.raises(DatasetError, match=r"version 99 of .*rows.lance cannot be opened"):
        LanceRows(lance_folder, version=99)
    with pytest.raises(InvalidArgumentError, match=r"columns must be some of number, tokens, .*, got absent"):
        LanceRows(lance_folder, columns=["absent"])
    folder = tmp_path / "damaged.lance"
    shutil.copytree(lance_folder, folder)
    rows, draw = LanceRows(folder, version=1), random.Random(4)
    expected = [rows[at]["number"] for at in (0, 200, 499)]
    for path in sorted((folder / "data").iterdir()):
        data = path.read_bytes()
        for _ in range(20):
            damaged = bytearray(data)
            for _ in range(4):
                damaged[draw.randrange(len(data))] = draw.randrange(256)
            path.write_bytes(damaged[: draw.choice([len(data), len(data), len(data) // 2])])
            assert "damaged.lance" in _error_of(folder)
        path.unlink()
        with pytest.raises(ShardCorruptError, match=r"damaged.lance: rows"):
            LanceRows(folder).__getitems__(range(510))
        path.write_bytes(data)
    assert [LanceRows(folder, version=1)[at]["number"] for at in (0, 200, 499)] == expected


def _error_of(folder: Path) -> str:
    """Read all rows; return the text of the error that this raises, or the folder if it raises none."""
    try:
        LanceRows(folder).__getitems__(range(510))
    except DatasetError as error:
        return str(error)
    return str(folder)
