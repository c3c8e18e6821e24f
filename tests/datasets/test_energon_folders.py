"""Folders that Energon prepared: splits as split.yaml lists them, fields as dataset.yaml maps them."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest

from penstock.data import StreamingDataset, index_folder
from penstock.proto.errors import DatasetError, InvalidArgumentError, ShardCorruptError

FIELDS = "field_map: {caption: txt, first: 'json[l][0]', image: 'jpg,bin'}"
SPLITS = "exclude: [d_2.tar]\nsplit_parts:\n  train: ['d_{0..2}.tar']\n  val: ['{v,w}.tar']\n  test: []\n"


def prepare(root: Path, splits: str = SPLITS, dataset: str = FIELDS, counted: int = 2) -> Path:
    for number, name in enumerate(("d_0", "d_1", "d_2", "v", "w")):
        with tarfile.open(root / f"{name}.tar", "w") as archive:
            for n in (2 * number, 2 * number + 1):
                members = {"txt": b"%d" % n, "bin": b"b%d" % n, "json": json.dumps({"l": [n]}).encode()}
                for ending, data in members.items():
                    info = tarfile.TarInfo(f"{n}.{ending}")
                    info.size = len(data)
                    archive.addfile(info, io.BytesIO(data))
    meta = root / ".nv-meta"
    meta.mkdir()
    (meta / "split.yaml").write_text(splits)
    (meta / "dataset.yaml").write_text(dataset)
    (meta / ".info.json").write_text(json.dumps({"shard_counts": {"d_0.tar": counted}}))
    return root


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
    index_folder(prepare(tmp_path, dataset="sample_loader: 'sample_loader.py:sample_loader'\n"))
    assert StreamingDataset(tmp_path, split="val")[0] == {"__key__": "6", "txt": "6", "bin": b"b6", "json": {"l": [6]}}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"splits": "split_parts: {train: [no.tar]}"}, "no.tar must be a file in the folder"),
        ({"splits": "split_parts: {train: ['../x.tar']}"}, "must be a file in the folder"),
        ({"splits": "split_parts: {train: ['{2..1}.tar']}"}, "braces must hold"),
        ({"splits": "split_parts: {train: [v.tar]}\nexclude: [v.tar/6]"}, "got the sample v.tar/6"),
        ({"splits": "split_parts: [1]"}, "split_parts must list"),
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
