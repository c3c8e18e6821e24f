"""Datasets that mosaicml-streaming 0.13.0 wrote: what it reads from them we read, and what it wrote we write.

tests/data/mds/make.py made them, and expected.json beside them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mds_recipes import RECIPES

from penstock.data.formats.compressed_files import unpack
from penstock.data.formats.index import INDEX, read_index, write_index
from penstock.data.writing import text_writers, writers
from penstock.data.writing.merge_index import merge_index

MDS = Path(__file__).parents[1] / "data" / "mds"
FOLDERS = [*RECIPES, "merged"]
WRITERS: dict[str, Any] = {**vars(writers), **vars(text_writers)}


def write(name: str, out: Path) -> Path:
    """The recipe, by our writer."""
    recipe = RECIPES[name]
    with WRITERS[recipe.writer](out, recipe.columns, **recipe.settings) as writer:
        for sample in recipe.samples():
            writer.write(sample)
    return out


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("name", FOLDERS)
def test_samples_are_those_of_its_own_reader(
    name: str, expected: dict[str, list[Any]], read_all: Callable[[Path], list[Any]]
) -> None:
    assert read_all(MDS / name) == expected[name]


@pytest.mark.parametrize("name", FOLDERS)
def test_the_index_comes_out_as_it_was(name: str) -> None:
    data = (MDS / name / INDEX).read_bytes()
    assert json.loads(write_index(read_index(data, name))) == json.loads(data)
    if name != "merged":  # its merge does not sort
        assert write_index(read_index(data, name)) == data


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "large"])
def test_our_writer_writes_the_same_files(name: str, tmp_path: Path) -> None:
    """Packed files are the same once unpacked: other releases of the compressors write other bytes."""
    ours, theirs = files(write(name, tmp_path / "ours")), files(MDS / name)
    assert ours.keys() == theirs.keys()
    compression = RECIPES[name].settings.get("compression")
    if compression:
        del ours[INDEX], theirs[INDEX]  # the index has hashes of the packed files
        for contents in (ours, theirs):
            contents |= {path: bytes(unpack(data, compression, limit=5000)) for path, data in contents.items()}
    assert ours == theirs


def test_large_first_sample_makes_no_empty_shard(
    tmp_path: Path, expected: dict[str, list[Any]], read_all: Callable[[Path], list[Any]]
) -> None:
    ours = read_index((write("large", tmp_path / "ours") / INDEX).read_bytes(), "ours")
    theirs = read_index((MDS / "large" / INDEX).read_bytes(), "theirs")
    assert [shard.samples for shard in theirs] == [0, 1, 1, 1]
    assert [shard.samples for shard in ours] == [1, 1, 1]
    assert read_all(tmp_path / "ours") == expected["large"]


def test_our_merge_lists_what_theirs_does(tmp_path: Path) -> None:
    for name in ("merged/one", "merged/two"):
        write(name, tmp_path / name)
    shards = merge_index(tmp_path / "merged")
    assert shards == read_index((tmp_path / "merged" / INDEX).read_bytes(), "ours")
    assert shards == read_index((MDS / "merged" / INDEX).read_bytes(), "theirs")
