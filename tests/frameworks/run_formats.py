"""Contract of the formats whose libraries are not installed for `make test`, and what is special to each."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from format_folders import FOLDERS_BESIDE, Made
from tests.datasets.test_format_contract import (  # noqa: F401
    dataset,
    own,
    test_a_resume_is_a_look_up,
    test_damage_is_an_error_or_other_values,
    test_files_cut_while_open_are_named,
    test_forked_and_pickled_readers_agree,
    test_missing_files_are_named,
    test_numbers_out_of_range_are_refused,
    test_order_holds_on_any_topology,
    test_other_sizes_are_found_on_opening,
    test_samples_are_the_librarys,
    test_values_outlive_reader_and_files,
)

from penstock.data import StreamingDataset, index_folder
from penstock.proto.errors import ShardCorruptError

EXAMPLES = Path(__file__).parents[1] / "data" / "tfrecord"


@pytest.fixture(scope="module", params=FOLDERS_BESIDE)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    folder = tmp_path_factory.mktemp(request.param)
    yield Made(folder, FOLDERS_BESIDE[request.param](folder))


def written(path: Path, records: list[bytes]) -> Path:
    writer = importlib.import_module("array_record.python.array_record_module").ArrayRecordWriter(
        str(path), "group_size:1"
    )
    for record in records:
        writer.write(record)
    writer.close()
    return path


def test_array_records_of_examples_are_decoded(tmp_path: Path) -> None:
    tfrecords = (EXAMPLES / "a.tfrecord").read_bytes()
    size = int.from_bytes(tfrecords[:8], "little")
    written(tmp_path / "a.array_record", [tfrecords[12 : 12 + size]] * 2)
    index_folder(tmp_path)
    assert StreamingDataset(local=tmp_path)[1]["label"].tolist() == [0]
    index_folder(tmp_path, "array_record-bytes")
    assert StreamingDataset(local=tmp_path)[1] == {"record": tfrecords[12 : 12 + size]}


def test_other_files_are_no_array_records(tmp_path: Path) -> None:
    path = written(tmp_path / "a.array_record", [b"x"])
    for data in (b"", b"x", bytes(1 << 17), path.read_bytes()[:-1]):
        path.write_bytes(data)
        with pytest.raises(
            ShardCorruptError, match=r"a.array_record: it is not an ArrayRecord file: .* close its writer"
        ):
            index_folder(tmp_path)
