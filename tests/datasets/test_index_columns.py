"""Large indexes: columns say what the parsed index says."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from shard_server import ShardServer
from shardsets import numbers

from penstock.data import MDSWriter, StreamingDataset
from penstock.data.formats.index import read_index, write_index
from penstock.data.formats.records.energon_folder import prepared_note
from penstock.data.indexes import open_index, shard_table
from penstock.data.remote import folders
from penstock.proto.errors import DatasetError, InvalidArgumentError

MDS = Path(__file__).parents[1] / "data" / "mds" / "packed-zstd" / "index.json"


@pytest.fixture(autouse=True)
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every index counts as large."""
    monkeypatch.setattr(open_index, "LARGE_INDEX", 0)
    monkeypatch.setattr(shard_table, "AT_ONCE", 2)


def entries() -> list[dict[str, Any]]:
    """Return entries of shards with and without hashes, blocks and names beyond ASCII."""
    given = json.loads(MDS.read_text())["shards"]
    for number, blocks in enumerate(([3, 4], [5, 1, 0])):
        raw = {"basename": f"ü/é{number}.parquet", "bytes": 1 << 22, "hashes": {}}
        ranges = [place for block in range(len(blocks)) for place in (block * 99, block * 99 + 9)]
        parquet: dict[str, Any] = {"version": 2, "format": "parquet", "samples": sum(blocks), "raw_data": raw}
        given.append({**parquet, "blocks": blocks, "decoded_bytes": 70, "ranges": [*ranges, 1 << 21]})
    return [*given]


def write(folder: Path, shards: list[Any], **more: Any) -> Path:
    folder.mkdir(exist_ok=True)
    text = json.dumps({"shards": shards, "version": 2, **more}, indent=1, ensure_ascii=False)
    (folder / "index.json").write_text(text)
    return folder


def test_columns_say_what_the_index_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "data", entries(), note=[1, {"shards": "x" * 50}])
    stored = StreamingDataset(local=folder)
    expected = read_index((folder / "index.json").read_bytes(), "")
    monkeypatch.setattr(open_index, "LARGE_INDEX", 1 << 20)
    listed = StreamingDataset(local=folder)
    assert stored.fingerprint == listed.fingerprint
    assert stored.sample_bytes == listed.sample_bytes
    for first, second in ((stored, listed), (stored, pickle.loads(pickle.dumps(stored)))):
        assert list(first._tables[0]) == list(second._tables[0]) == expected
        assert first._tables[0].facts == second._tables[0].facts
        for one, other in zip(first.layouts, second.layouts, strict=True):
            np.testing.assert_array_equal(one.units, other.units)
            np.testing.assert_array_equal(one.files, other.files)
        assert [first._units.file(n) for n in range(len(expected))] == [
            second._units.file(n) for n in range(len(expected))
        ]
    # the fingerprint that states of earlier versions have
    digest = xxhash.xxh3_128(f"stream of {len(expected)}\n".encode())
    for shard in expected:
        files = [(file.raw.name, file.raw.size, sorted(file.raw.hashes.items())) for file in shard.files]
        digest.update(f"{shard.format} {shard.samples} {files}\n".encode())
        if shard.blocks:
            digest.update(f"blocks {shard.blocks} of {shard.decoded_bytes} bytes\n".encode())
    assert stored.fingerprint == digest.hexdigest()


def test_another_index_is_not_read_by_old_columns(tmp_path: Path) -> None:
    folder = write(tmp_path / "data", entries())
    stored = StreamingDataset(local=folder)
    copy = pickle.dumps(stored)
    write(folder, entries()[1:])
    assert len(StreamingDataset(local=folder)._tables[0]) == len(entries()) - 1
    with pytest.raises(DatasetError, match="was written again since the dataset was opened"):
        stored._tables[0][len(entries()) - 1]
    with pytest.raises(DatasetError, match="was written again since the dataset was opened"):
        pickle.loads(copy)


def test_readers_survive_the_first_version(tmp_path: Path) -> None:
    """A copy that another process opens after a writer appended to the dataset reads the same shards."""
    folder = numbers(tmp_path / "data", 40)
    stored = StreamingDataset(local=folder)
    with MDSWriter(str(folder), {"number": "int"}, append=True) as writer:
        writer.write({"number": 40})
    copied = pickle.loads(pickle.dumps(stored))
    for dataset in (stored, copied):
        assert [sample["number"] for sample in dataset[:]] == list(range(40))
    assert list(copied._tables[0]) == list(stored._tables[0])
    assert [len(StreamingDataset(local=folder, version=version)) for version in (1, 2, None)] == [40, 41, 41]


def test_an_index_may_be_larger_than_what_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = numbers(tmp_path / "data", 40)
    with MDSWriter(str(folder), {"number": "int"}, append=True) as writer:
        writer.write({"number": 40})
    monkeypatch.setattr(folders, "LARGEST_READ", 100)
    with ShardServer(folder) as server:
        for place in (server.url, f"file://{folder}", None):
            dataset = StreamingDataset(place, str(tmp_path / f"cache {place is None}") if place else folder)
            assert (dataset.versions, [sample["number"] for sample in dataset[:]]) == ([2], list(range(41)))
            dataset.close()


def test_a_split_is_taken_of_columns(tmp_path: Path) -> None:
    given = []
    for number, splits in enumerate((["a"], ["b"], ["a", "b"])):
        raw, meta = ({"basename": f"{number}.{end}", "bytes": 9, "hashes": {}} for end in ("tar", "tar.index"))
        tar = {"version": 2, "format": "webdataset", "samples": 1, "raw_data": raw, "raw_meta": meta}
        given.append({**tar, "splits": splits})
    folder = write(tmp_path / "data", given)
    (folder / ".nv-meta").mkdir()
    (folder / ".nv-meta" / "split.yaml").touch()
    index = folder / "index.json"
    index.write_bytes(write_index(read_index(index.read_bytes(), ""), prepared_note(folder)))
    for split, names in (("a", ["0.tar", "2.tar"]), ("b", ["1.tar", "2.tar"]), ("*", ["0.tar", "1.tar", "2.tar"])):
        dataset = StreamingDataset(local=folder, split=split)
        assert [shard.name for shard in dataset._tables[0]] == names
        assert pickle.loads(pickle.dumps(dataset)).fingerprint == dataset.fingerprint
    with pytest.raises(InvalidArgumentError, match="split must be one of a, b, got 'c'"):
        StreamingDataset(local=folder, split="c")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "the index is invalid"),
        ("[]", "the index is invalid: Expected `object`, got `array`"),
        ('{"version": 2}', "the index is invalid: Object missing required field `shards`"),
        ('{"version": 3, "shards": []}', "version must be 2, got 3"),
        ('{"version": 2, "shards": [], "a": NaN}', "the index is invalid"),
        ('{"version": 2, "shards": [] "a": 1}', "the index is invalid"),
        ('{"version": 2, "shards": [1]}', "shard 0: the entry is invalid: Expected `object`, got `int`"),
        ('{"version": 2, "shards": []} 1', "the index is invalid"),
        ('{"version": 2, "a": ' + "[" * 100_000, "the index is invalid"),
    ],
)
def test_what_is_no_index_is_refused(tmp_path: Path, text: str, words: str) -> None:
    write(tmp_path / "data", [])
    (tmp_path / "data" / "index.json").write_text(text)
    with pytest.raises(DatasetError, match=rf"data: .*{words}.*\. Fetch or write the index again"):
        StreamingDataset(local=tmp_path / "data")
