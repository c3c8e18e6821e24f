"""index.json: what is wrong in it is named with its address, its shard and its field."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.data.formats.format_table import FORMATS
from penstock.data.formats.index import INDEX, read_index, write_index
from penstock.data.formats.shards import Shard
from penstock.data.indexes.shard_table import ShardTable
from penstock.data.writing.merge_index import merge_index
from penstock.proto.errors import DatasetError

MDS = Path(__file__).parents[1] / "data" / "mds"
GOOD: dict[str, Any] = json.loads((MDS / "packed-zstd" / INDEX).read_text())
XSV: dict[str, Any] = json.loads((MDS / "xsv" / INDEX).read_text())
JSON: dict[str, Any] = json.loads((MDS / "json" / INDEX).read_text())

Path_ = tuple[str | int, ...]
GONE = object()


def changed(index: dict[str, Any], path: Path_, value: object) -> bytes:
    index = copy.deepcopy(index)
    place: Any = index
    for step in path[:-1]:
        place = place[step]
    if value is GONE:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return json.dumps(index).encode()


def outcome(read: Callable[[bytes, str], Iterable[Shard]], data: bytes) -> list[Shard] | str:
    try:
        return list(read(data, "here"))
    except DatasetError as error:
        return str(error)


def read_both(data: bytes) -> list[Shard]:
    """Return the shards of an index. Its table must have the same ones, or refuse it in the same words."""
    assert outcome(ShardTable.of, data) == outcome(read_index, data)
    return read_index(data, "here")


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ((), 3, "the entry is invalid: Expected `object`, got `int`"),
        (("version",), 1, "version must be 2, got 1"),
        (("format",), "avro", "format must be one of mds, json.* got 'avro'"),
        (("format",), ["mds"], "format is invalid: Expected `str`, got `array`"),
        (("samples",), -1, "samples is invalid: Expected `int` >= 0"),
        (("samples",), True, "samples is invalid: Expected `int`, got `bool`"),
        (("compression",), "lz4", "the compression must be one of .* got 'lz4'"),
        (("compression",), "zstd:99", "level of zstd must be 1 to 22"),
        (("compression",), "", "compression is invalid: the compression must be one of .* got ''"),
        (("compression",), None, "zip_data must be null, because compression is null"),
        (("zip_data",), None, "zip_data is missing, though compression is 'zstd'"),
        (("zip_data",), 3, "zip_data is invalid: Expected `object . null`, got `int`"),
        (("raw_data",), GONE, "the entry is invalid: Object missing required field `raw_data`"),
        (("raw_data", "bytes"), -5, "raw_data.bytes is invalid: Expected `int` >= 0"),
        (("raw_data", "bytes"), 2**32, "raw_data.bytes must be at most 4294967295.* got 4294967296"),
        (("raw_data", "basename"), 3, "raw_data.basename is invalid: Expected `str`, got `int`"),
        *(
            (("raw_data", "basename"), name, "raw_data.basename must be a plain path below the dataset's folder")
            for name in ("", "/etc/passwd", "..", "a/../../x", "a//b", "./x", "a/", "a\\b", "x\0y")
        ),
        *(
            (("raw_data", "basename"), name, "raw_data.basename must not be a name that the cache uses")
            for name in ("train/index.json", ".penstock/shards/a", "train/.Penstock/place")
        ),
        (("raw_data", "basename"), "shard.00000.mds", "lists this file a second time, with another"),
        (("raw_data", "hashes"), ["sha1"], "raw_data.hashes is invalid: Expected `object . null`, got `array`"),
        (("raw_data", "hashes", "sha1"), "xyz", "raw_data.hashes.sha1 must be a digest in hexadecimal, got 'xyz'"),
        (("column_names",), GONE, "column_names is missing"),
        (("column_names",), ["i", "i", "x"], "column_names must be unique, got i, i, x"),
        (("column_names",), ["i", 3, "x"], "column_names must be a list of strings"),
        (("column_encodings",), ["int"], "column_encodings must have one entry for each of 3 columns, got 1"),
        (("column_encodings",), ["int", "str", "tensor"], "column_encodings is invalid for column 'x': .*'tensor'"),
        (("column_sizes",), [8], "column_sizes must be a list of 3 sizes"),
        (("column_sizes",), [8, None, -8], "column_sizes must be .* for column 'x', got -8"),
        (("column_sizes",), [8, None, 2**40], "column_sizes must be .* for column 'x', got 1099511627776"),
    ],
)
def test_wrong_shard_fields_are_named(path: Path_, value: object, words: str) -> None:
    with pytest.raises(DatasetError, match=f"^here: shard 1: .*{words}"):
        read_both(changed(GOOD, ("shards", 1, *path), value))


@pytest.mark.parametrize(
    ("index", "path", "value", "words"),
    [
        (GOOD, ("version",), 3, "version must be 2, got 3"),
        (GOOD, ("version",), True, "version is invalid: Expected `int`, got `bool`"),
        (GOOD, ("version",), GONE, "the index is invalid: Object missing required field `version`"),
        (GOOD, ("shards",), {}, "shards is invalid: Expected `array`, got `object`"),
        (XSV, ("shards", 0, "separator"), "", "shard 0: .*separator must be a string that is not empty"),
        (XSV, ("shards", 0, "newline"), GONE, "shard 0: .*newline must be a string that is not empty"),
        (XSV, ("shards", 0, "raw_meta"), GONE, "shard 0: .*raw_meta is missing"),
        (XSV, ("shards", 0, "column_encodings"), ["int", "str", "bytes"], "shard 0: .*column 'x', got 'bytes'"),
        (JSON, ("shards", 0, "columns"), {"i": 3}, "shard 0: .*columns must be an object of strings"),
        (JSON, ("shards", 0, "columns"), {"i": "jpeg"}, "shard 0: .*one of str, int, float for column 'i', got 'jpeg'"),
    ],
)
def test_wrong_fields_of_the_whole_and_of_tables(index: dict[str, Any], path: Path_, value: object, words: str) -> None:
    with pytest.raises(DatasetError, match=f"^here: {words}"):
        read_both(changed(index, path, value))


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def places(value: Any, path: Path_ = ()) -> list[Path_]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] * bool(path) + [below for key, item in items for below in places(item, (*path, key))]


@settings(max_examples=60)
@given(st.data(), st.sampled_from([GOOD, XSV, JSON]))
def test_any_other_value_is_read_or_refused(data: st.DataObject, index: dict[str, Any]) -> None:
    path = data.draw(st.sampled_from(places(index)))
    content = changed(index, path, data.draw(JSON_VALUES))
    try:
        shards = read_both(content)
    except DatasetError as error:
        said = str(error)
    else:
        said = "here: "
        assert [len(shard.files) for shard in shards] == [len(FORMATS[shard.format].file_kinds) for shard in shards]
        assert all(shard.samples >= 0 and shard.size >= 0 for shard in shards)
        assert read_index(write_index(shards), "again") == shards
    assert said.startswith("here: ")


def test_fields_of_their_reader_may_be_missing() -> None:
    bare = changed(XSV, ("shards", 0, "size_limit"), GONE)
    null = changed(XSV, ("shards", 0, "size_limit"), None)
    assert write_index(read_index(bare, "here")) == json.dumps(json.loads(null), sort_keys=True).encode()


def test_merging_takes_each_folder_once_in_order(tmp_path: Path) -> None:
    for name in ("b", "a", "a/below", "c/d"):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / name / INDEX).write_text(json.dumps(GOOD))
    count = len(GOOD["shards"])
    for _ in range(2):  # its own index is not merged into the next
        shards = merge_index(tmp_path)
        assert [shard.name.rpartition("/")[0] for shard in shards[::count]] == ["a", "b", "c/d"]
        assert len(shards) == 3 * count
        assert read_index((tmp_path / INDEX).read_bytes(), "merged") == shards
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c", INDEX]
