"""Conversion of datasets: values, order and states, kills and errors."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pyarrow
import pyarrow.parquet
import pytest
from all_workers import AllWorkers, saved
from archives import archive
from conversions import rows_in, to_mds, to_parquet
from format_folders import FOLDERS
from shardsets import numbers

from penstock.data import (
    MDSWriter,
    Stream,
    StreamingDataset,
    StreamingLoader,
    convert_dataset,
    index_folder,
    index_parquet,
    merge_index,
)
from penstock.data.converting import convert, target_columns
from penstock.data.formats.index import INDEX, read_index, write_index
from penstock.proto.errors import (
    DatasetError,
    InvalidArgumentError,
    ShardUnavailableError,
    StateMismatchError,
)


def listed(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row that == compares."""
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in row.items()}


@pytest.mark.parametrize("name", ["arrow, compressed", "megatron"])
def test_parquet_has_the_same_values(name: str, tmp_path: Path) -> None:
    (tmp_path / "from").mkdir()
    samples = FOLDERS[name](tmp_path / "from")
    done = to_parquet(tmp_path / "from", tmp_path / "to")
    assert done.samples == len(samples)
    with closing(StreamingDataset(str(tmp_path / "to"))) as dataset:
        assert [listed(row) for row in dataset[:]] == [listed(row) for row in samples]


def test_mds_has_values_or_their_json(tmp_path: Path) -> None:
    """JSON stands for what MDS has no encoding for: missing values, bools, lists, arrays that may be empty."""
    (tmp_path / "from").mkdir()
    samples = FOLDERS["arrow"](tmp_path / "from")
    done = to_mds(tmp_path / "from", tmp_path / "to", compression="zstd")
    assert done.columns == {
        **dict.fromkeys(("tokens", "text", "flag", "nested"), "json"),
        "raw": "bytes",
        "number": "float64",
        "when": "str",
    }
    with closing(StreamingDataset(str(tmp_path / "to"), tmp_path / "cache")) as dataset:
        for found, sample in zip(dataset[:], samples, strict=True):
            tokens = sample["tokens"]
            assert found == {
                **sample,
                "tokens": tokens if tokens is None else tokens.tolist(),
                "when": sample["when"].isoformat(),
            }


def jpeg(value: int) -> bytes:
    made = io.BytesIO()
    PIL.Image.new("RGB", (8, 8), (value, 0, 0)).save(made, "JPEG")
    return made.getvalue()


def test_images_stay_their_files(tmp_path: Path) -> None:
    """Through a tar, MDS, Parquet and MDS again; an image of a reader at the end has the first one's pixels."""
    (tmp_path / "tar").mkdir()
    archive(tmp_path / "tar" / "a.tar", [(f"{number}.jpg", jpeg(number)) for number in range(5)])
    index_folder(tmp_path / "tar")
    assert to_mds(tmp_path / "tar", tmp_path / "mds").columns["jpg"] == "jpeg"
    to_parquet(tmp_path / "mds", tmp_path / "parquet")
    assert [row["jpg"] for row in rows_in(tmp_path / "parquet")] == [jpeg(number) for number in range(5)]
    to_mds(tmp_path / "parquet", tmp_path / "again", types={"jpg": "jpeg"})
    for folder in ("mds", "again"):
        with closing(StreamingDataset(str(tmp_path / folder))) as dataset:
            image = dataset[3]["jpg"]
            assert image.tobytes() == PIL.Image.open(io.BytesIO(jpeg(3))).tobytes()


def test_mds_is_copied_as_it_is_stored(tmp_path: Path) -> None:
    """Pickles are not loaded, and nothing is encoded anew."""
    columns = {"pkl": "pkl", "png": "png", "small": "uint8", "array": "ndarray:int16:2", "text": "str"}
    with MDSWriter(tmp_path / "from", columns, size_limit=2000) as writer:
        for number in range(9):
            writer.write(
                {
                    "pkl": b"no pickle",
                    "png": b"no image",
                    "small": number,
                    "array": np.zeros(2, np.int16),
                    "text": "x" * 300,
                }
            )
    to_mds(tmp_path / "from", tmp_path / "to", columns=["pkl", "png", "small", "text"], hashes=[], size_limit=1 << 20)
    read = {"pkl": "bytes", "png": "bytes", "small": "uint8", "text": "str"}
    index = (tmp_path / "to" / INDEX).read_text()
    (tmp_path / "to" / INDEX).write_text(index.replace('"pkl", "png", "uint8"', '"bytes", "bytes", "uint8"'))
    assert [row["small"] for row in rows_in(tmp_path / "to")] == [("|u1", number) for number in range(9)]
    assert rows_in(tmp_path / "to")[0].keys() == read.keys()
    assert rows_in(tmp_path / "to")[5]["pkl"] == b"no pickle"


def test_values_that_would_change_are_refused(tmp_path: Path) -> None:
    """A sample that is unlike those that were looked at is named, and so is the remedy."""
    rows = [{"a": 1, "b": {"x": 1}} for _ in range(100)]
    rows[77] = {"a": None, "b": {"x": 1, "y": 2}}
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    index_folder(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convert, "SAMPLED_ROWS", 4)
        with pytest.raises(DatasetError, match=r"samples 0 to 99: .*sample 77, column 'a', 'int': .*{'a': 'json'}"):
            to_mds(tmp_path, tmp_path / "mds")
        with pytest.raises(
            DatasetError, match=r"its reader|does not hold all of its values.*types={'NAME': 'json'} .--as NAME=json"
        ):
            to_parquet(tmp_path, tmp_path / "parquet")
        to_mds(tmp_path, tmp_path / "mds2", types={"a": "json"})
        to_parquet(tmp_path, tmp_path / "parquet2", types={"b": "json"})
    assert rows_in(tmp_path / "mds2") == rows
    assert rows_in(tmp_path / "parquet2")[77] == {"a": None, "b": json.dumps(rows[77]["b"])}


@pytest.mark.parametrize(
    ("change", "value"),
    [("float", 2**53 + 1), ("only", [b"a", b"b"]), ("time", "noon"), ("file", {"bytes": None})],
)
def test_values_unlike_the_sampled_ones_are_named(change: str, value: Any) -> None:
    with pytest.raises(DatasetError, match="sample 300 of the shard, column 'a': all values must be "):
        target_columns.stored_row({"a": value}, [target_columns.TargetColumn("a", "", change)], 300)


# ---- order and states


def mds(folder: Path) -> None:
    numbers(folder, 100)


def parquet(folder: Path) -> None:
    """Files with row groups of several sizes."""
    for name, begin, end in (("a", 0, 37), ("b", 37, 100)):
        table = pyarrow.table({"number": pyarrow.array(range(begin, end))})
        folder.mkdir(exist_ok=True)
        pyarrow.parquet.write_table(table, folder / f"{name}.parquet", row_group_size=9)
    index_parquet(folder)


@pytest.mark.parametrize(("write", "to"), [(mds, "parquet"), (parquet, "mds")])
def test_state_goes_on_over_the_result(write: Callable[[Path], None], to: str, tmp_path: Path) -> None:
    """Through topologies, over the source and the result by turns, with another dataset beside it."""
    write(tmp_path / "from")
    numbers(tmp_path / "other", 40, first=500)
    convert_dataset(tmp_path / "from", tmp_path / "to", to, processes=1, size_limit=400)
    assert rows_in(tmp_path / "to") == [{"number": number} for number in range(100)]

    def made(folder: str) -> Callable[[], StreamingLoader]:
        def make() -> StreamingLoader:
            streams = [Stream(local=tmp_path / folder), Stream(local=tmp_path / "other")]
            return StreamingLoader(
                StreamingDataset(streams=streams), global_batch_size=6, shuffle=True, shuffle_block=30, collate_fn=list
            )

        return make

    whole = AllWorkers(made("from"), (1, 1)).take(25)  # an epoch, and the beginning of another
    got, fleet = [], None
    for folder, topology, steps in (("from", (1, 2), 7), ("to", (2, 1), 6), ("from", (1, 1), 5), ("to", (1, 1), 7)):
        fleet = AllWorkers(made(folder), topology, fleet)
        got += fleet.take(steps)
    assert got == whole
    key = StreamingLoader(StreamingDataset(tmp_path / "from"), batch_size=1, shuffle=True, keys="key")
    sample = next(iter(key))
    again = StreamingLoader(StreamingDataset(tmp_path / "to"), batch_size=1, shuffle=True)
    assert again.restore_sample(sample["key"][0])["number"] == int(sample["number"][0])


def test_own_order_refuses_the_sources_states(tmp_path: Path) -> None:
    mds(tmp_path / "from")
    to_parquet(tmp_path / "from", tmp_path / "to", keep_order=False)
    state = StreamingLoader(StreamingDataset(tmp_path / "from"), batch_size=3).state_dict()
    with pytest.raises(StateMismatchError, match="data was"):
        StreamingLoader(StreamingDataset(tmp_path / "to"), batch_size=3).load_state_dict(saved(state))
    to_parquet(tmp_path / "from", tmp_path / "kept")
    for folder, keep_order in (("to", True), ("kept", False)):
        with pytest.raises(DatasetError, match="must be empty, but it has a dataset"):
            to_parquet(tmp_path / "from", tmp_path / folder, keep_order=keep_order)


def test_result_can_be_converted_and_merged(tmp_path: Path) -> None:
    """A second conversion keeps the first source's order; a merged index is other data."""
    parquet(tmp_path / "a")
    to_mds(tmp_path / "a", tmp_path / "all" / "b")
    to_parquet(tmp_path / "all" / "b", tmp_path / "c")
    first, last = (StreamingDataset(tmp_path / name) for name in ("a", "c"))
    assert first.fingerprint == last.fingerprint
    merge_index(tmp_path / "all")
    assert StreamingDataset(tmp_path / "all").fingerprint != first.fingerprint
    index = tmp_path / "all" / "b" / INDEX
    index.write_bytes(write_index(read_index(index.read_bytes(), "b"), {}))  # the same files, in their own order
    with pytest.raises(DatasetError, match="must be empty, but it has a dataset"):
        to_parquet(tmp_path / "all" / "b", tmp_path / "c")


def test_damaged_notes_are_refused(tmp_path: Path) -> None:
    mds(tmp_path / "from")
    to_mds(tmp_path / "from", tmp_path / "to")
    index = (tmp_path / "to" / INDEX).read_text()
    (tmp_path / "to" / INDEX).write_text(index.replace('"units": [10,', '"units": [11,'))
    with pytest.raises(
        DatasetError, match=r"penstock\.order in the index is invalid: .* samples in all, got .* Convert again"
    ):
        StreamingDataset(tmp_path / "to")


# ---- arguments and types


def test_arguments_that_do_not_fit(tmp_path: Path) -> None:
    numbers(tmp_path / "from", 30)
    for settings, words in (
        ({"columns": ["none"]}, "columns must be some of number, each once, got none"),
        ({"types": {"none": "int"}}, r"types \(--as\) must be some of number, each once, got none"),
        ({"types": {"number": "integer"}}, r"types \(--as\): column 'number': the encoding must be one of"),
        ({"processes": 0}, "processes must be at least 1"),
        ({"size_limit": "much"}, "size_limit must be"),
    ):
        with pytest.raises(InvalidArgumentError, match=words):
            to_mds(tmp_path / "from", tmp_path / "to", **settings)
    for settings, words in (
        ({"compression": "zstd:3"}, "compression must be one of .*, got 'zstd:3'"),
        ({"hashes": ["xxh64"]}, "hashes must be left out for Parquet, whose pages have checksums, got xxh64"),
        ({"types": {"number": "integer"}}, r"types \(--as\): column 'number': the type must be json or one of Arrow's"),
    ):
        with pytest.raises(InvalidArgumentError, match=words):
            to_parquet(tmp_path / "from", tmp_path / "to", **settings)
    (tmp_path / "file").write_text("text")
    with pytest.raises(ShardUnavailableError, match=r"file must be a dataset's folder, got a file\. Give the folder"):
        to_mds(tmp_path / "file", tmp_path / "to")
    with pytest.raises(InvalidArgumentError, match="to must be one of mds, parquet, got 'csv'"):
        convert_dataset(tmp_path / "from", tmp_path / "to", "csv")
    assert not (tmp_path / "to").exists()


def test_types_of_parquet_are_kept(tmp_path: Path) -> None:
    """Also those that the samples that are looked at do not show."""
    columns = {
        "small": pyarrow.array([1, None, 3], pyarrow.int8()),
        "large": pyarrow.array([1 << 63, 1, 2], pyarrow.uint64()),
        "cents": pyarrow.array([1, 2, 3], pyarrow.decimal128(12, 4)),
        "nothing": pyarrow.array([None] * 3, pyarrow.list_(pyarrow.int16())),
        "map": pyarrow.array([[("a", 1)]] * 3, pyarrow.map_(pyarrow.string(), pyarrow.int64())),
        "time": pyarrow.array([1, 2, None], pyarrow.timestamp("ns")),
        "span": pyarrow.array([1, 2, 3], pyarrow.duration("ns")),
        "words": pyarrow.array(["a", "b", "a"]).dictionary_encode(),
    }
    table = pyarrow.table(columns)
    (tmp_path / "from").mkdir()
    pyarrow.parquet.write_table(table, tmp_path / "from" / "a.parquet", row_group_size=1)
    index_parquet(tmp_path / "from")
    assert to_parquet(tmp_path / "from", tmp_path / "to").parts == 1
    made = pyarrow.parquet.read_table(tmp_path / "to" / "part-000000" / "shard.00000.parquet")
    assert made == table.set_column(7, "words", columns["words"].cast(pyarrow.string()))
    with pytest.raises(DatasetError, match="column 'span' must have values that MDS can store, got timedelta64"):
        to_mds(tmp_path / "from", tmp_path / "mds")
    assert to_mds(tmp_path / "from", tmp_path / "mds", columns=["time"]).columns == {"time": "json"}
    assert [row["time"] for row in rows_in(tmp_path / "mds")] == [
        "1970-01-01T00:00:00.000000001",
        "1970-01-01T00:00:00.000000002",
        None,
    ]
