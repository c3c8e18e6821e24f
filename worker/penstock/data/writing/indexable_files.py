"""Table of the formats that index_folder supports: how their files are found in a folder, and how each is indexed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from penstock.data.formats.array_record import index_array_record
from penstock.data.formats.arrow.reader import index_arrow, with_common_types
from penstock.data.formats.arrow.saved_datasets import saved_files
from penstock.data.formats.fields import check_same_columns
from penstock.data.formats.megatron import index_megatron
from penstock.data.formats.records.csv_rows import index_csv_rows
from penstock.data.formats.records.energon_folder import prepared_files, prepared_shards
from penstock.data.formats.records.json_lines import index_json_lines
from penstock.data.formats.records.tar_samples import LAST_DOT, index_tar, said_of_names
from penstock.data.formats.shards import Shard
from penstock.data.formats.tfrecord.tfrecord_file import index_tfrecord
from penstock.proto.errors import DatasetError

Find = Callable[[Path, Sequence[Path]], list[Path]]
"""Function from (folder, all files below it) to the format's files, in the order of their samples."""
IndexFile = Callable[[Path, str, Path], Shard]
"""Function from (path of a file, its path in the dataset's folder, folder of the index and of a file of offsets, if
any) to the file's shard. Raises DatasetError."""


@dataclass(frozen=True, slots=True)
class IndexableFormat:
    find: Find
    index_file: IndexFile
    join: Callable[[Path, list[Shard]], list[Shard]] = lambda root, shards: shards
    """Checks and completes shards of the files in a folder as those of one dataset. Raises DatasetError."""


def _without_offsets(index_file: Callable[[Path, str], Shard]) -> IndexFile:
    return lambda path, name, out: index_file(path, name)


def _named(pattern: str) -> Find:
    names = re.compile(pattern, re.IGNORECASE)
    return lambda root, files: [path for path in files if names.fullmatch(path.name)]


def _arrow_files(root: Path, files: Sequence[Path]) -> list[Path]:
    saved = saved_files(root)
    if saved:
        return saved
    states = [path for path in files if path.name == "state.json"]
    if states and states[0].parent != root:
        raise DatasetError(f"{root} has a dataset of save_to_disk below it. Index {states[0].parent} instead")
    # Cached results of map() lie beside the files of a dataset in a cache of Hugging Face.
    return [path for path in files if path.suffix.lower() == ".arrow" and not path.name.startswith("cache-")]


def _megatron_files(root: Path, files: Sequence[Path]) -> list[Path]:
    present = set(files)
    return [path for path in files if path.suffix == ".bin" and path.with_suffix(".idx") in present]


def _tar_files(root: Path, files: Sequence[Path]) -> list[Path]:
    prepared = prepared_files(root)
    return _TARS(root, files) if prepared is None else prepared


def _tar_shards(root: Path, shards: list[Shard]) -> list[Shard]:
    return prepared_shards(root, said_of_names(shards))


def _of_same_columns(root: Path, shards: list[Shard]) -> list[Shard]:
    check_same_columns(shards, in_order=shards[0].format == "csv_rows")
    return shards


def _of_common_types(root: Path, shards: list[Shard]) -> list[Shard]:
    return with_common_types(_of_same_columns(root, shards))


def _of_one_kind(root: Path, shards: list[Shard]) -> list[Shard]:
    kinds = {shard.settings["records"] for shard in shards if shard.samples}
    return _as("example" if kinds == {"example"} else "bytes")(root, shards)


def _as(kind: str) -> Callable[[Path, list[Shard]], list[Shard]]:
    return lambda root, shards: [replace(shard, settings={"records": kind}) for shard in shards]


_TARS = _named(r".*\.tar")
_TFRECORD = IndexableFormat(_named(r".*\.tfrec(ord)?s?(-\d+-of-\d+)?"), index_tfrecord, _of_one_kind)
_ARRAY_RECORD = IndexableFormat(
    _named(r".*\.(array_?|a)records?(-\d+-of-\d+)?"), _without_offsets(index_array_record), _of_one_kind
)

INDEXABLE: Mapping[str, IndexableFormat] = {
    "arrow": IndexableFormat(_arrow_files, _without_offsets(index_arrow), _of_common_types),
    "tfrecord": _TFRECORD,
    "array_record": _ARRAY_RECORD,
    "json_lines": IndexableFormat(_named(r".*\.(jsonl|ndjson)"), index_json_lines),
    "csv_rows": IndexableFormat(_named(r".*\.(csv|tsv)"), index_csv_rows, _of_same_columns),
    "webdataset": IndexableFormat(_tar_files, index_tar, _tar_shards),
    "webdataset-last_dot": IndexableFormat(
        _TARS, partial(index_tar, key=LAST_DOT), lambda root, shards: said_of_names(shards)
    ),
    "megatron": IndexableFormat(_megatron_files, _without_offsets(index_megatron)),
    "tfrecord-bytes": replace(_TFRECORD, join=_as("bytes")),
    "tfrecord-example": replace(_TFRECORD, join=_as("example")),
    "array_record-bytes": replace(_ARRAY_RECORD, join=_as("bytes")),
    "array_record-example": replace(_ARRAY_RECORD, join=_as("example")),
}
"""A name with "-" also gives the kind of the records or keys; it must be given, and is never found from a folder's
files."""
