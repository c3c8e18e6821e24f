"""Index of files that other libraries wrote, so that StreamingDataset can read their folder.

Each format says which files of a folder are its own, and makes shards of them. The files stay as they are.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from penstock.data.formats.array_record.array_record_file import array_record_shards
from penstock.data.formats.arrow.arrow_file import arrow_shards
from penstock.data.formats.arrow.saved_datasets import saved_files, saved_splits
from penstock.data.formats.index import INDEX, join_indexes, write_index
from penstock.data.formats.megatron.token_documents import megatron_shard
from penstock.data.formats.parquet.parquet_shards import parquet_shards
from penstock.data.formats.shards import Shard
from penstock.data.formats.tfrecord.tfrecord_file import tfrecord_shards
from penstock.data.writing.index_parquet import is_hidden
from penstock.proto.errors import DatasetError, InvalidArgumentError
from penstock.runtime.files.atomic_files import write_whole

__all__ = ["index_folder"]

_TFRECORD = re.compile(r".*\.tfrec(ord)?s?(-\d+-of-\d+)?")
"""Names of TFRecord files: a.tfrecord, a.tfrecords, a.tfrec, a.tfrecord-00000-of-00010."""
_ARRAY_RECORD = re.compile(r".*\.(array_?|a)records?(-\d+-of-\d+)?")
"""Names of ArrayRecord files: a.array_record, a.array_record-00000-of-00010, a.arecord."""

Files = list[tuple[str, Path]]
"""(path relative to the dataset's folder, path) of each file."""


def index_folder(folder: str | os.PathLike[str], format: str | None = None) -> list[Shard]:
    """Write an index of another library's files in a local folder and its subfolders, in the order of their paths.
    StreamingDataset can then read them.

        index_folder("/data/saved_with_save_to_disk")
        dataset = StreamingDataset("/data/saved_with_save_to_disk", split="train")

    Hidden files and folders, and those whose names begin with `_` and have no `=`, are left out.

    Args:
        folder: folder with files of one format: Parquet (*.parquet), Arrow IPC (*.arrow), TFRecord (*.tfrecord and
            the like), ArrayRecord (*.array_record and the like), Megatron-core's token files (*.bin beside *.idx), or
            a Dataset or DatasetDict of Hugging Face datasets that `save_to_disk` wrote. A DatasetDict gets an index in
            the folder of each split. Beside each TFRecord file a file *.penstock-index is written.
        format: "parquet", "arrow", "tfrecord", "array_record" or "megatron"; None: the one whose files are there. With
            "-example" or "-bytes" after "tfrecord" or "array_record" it says what the records are; otherwise they are
            examples (tf.train.Example) if the first record of each file is one.

    Returns the shards. Raises InvalidArgumentError, DatasetError, ShardCorruptError.
    """
    root = Path(folder)
    if not root.is_dir():
        raise DatasetError(f"{root} must be a local folder with a dataset's files")
    if format is not None and format not in (*_FORMATS, *_VARIANTS):
        raise InvalidArgumentError(f"format must be one of {', '.join((*_FORMATS, *_VARIANTS))}, got {format!r}")
    splits = saved_splits(root) if format in (None, "arrow") else None
    if splits is not None:
        return join_indexes([(split, index_folder(root / split, "arrow")) for split in splits])
    files = [path for path in _files(root) if path.name != INDEX]
    found = {}
    wanted, _ = _VARIANTS.get(format or "", (format, None))
    for name in [wanted] if wanted else _FORMATS:
        find, _ = _FORMATS[name]
        own = find(root, files)
        if own:
            found[name] = own
    if len(found) != 1:
        raise DatasetError(
            f"{root} must have files of one format ({', '.join(_FORMATS)}), got "
            f"{' and '.join(f'{len(own)} of {name}' for name, own in found.items()) or 'none'}: give format, or "
            "another folder"
        )
    [(name, own)] = found.items()
    make = _VARIANTS[format][1] if format in _VARIANTS else _FORMATS[name][1]
    shards = make(own)
    write_whole(root / INDEX, write_index(shards))
    return shards


def _files(root: Path) -> Iterator[Path]:
    """Return the files below a folder, in the order of their paths, without hidden and temporary ones."""
    for path in sorted(root.rglob("*")):
        if not is_hidden(path.relative_to(root).as_posix()) and path.is_file():
            yield path


def _named(root: Path, files: list[Path]) -> Files:
    return [(path.relative_to(root).as_posix(), path) for path in files]


def _by_ending(ending: str) -> Callable[[Path, list[Path]], Files]:
    return lambda root, files: _named(root, [path for path in files if path.suffix == ending])


def _arrow(root: Path, files: list[Path]) -> Files:
    return _named(root, saved_files(root) or [path for path in files if path.suffix == ".arrow"])


def _matching(names: re.Pattern[str]) -> Callable[[Path, list[Path]], Files]:
    return lambda root, files: _named(root, [path for path in files if names.fullmatch(path.name)])


def _megatron(root: Path, files: list[Path]) -> Files:
    present = set(files)
    return _named(root, [path for path in files if path.suffix == ".bin" and path.with_suffix(".idx") in present])


_FORMATS: dict[str, tuple[Callable[[Path, list[Path]], Files], Callable[[Files], list[Shard]]]] = {
    "parquet": (_by_ending(".parquet"), parquet_shards),
    "arrow": (_arrow, arrow_shards),
    "tfrecord": (_matching(_TFRECORD), tfrecord_shards),
    "array_record": (_matching(_ARRAY_RECORD), array_record_shards),
    "megatron": (_megatron, lambda files: [megatron_shard(path, name) for name, path in files]),
}
"""(function that finds its files, function that makes shards of them) of each format."""

_VARIANTS: dict[str, tuple[str, Callable[[Files], list[Shard]]]] = {
    "tfrecord-bytes": ("tfrecord", partial(tfrecord_shards, records="bytes")),
    "tfrecord-example": ("tfrecord", partial(tfrecord_shards, records="example")),
    "array_record-bytes": ("array_record", partial(array_record_shards, records="bytes")),
    "array_record-example": ("array_record", partial(array_record_shards, records="example")),
}
"""(format, function that makes shards) of names that say more than the files do."""
