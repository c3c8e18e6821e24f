"""Folders with the files of several splits: never one dataset. tests/data/split_names: 300, as datasets reads them."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import fsspec
import pyarrow
import pyarrow.parquet
import pytest
from typer.testing import CliRunner

from penstock.data import StreamingDataset, convert_dataset, index_folder, index_parquet, merge_index
from penstock.deploy.cli.main import app
from penstock.proto.errors import DatasetError, InvalidArgumentError, ShardUnavailableError

LAYOUTS: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "data/split_names/layouts.json").read_text())


def fill(root: Path, names: list[str], card: str = "") -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(json.dumps({"file": name}) + "\n")
    if card:
        (root / "README.md").write_text(f"---\n{card}---\n# A dataset\n")


def files_of(root: Any, split: str | None = None, **options: Any) -> list[str]:
    dataset = StreamingDataset(root, split=split, **options)
    return [row["file"] for row in dataset[:]]


@pytest.mark.parametrize("tenth", range(10))
def test_splits_are_those_of_hugging_face(tmp_path: Path, tenth: int) -> None:
    for number, layout in enumerate(LAYOUTS[tenth::10]):
        root = tmp_path / str(number)
        fill(root, layout["names"], layout["card"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # files that belong to no split
            index_folder(root)
        found = {split: sorted(files_of(root, split)) for split in layout["splits"]}
        assert found == layout["splits"], layout
        if len(found) == 1:
            [files] = found.values()
            assert sorted(files_of(root)) == files
        else:
            names = ", ".join(found)
            with pytest.raises(InvalidArgumentError, match=f"split must be one of {names}, got None"):
                StreamingDataset(root)
        with pytest.raises((InvalidArgumentError, ShardUnavailableError), match=r"split must be|has no .*index"):
            StreamingDataset(root, split="latest")


def parquet(path: Path, rows: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table({"file": [path.name] * rows}), path)


def test_clone_of_the_hub(tmp_path: Path) -> None:
    for name, rows in (("train-00000-of-00002", 3), ("train-00001-of-00002", 2), ("random-00000-of-00001", 4)):
        parquet(tmp_path / f"data/{name}.parquet", rows)
    (tmp_path / "README.md").write_text("# No head")
    index_folder(tmp_path)
    assert [len(files_of(tmp_path, split)) for split in ("train", "random", "*")] == [5, 4, 9]
    shown = CliRunner().invoke(app, ["data", "index", str(tmp_path), "--json"]).stdout
    assert json.loads(shown)["splits"] == {"train": 2, "random": 1}
    assert CliRunner().invoke(app, ["data", "verify", str(tmp_path)]).exit_code == 0
    with pytest.raises(DatasetError, match="must have one split, got train, random"):
        convert_dataset(tmp_path, tmp_path / "to", "mds")
    CliRunner().invoke(app, ["data", "index", str(tmp_path), "--split", "random"])
    assert len(files_of(tmp_path)) == len(files_of(tmp_path, "random")) == 4
    index_parquet(tmp_path, split="*")  # says that all are one
    assert len(files_of(tmp_path)) == len(files_of(tmp_path, "*")) == 9
    with pytest.raises(InvalidArgumentError, match=r"split must be \['\*'\], as it was indexed, got 'train'"):
        StreamingDataset(tmp_path, split="train")
    with pytest.raises(InvalidArgumentError, match="split must be the relative path of a subfolder"):
        index_folder(tmp_path, split="../x")
    with pytest.raises(InvalidArgumentError, match="split must be one of train, random, got 'test'"):
        index_parquet(tmp_path, split="test")


def test_several_configs_are_refused(tmp_path: Path) -> None:
    fill(
        tmp_path,
        ["en/train.jsonl", "de/train.jsonl", "de/test.jsonl"],
        "configs:\n- config_name: en\n- config_name: de\n",
    )
    with pytest.raises(DatasetError, match=r"must have one config, or one named default, got en, de\. Index the"):
        index_folder(tmp_path)
    index_folder(tmp_path / "de")
    assert files_of(tmp_path / "de", "test") == ["de/test.jsonl"]
    (tmp_path / "README.md").write_text("---\nconfigs:\n- config_name: default\n  data_dir: de\n---\n")
    index_folder(tmp_path)
    assert files_of(tmp_path, "train") == ["de/train.jsonl"]
    (tmp_path / "README.md").write_text("---\nconfigs:\n- config_name: default\n  data_files: no/*\n---\n")
    with pytest.raises(DatasetError, match="lists files of the split 'train', but the folder has none"):
        index_folder(tmp_path)
    (tmp_path / "README.md").write_text('---\nconfigs:\n- config_name: default\n  data_files: "a**b"\n---\n')
    with pytest.raises(InvalidArgumentError, match=r"the pattern 'a\*\*b' must be one of fsspec's"):
        index_folder(tmp_path)


def test_subfolder_comes_first(tmp_path: Path) -> None:
    fill(tmp_path, ["train/a.jsonl", "train/b.jsonl", "test/a.jsonl", "x.jsonl"])
    with pytest.warns(
        UserWarning, match=r"1 of 4 files are left out, such as x.jsonl: they are in no split \(train, test"
    ):
        index_folder(tmp_path)
    assert files_of(tmp_path, "train") == ["train/a.jsonl", "train/b.jsonl"]
    (tmp_path / "x.jsonl").unlink()
    fill(tmp_path, ["train/c.jsonl"])
    index_folder(tmp_path, split="train")  # into the subfolder
    differ = r"subfolder train must have the same files of the subfolder, but c\.jsonl differs\. Index both again"
    with pytest.raises(DatasetError, match=differ):
        StreamingDataset(tmp_path, split="train")
    index_folder(tmp_path)
    assert files_of(tmp_path, "train") == ["train/a.jsonl", "train/b.jsonl", "train/c.jsonl"]
    assert files_of(tmp_path, "test") == ["test/a.jsonl"]
    fsspec.filesystem("memory").put(f"{tmp_path}/", "/subfolder/", recursive=True)
    assert len(files_of("memory://subfolder", "train", local=tmp_path / "cache")) == 3
    (tmp_path / "train/b.jsonl").unlink()
    index_folder(tmp_path)
    with pytest.raises(DatasetError, match=r"but b\.jsonl differs"):
        StreamingDataset(tmp_path, split="train")
    fsspec.filesystem("memory").put(f"{tmp_path}/", "/differing-subfolder/", recursive=True)
    with pytest.raises(DatasetError, match=r"memory://differing-subfolder: .* but b\.jsonl differs"):
        StreamingDataset("memory://differing-subfolder", tmp_path / "other", split="train")


@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_remote_folders(tmp_path: Path, format: str) -> None:
    bucket, folder = f"memory://splits-{format}", tmp_path / "files"
    for name in [f"data/{split}-0000{n}-of-00002.{format}" for split in ("train", "test") for n in range(2)]:
        parquet(folder / name, 1) if format == "parquet" else fill(folder, [name])
    fsspec.filesystem("memory").put(f"{folder}/", f"/splits-{format}/", recursive=True)
    index_folder(bucket, out=tmp_path / "out")
    assert [len(files_of(bucket, split, local=tmp_path / "out")) for split in ("train", "test")] == [2, 2]
    with pytest.raises(ShardUnavailableError, match=r"train/index\.json"):
        StreamingDataset(bucket, tmp_path / "none", split="train")
    index_folder(bucket)
    for cache in ("one", "one", "two"):
        assert [len(files_of(bucket, split, local=tmp_path / cache)) for split in ("train", "test", "*")] == [2, 2, 4]
    with pytest.raises(InvalidArgumentError, match="split must be one of train, test, got None"):
        StreamingDataset(bucket, tmp_path / "three")
    index_folder(f"{bucket}/data", split="test")
    assert len(files_of(f"{bucket}/data", local=tmp_path / "four")) == 2


def test_merged_parts_have_the_same_splits(tmp_path: Path) -> None:
    for part in ("a", "b"):
        fill(tmp_path / part, [f"train-{part}.jsonl", f"test-{part}.jsonl"])
        index_folder(tmp_path / part)
    merge_index(tmp_path)
    assert files_of(tmp_path, "test") == ["test-a.jsonl", "test-b.jsonl"]
    fill(tmp_path / "c", ["part.jsonl"])
    index_folder(tmp_path / "c")
    with pytest.raises(DatasetError, match=r"must have the same splits, got \('train',\) and \('train', 'test'\)"):
        merge_index(tmp_path)


def test_no_split_is_left_out_for_its_ending(tmp_path: Path) -> None:
    """Without train.json, test.jsonl would be the whole dataset. Other .json files are descriptions."""
    (tmp_path / "test.jsonl").write_text('{"n": 1}\n')
    (tmp_path / "dataset_infos.json").write_text("{}")
    index_folder(tmp_path)
    (tmp_path / "train.json").write_text("[]")
    with pytest.raises(DatasetError, match=r"1 files of json_lines, and train\.json, which may be its split train"):
        index_folder(tmp_path)
    index_folder(tmp_path, "json_lines")
