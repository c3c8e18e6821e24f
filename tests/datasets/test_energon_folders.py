"""Folders that Energon prepared, local and remote: splits of split.yaml, fields of dataset.yaml."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from prepared_folders import prepare, write_offsets_of_energon
from shard_server import ShardServer

from penstock.data import StreamingDataset, index_folder
from penstock.data.formats import file_ranges
from penstock.proto.errors import DatasetError, InvalidArgumentError, ShardCorruptError, ShardUnavailableError


def test_split_and_fields_are_read(tmp_path: Path) -> None:
    index_folder(prepare(tmp_path))
    train, val = (StreamingDataset(tmp_path, split=split) for split in ("train", "val"))
    assert [sample["first"] for sample in (train[n] for n in range(len(train)))] == [0, 1, 2, 3]
    assert [sample["caption"] for sample in (val[n] for n in range(len(val)))] == ["6", "7", "8", "9"]
    assert train[0] == {"__key__": "0", "caption": "0", "first": 0, "image": b"b0"}
    assert len(StreamingDataset(tmp_path, split="*")) == 8
    by_url = StreamingDataset(f"file://{tmp_path}", tmp_path / "cache", split="val")
    assert by_url[0] == val[0]
    for wrong in (None, "dev", "test"):
        with pytest.raises(InvalidArgumentError, match="split must be one of train, val, got"):
            StreamingDataset(tmp_path, split=wrong)


def test_code_in_folder_is_not_run(tmp_path: Path) -> None:
    prepare(tmp_path, dataset="sample_loader: 'sample_loader.py:sample_loader'\n")
    with pytest.warns(UserWarning, match=r"'sample_loader.py:sample_loader' .* is not run.* pass it: Mapped\("):
        index_folder(tmp_path)
    assert StreamingDataset(tmp_path, split="val")[0] == {"__key__": "6", "txt": "6", "bin": b"b6", "json": {"l": [6]}}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"splits": "split_parts: {train: [no.tar]}"}, "no.tar must be a file in the folder"),
        ({"splits": "split_parts: {train: ['../x.tar']}"}, "must be a file in the folder"),
        ({"splits": "split_parts: {train: ['{2..1}.tar']}"}, "braces must hold"),
        ({"splits": "split_parts: {train: [v.tar]}\nexclude: [v.tar/6]"}, "got the sample v.tar/6"),
        ({"splits": "split_parts: {train: ['{0..2047}{0..1023}.tar']}"}, "at most 128 MiB of names"),
        ({"splits": "split_parts: {train: [" + "'{0..99999}.tar', " * 20 + "]}"}, "at most 128 MiB of names"),
        ({"splits": f"split_parts: {{train: [v.tar]}}\nexclude: ['{{{'0' * 30}1..99}}']"}, "at most 128 MiB of names"),
        ({"splits": "split_parts: {train: ['" + "{a,b}" * 40 + "']}"}, "at most 128 MiB of names"),
        ({"splits": "a: &a [v.tar]\nsplit_parts: {train: *a}"}, r"alias \*a is not supported: write the value itself"),
        ({"splits": "split_parts: {<<: {train: [v.tar]}}"}, "merge .* is not supported: write the entries themselves"),
        ({"splits": "split_parts: [1]"}, "split_parts must list"),
        ({"splits": "split_parts: {train: [v.tar]}\nexclude: v.tar"}, "exclude must be a list of names, got 'v.tar'"),
        *(
            ({"splits": f"split_parts: {{train: [v.tar]}}\nexclude: {odd}"}, message)
            for odd, message in (
                ("!!bool x", r"tag tag:yaml.org,2002:bool is not supported: write the value without it"),
                ("!!int ''", "tag:yaml.org,2002:int is not supported"),
                ("!!timestamp x", "timestamp is not supported"),
                ("[! 1]", "the tag ! is not supported"),
                (f"1{':59' * 20_000}.5", "exclude must be a list of names, got '1:59:59"),
                (f"0x{'f' * 20_000}", "exclude must be a list of names, got '0xff"),
                ("9" * 20_000, "exclude must be a list of names, got '999"),
                ("2024-13-45", "exclude must be a list of names, got '2024"),
            )
        ),
        ({"splits": "{"}, "split.yaml cannot be read"),
        ({"dataset": "field_map: {a: 1}"}, "field_map must map"),
        ({"counted": 3}, "d_0.tar must have 3 samples"),
    ],
)
def test_wrong_folder_is_an_error(tmp_path: Path, changed: dict[str, object], message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        index_folder(prepare(tmp_path, **changed))  # type: ignore[arg-type]


def test_missing_field_is_named(tmp_path: Path) -> None:
    index_folder(prepare(tmp_path, dataset="field_map: {image: jpg}"))
    with pytest.raises(ShardCorruptError, match=r"must have jpg, as \.nv-meta/dataset\.yaml says, got __key__, txt"):
        StreamingDataset(tmp_path, split="train")[0]


def test_an_index_older_than_its_splits_is_refused(tmp_path: Path) -> None:
    prepare(tmp_path)
    meta = (tmp_path / ".nv-meta").rename(tmp_path / "later")
    index_folder(tmp_path)
    meta.rename(tmp_path / ".nv-meta")
    with pytest.raises(DatasetError, match=r"must be None, got .* Run index_folder again"):
        StreamingDataset(tmp_path, split="train")


# ---- remote folders, and folders that cannot be written


@pytest.fixture
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ShardServer]:
    monkeypatch.setattr(file_ranges, "SPAN_BYTES", 1)
    monkeypatch.setattr(file_ranges, "MIN_RANGE_BYTES", 1)
    root = tmp_path / "remote"
    root.mkdir()
    write_offsets_of_energon(prepare(root))
    with ShardServer(root) as server:
        yield server


def test_remote_split_is_read_by_range(remote: ShardServer, tmp_path: Path) -> None:
    index_folder(remote.url, out=tmp_path / "cache")
    asked = [(name, text) for name, text in remote.ranges if name.endswith(".tar")]
    assert all(int(end) - int(begin) == 511 for _, text in asked for begin, end in [text[6:].split("-")])
    train = StreamingDataset(remote.url, tmp_path / "cache", split="train")
    assert train[3] == {"__key__": "3", "caption": "3", "first": 3, "image": b"b3"}
    assert [name for name, _ in remote.ranges[len(asked) :]] == ["d_1.tar"]
    index_folder(remote.folder)
    local = StreamingDataset(remote.folder, split="train")
    assert [train[n] for n in range(4)] == [local[n] for n in range(4)]
    assert train.fingerprint == local.fingerprint
    with pytest.raises(InvalidArgumentError, match="split must be one of train, val, got 'dev'"):
        StreamingDataset(remote.url, tmp_path / "cache", split="dev")


def test_folder_that_cannot_be_written_is_indexed(tmp_path: Path) -> None:
    root, out = tmp_path / "data", tmp_path / "out"
    root.mkdir()
    before = {path: path.stat().st_mtime_ns for path in prepare(root).rglob("*")}
    index_folder(root, out=out)
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before
    val = StreamingDataset(root, out, split="val")
    assert [val[n]["first"] for n in range(4)] == [6, 7, 8, 9]
    assert not list(out.rglob("*.tar"))
    assert pickle.loads(pickle.dumps(val))[0] == val[0]
    with pytest.raises(ShardUnavailableError, match=r"has no index\.json"):
        StreamingDataset(root, tmp_path / "cache", split="val")


def test_stale_offsets_of_energon_are_refused(remote: ShardServer, tmp_path: Path) -> None:
    offsets = remote.folder / "d_1.tar.idx"
    (remote.folder / "d_0.tar.idx").write_bytes(offsets.read_bytes()[8:])
    with pytest.raises(DatasetError, match=r"d_0\.tar must have 2 samples, as \.nv-meta lists, got 1"):
        index_folder(remote.url, out=tmp_path / "out")
    (remote.folder / "d_0.tar.idx").write_bytes(offsets.read_bytes())
    offsets.write_bytes(offsets.read_bytes()[:-8] + struct.pack("<Q", 512 * 10))
    with pytest.raises(ShardCorruptError, match=r"d_1\.tar\.idx does not fit its archive: .*energon prepare"):
        index_folder(remote.url, out=tmp_path / "out")
    offsets.unlink()
    with pytest.raises(DatasetError, match=r"d_1\.tar\.idx is missing\. Run"):
        index_folder(remote.url, out=tmp_path / "out")


def test_folder_prepared_again_is_noticed(remote: ShardServer, tmp_path: Path) -> None:
    index_folder(remote.folder)
    meta = remote.folder / ".nv-meta"
    (meta / "split.yaml").write_text("split_parts: {train: [v.tar], val: [w.tar]}")
    named = r"split\.yaml must be as it was when the folder was indexed.* Run index_folder again"
    for where in (remote.folder, remote.url):
        with pytest.raises(DatasetError, match=named):
            StreamingDataset(where, tmp_path / "cache", split="train")
    index_folder(remote.folder)
    assert len(StreamingDataset(remote.folder, split="train")) == 2
    (meta / "dataset.yaml").unlink()
    with pytest.raises(DatasetError, match=r"dataset\.yaml must be as it was"):
        StreamingDataset(remote.folder, split="train")
