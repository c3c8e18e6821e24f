"""A dataset as users hold it: samples by number, several streams, torch's own loaders, clear errors."""

from __future__ import annotations

import json
import os
import pickle
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.utils.data
from shard_server import ShardServer
from shardsets import numbers

from penstock.data.loading.streaming_loader import StreamingLoader
from penstock.data.streaming_dataset import StreamingDataset
from penstock.data.streams import Stream
from penstock.data.synthetic_dataset import SyntheticDataset
from penstock.data.writing.writers import MDSWriter
from penstock.proto.errors import DatasetError, InvalidArgumentError, ShardCorruptError, ShardUnavailableError


def read(loader: StreamingLoader) -> list[list[int]]:
    return [[sample["number"] for sample in batch] for batch in loader]


def test_samples_by_number(dataset: StreamingDataset) -> None:
    assert len(dataset) == 100
    assert [dataset[at]["number"] for at in (0, 9, 10, 99, -1, -100)] == [0, 9, 10, 99, 99, 0]
    assert dataset[np.int64(7)] == {"number": 7}
    for at in (100, -101):
        with pytest.raises(IndexError, match=f"below 100, got {at}"):
            dataset[at]


@pytest.mark.parametrize(
    "index",
    [
        slice(8, 23, 7),
        slice(None, None, -1),
        slice(-300, 4),
        [],
        [3, 55, 3, -1],
        torch.tensor([4, 99]),
        np.arange(100) % 30 == 9,
    ],
    ids=str,
)
def test_several_samples_like_a_lists(dataset: StreamingDataset, index: Any) -> None:
    numbers = list(range(100))
    expected = (
        numbers[index]
        if isinstance(index, slice)
        else np.array(numbers)[np.asarray(index, None if len(index) else int)].tolist()
    )
    for found in (dataset[index], SyntheticDataset(lambda number, generator: {"number": number}, 100)[index]):
        assert found == [{"number": number} for number in expected]


def test_wrong_numbers_of_several_are_refused(dataset: StreamingDataset) -> None:
    for index, error, words in (
        ([0, 100], IndexError, "below 100, got 100"),
        ([True, False], IndexError, "100 entries, got 2"),
        ([1.0], TypeError, "float"),
        ("3", TypeError, "str"),
        ((1, 2), TypeError, "tuple"),
    ):
        with pytest.raises(error, match=words):
            dataset[index]


def test_splits_are_folders(tmp_path: Path) -> None:
    numbers(tmp_path / "train", 20)
    numbers(tmp_path / "val", 10, first=500)
    assert StreamingDataset(tmp_path, split="val")[3] == {"number": 503}
    assert len(StreamingDataset(local=tmp_path, split="train")) == 20
    with pytest.raises(ShardUnavailableError, match=f"{tmp_path}/test"):
        StreamingDataset(str(tmp_path), split="test")
    for split in ("../elsewhere", "/etc"):
        with pytest.raises(InvalidArgumentError, match="path of a subfolder"):
            StreamingDataset(str(tmp_path), split=split)


@pytest.fixture
def three(tmp_path: Path) -> list[Path]:
    """100, 50 and 10 numbers, from 0, 1000 and 2000."""
    return [numbers(tmp_path / str(first), count, first) for first, count in ((0, 100), (1000, 50), (2000, 10))]


@pytest.mark.parametrize(
    ("name", "values", "epoch_size", "shares"),
    [
        ("proportion", (1, 1, 2), None, [40, 40, 80]),
        ("proportion", (0.5, 0.25, 0.25), 1000, [500, 250, 250]),
        ("proportion", (1, 1, 1), 100, [34, 33, 33]),
        ("repeat", (1, 0.5, 3), None, [100, 25, 30]),
        ("choose", (5, 0, 25), None, [5, 0, 25]),
        ("split", (None, None, None), 16, [10, 5, 1]),
    ],
)
def test_streams_are_mixed_by_their_shares(
    three: list[Path], name: str, values: Any, epoch_size: int | None, shares: list[int]
) -> None:
    streams = [Stream(local=path, **{name: value}) for path, value in zip(three, values, strict=True)]
    dataset = StreamingDataset(streams=streams)
    assert dataset.shares(epoch_size) == shares
    loader = StreamingLoader(dataset, batch_size=4, shuffle=True, epoch_size=epoch_size, collate_fn=list)
    for _ in range(2):
        rows = [number for batch in read(loader) for number in batch]
        assert np.bincount([number // 1000 for number in rows], minlength=3).tolist() == shares


def test_arguments_that_cannot_be_meant(hundred: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="needs either streams, or"):
        StreamingDataset()
    with pytest.raises(InvalidArgumentError, match="must be left out with streams"):
        StreamingDataset(streams=[Stream(local=hundred)], split="train")
    dataset = StreamingDataset(streams=[Stream(local=hundred, repeat=2)])
    with pytest.raises(InvalidArgumentError, match="epoch_size must be None with streams that give repeat or choose"):
        dataset.shares(5)
    with pytest.raises(InvalidArgumentError, match="must have a proportion above 0"):
        StreamingDataset(streams=[Stream(local=hundred, proportion=0)]).shares()


def test_what_is_no_dataset_is_named(tmp_path: Path) -> None:
    with pytest.raises(ShardUnavailableError, match=f"{tmp_path}/nothing must be a dataset"):
        StreamingDataset(local=tmp_path / "nothing")
    for content, says in (("{", "the index is invalid"), ('{"version": 2, "shards": []}', "lists no samples")):
        (tmp_path / "index.json").write_text(content)
        with pytest.raises(DatasetError, match=f"{tmp_path}.*{says}"):
            StreamingDataset(local=tmp_path)


def test_web_split_is_quoted_and_keeps_the_query(tmp_path: Path) -> None:
    name = "a b%20c#d?e"
    numbers(tmp_path / "web" / name, 20)
    with (
        ShardServer(tmp_path / "web") as server,
        closing(StreamingDataset(f"{server.url}?token=1", tmp_path / "cache", split=name)) as dataset,
    ):
        assert dataset[13] == {"number": 13}


def test_a_local_folder_may_be_below_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    numbers(tmp_path / "train", 20)
    assert len(StreamingDataset(local="~/train")) == 20
    with ShardServer(tmp_path) as server, closing(StreamingDataset(server.url, "~/cache", split="train")) as dataset:
        assert dataset[3] == {"number": 3}
    assert not (tmp_path / "~").exists()
    assert (tmp_path / "cache" / "train" / "index.json").exists()


def test_a_stream_without_samples_has_no_share(tmp_path: Path, hundred: Path) -> None:
    weight: dict[str, Any] = {"proportion": 0.5}
    numbers(tmp_path / "none", 0)
    with pytest.raises(DatasetError, match=f"{tmp_path}/none: the index lists no samples"):
        StreamingDataset(streams=[Stream(local=hundred, **weight), Stream(local=tmp_path / "none", **weight)])
    nothing: dict[str, Any] = dict.fromkeys(weight, 0)
    dataset = StreamingDataset(streams=[Stream(local=hundred, **weight), Stream(local=tmp_path / "none", **nothing)])
    assert len(list(StreamingLoader(dataset, batch_size=10))) > 0


def test_settings_of_one_stream(bucket: str, tmp_path: Path) -> None:
    with MDSWriter(bucket, {"n": "int"}, size_limit=200, compression="zstd", hashes=["sha1"]) as writer:
        for number in range(100):
            writer.write({"n": number})
    checked = Stream(bucket, tmp_path / "checked", validate_hash="xxh64")
    with closing(StreamingDataset(streams=[Stream(bucket, tmp_path / "plain"), checked])) as dataset:
        assert dataset[50]["n"] == 50
        with pytest.raises(DatasetError, match=r"validate_hash='xxh64' needs this hash .* got sha1"):
            dataset[150]


@pytest.mark.parametrize("at", [0, -1])
def test_damaged_web_shard_names_address_and_file(tmp_path: Path, at: int) -> None:
    """Read a shard that cannot be opened (its count is wrong), and one with a sample that cannot be read (it is not
    UTF-8)."""
    web, cache = tmp_path / "web", tmp_path / "cache"
    with MDSWriter(web, {"text": "str"}) as writer:
        writer.write({"text": "one"})
    path = web / "shard.00000.mds"
    good = path.read_bytes()
    damaged = bytearray(good)
    damaged[at] ^= 0xFF
    path.write_bytes(damaged)
    with ShardServer(web) as server, closing(StreamingDataset(server.url, cache)) as dataset:
        with pytest.raises(ShardCorruptError) as caught:
            dataset[0]
        assert str(caught.value).startswith(
            f"{server.url}/{path.name} ({cache / path.name}: remove it to have it fetch"
        )
        path.write_bytes(good)
        (cache / path.name).unlink()
        dataset.close()
        with closing(StreamingDataset(server.url, cache)) as again:
            assert again[0] == {"text": "one"}


def end_of_shard(dataset: StreamingDataset, at: int) -> int:
    return int(next(end for end in np.cumsum(dataset.sizes[0]) if end > at))


def read_until_error(dataset: StreamingDataset, start: int) -> tuple[list[int], str]:
    rows = []
    try:
        for at in range(start, 100):
            rows.append(dataset[at]["number"])
    except DatasetError as error:
        return rows, str(error)
    return rows, ""


@pytest.mark.parametrize("validate", [None, False])
def test_rewritten_dataset_is_never_mixed(tmp_path: Path, validate: Any) -> None:
    """Detect a dataset from the web that was rewritten with the same sizes by the hashes of its index, unless
    validate_hash=False."""
    numbers(tmp_path / "web", 100, 0, hashes=["sha1", "xxh64"], exist_ok=True)
    with (
        ShardServer(tmp_path / "web") as server,
        closing(StreamingDataset(server.url, tmp_path / "cache", validate_hash=validate)) as dataset,
    ):
        assert [dataset[at]["number"] for at in range(35)] == list(range(35))
        numbers(tmp_path / "web", 100, 5000, hashes=["sha1", "xxh64"], exist_ok=True)
        rows, error = read_until_error(dataset, 35)
        end = end_of_shard(dataset, 34)
    if validate is False:
        assert rows == [*range(35, end), *range(5000 + end, 5100)]
    else:
        assert rows == list(range(35, end))
        assert "/cache/shard.00004.mds) is damaged: its xxh64" in error
        assert "if the dataset was written again since its index was fetched, use another cache folder" in error


@pytest.mark.parametrize("moment", ["while", "next run"])
def test_rewritten_without_hashes_is_never_mixed(tmp_path: Path, moment: str) -> None:
    """Detect a dataset on the web that was rewritten with the same sizes, and so the same index, by the index's age,
    also in a later process."""
    web, cache = tmp_path / "web", tmp_path / "cache"
    numbers(web, 100, 0, exist_ok=True)
    os.utime(web / "index.json", (1, 1))
    with ShardServer(web) as server, closing(StreamingDataset(server.url, cache)) as dataset:
        assert [dataset[at]["number"] for at in range(35)] == list(range(35))
        before = (web / "index.json").read_bytes()
        numbers(web, 100, 5000, exist_ok=True)
        assert (web / "index.json").read_bytes() == before
        if moment == "while":
            (web / "index.json").unlink()
        end = end_of_shard(dataset, 34)
        start = 35 if moment != "next run" else 0
        with closing(StreamingDataset(server.url, cache)) as later:
            rows, error = read_until_error(later if moment == "next run" else dataset, start)
        assert rows == list(range(start, end))
        assert re.search(r"/index.json was (written again|removed) since it was fetched into .*/cache, and", error)


@pytest.mark.parametrize(("hashes", "moment"), [([], "while"), (["sha1"], "after")])
def test_rewritten_folder_is_never_mixed(tmp_path: Path, hashes: list[str], moment: str) -> None:
    numbers(tmp_path, 100, 0, hashes=hashes, exist_ok=True)
    with closing(StreamingDataset(local=tmp_path)) as dataset:
        again = pickle.loads(pickle.dumps(dataset))
        assert [dataset[at]["number"] for at in range(35)] == list(range(35))
        numbers(tmp_path, 100, 5000, hashes=hashes, exist_ok=True)
        if moment == "while":
            (tmp_path / "index.json").unlink()
        end = end_of_shard(dataset, 34)
        for each, start in ((dataset, 35), (again, end)):
            rows, error = read_until_error(each, start)
            assert rows == list(range(start, end))
            assert re.search(r"was (written again|removed) since the dataset was opened", error)
        again.close()


def test_index_rewritten_unchanged_has_no_effect(tmp_path: Path) -> None:
    """Rewrite the index as workers do that each index the same files."""
    numbers(tmp_path, 100, 0, exist_ok=True)
    with closing(StreamingDataset(local=tmp_path)) as dataset:
        for at in (0, 50, 99):
            content = (tmp_path / "index.json").read_bytes()
            (tmp_path / "index.json").unlink()
            (tmp_path / "index.json").write_bytes(content)
            assert dataset[at] == {"number": at}


def test_other_data_have_another_fingerprint(tmp_path: Path, hundred: Path) -> None:
    same = StreamingDataset(local=numbers(tmp_path / "same", 100)).fingerprint
    assert StreamingDataset(local=hundred).fingerprint == same
    assert StreamingDataset(local=numbers(tmp_path / "other", 101)).fingerprint != same
    index = json.loads((hundred / "index.json").read_text())
    index["shards"][0]["samples"] += 1
    (tmp_path / "index.json").write_text(json.dumps(index))
    assert StreamingDataset(local=tmp_path).fingerprint != same


def test_shards_are_closed_when_there_are_many(dataset: StreamingDataset) -> None:
    dataset._open.most = 2
    before = len(os.listdir("/proc/self/fd"))
    for at in range(0, 100, 10):
        assert dataset[at] == {"number": at}
        assert len(dataset._open) <= 2
        assert len(os.listdir("/proc/self/fd")) <= before + 2


def test_a_shard_closed_by_another_thread_is_read(
    dataset: StreamingDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel gives its descriptor's number to the next file that is opened."""
    others = []
    pread = os.pread

    def close_and_open(number: int, size: int, begin: int) -> bytes:
        dataset._open.clear()
        others.append(os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT))
        os.pwrite(others[-1], b"x" * 4096, 0)
        return pread(number, size, begin)

    assert dataset[3] == {"number": 3}
    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", close_and_open)
        assert dataset[4] == {"number": 4}
    for other in others:
        os.close(other)
