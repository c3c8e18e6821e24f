"""Large indexes: columns say what the parsed index says, one process makes them, no damaged file is believed."""

from __future__ import annotations

import json
import multiprocessing
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from penstock.data import StreamingDataset
from penstock.data.formats.descriptors import Descriptor
from penstock.data.formats.index import read_index
from penstock.data.indexes import index_entries, open_index
from penstock.proto.errors import DatasetError

MDS = Path(__file__).parents[1] / "data" / "mds" / "packed-zstd" / "index.json"


@pytest.fixture
def columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder for columns. Every index counts as large."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(open_index, "LARGE_INDEX", 0)
    monkeypatch.setattr(index_entries, "PIECE", 7)
    return tmp_path / "home" / "penstock" / "indexes"


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


def test_columns_say_what_the_index_says(columns: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "data", entries(), note=[1, {"shards": "x" * 50}])
    stored = StreamingDataset(local=folder)
    assert [path.suffix for path in columns.iterdir()] == [".columns"]
    expected = read_index((folder / "index.json").read_bytes(), "")
    monkeypatch.setattr(open_index, "LARGE_INDEX", 1 << 20)
    listed = StreamingDataset(local=folder)
    assert stored.fingerprint == listed.fingerprint
    assert stored.sample_bytes == listed.sample_bytes
    for first, second in ((stored, listed), (stored, pickle.loads(pickle.dumps(stored)))):
        assert list(first._tables[0]) == list(second._tables[0]) == expected
        assert first._tables[0].facts == second._tables[0].facts
        for one, other in zip(
            [*first.sizes, *(first.files or ())], [*second.sizes, *(second.files or ())], strict=True
        ):
            np.testing.assert_array_equal(one, other)
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


def test_damaged_columns_are_made_again(columns: Path, tmp_path: Path) -> None:
    folder = write(tmp_path / "data", entries())
    fingerprint = StreamingDataset(local=folder).fingerprint
    (path,) = columns.iterdir()
    good = path.read_bytes()
    flipped = bytearray(good)
    flipped[len(good) // 2] ^= 1
    for bad in (b"", good[:100], good[:-8], bytes(flipped), b"1" + good[1:], bytes(len(good))):
        path.write_bytes(bad)
        assert StreamingDataset(local=folder).fingerprint == fingerprint
        assert path.read_bytes() == good
        assert list(columns.iterdir()) == [path]


def test_an_unwritable_folder_is_no_obstacle(columns: Path, tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file")
    folder = write(tmp_path / "data", entries())
    stored = StreamingDataset(local=folder)
    assert len(list(stored._tables[0])) == len(entries())
    assert pickle.loads(pickle.dumps(stored)).fingerprint == stored.fingerprint


def test_another_index_is_not_read_by_old_columns(columns: Path, tmp_path: Path) -> None:
    folder = write(tmp_path / "data", entries())
    stored = StreamingDataset(local=folder)
    copy = pickle.dumps(stored)
    write(folder, entries()[1:])
    assert len(StreamingDataset(local=folder)._tables[0]) == len(entries()) - 1
    with pytest.raises(DatasetError, match="was written again since the dataset was opened"):
        stored._tables[0][len(entries()) - 1]
    with pytest.raises(DatasetError, match="was written again since the dataset was opened"):
        pickle.loads(copy)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "must be a JSON object"),
        ("[]", "must be a JSON object"),
        ('{"version": 2}', "shards is missing"),
        ('{"shards": []}', "version is missing"),
        ('{"version": 3, "shards": []}', "version must be 2, got 3"),
        ('{"version": 2, "shards": 7}', "shards must be a list, got int"),
        ('{"version": 2, "shards": [], "a": NaN}', "is not JSON"),
        ('{"version": 2, "shards": [] "a": 1}', "is not JSON"),
        ('{"version": 2, "shards": [{"a": "bbbbbbbbbbbbbb', "is not JSON"),
        ('{"version": 2, "shards": [1]}', "shard 0: its entry must be an object"),
        ('{"version": 2, "shards": []} 1', "is not JSON"),
        ('{"version": 2, "shards": [], "shards": []}', "shards must be given once"),
        ('{"version": 2, "a": ' + "[" * 100_000, "is not JSON"),
    ],
)
def test_what_is_no_index_is_refused(columns: Path, tmp_path: Path, text: str, words: str) -> None:
    write(tmp_path / "data", [])
    (tmp_path / "data" / "index.json").write_text(text)
    with pytest.raises(DatasetError, match=rf"data: .*{words}"):
        StreamingDataset(local=tmp_path / "data")
    assert not list(columns.iterdir())


def test_a_name_with_two_meanings_is_refused(columns: Path, tmp_path: Path) -> None:
    given = entries()
    changed = json.loads(json.dumps(given[0]))
    changed["raw_data"]["bytes"] += 1
    StreamingDataset(local=write(tmp_path / "same", [*given, given[0]]))
    with pytest.raises(DatasetError, match=f"shard {len(given)}: raw_data.basename is .* another size or hash"):
        StreamingDataset(local=write(tmp_path / "data", [*given, changed]))


def _open(folder: Path, made: Any, found: Any) -> None:
    write_columns = vars(open_index)["write_columns"]

    def counted(index: Descriptor, *others: Any) -> str:
        made.put(1)
        return str(write_columns(index, *others))

    vars(open_index)["write_columns"] = counted
    found.put(StreamingDataset(local=folder).fingerprint)


def test_one_process_makes_the_columns(columns: Path, tmp_path: Path) -> None:
    folder = write(tmp_path / "data", entries() * 20)
    context = multiprocessing.get_context("fork")
    made, found = context.Queue(), context.Queue()
    processes = [context.Process(target=_open, args=(folder, made, found)) for _ in range(4)]
    for process in processes:
        process.start()
    assert len({found.get(timeout=120) for _ in processes}) == 1
    for process in processes:
        process.join(120)
    made.get(timeout=60)
    assert made.empty()
