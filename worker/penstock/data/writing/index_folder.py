"""Indexing of files that other libraries wrote, so that StreamingDataset can read them. The files are not changed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from penstock.data.formats.arrow.saved_datasets import saved_splits
from penstock.data.formats.index import INDEX, join_indexes, read_index, write_index
from penstock.data.formats.shards import Shard
from penstock.data.writing.index_each import JOURNAL, index_each
from penstock.data.writing.index_parquet import index_parquet, is_hidden
from penstock.data.writing.indexable_files import INDEXABLE
from penstock.proto.errors import DatasetError, InvalidArgumentError
from penstock.runtime.files.atomic_files import write_whole

__all__ = ["index_folder"]

PARQUET = "parquet"
PACKED = (".gz", ".gzip", ".zst", ".zstd", ".bz2", ".xz", ".lzma", ".lz4", ".zip", ".br", ".snappy", ".z")
"""File name extensions of compressed files."""


def index_folder(folder: str | os.PathLike[str], format: str | None = None) -> list[Shard]:
    """Write an index of another library's files in a local folder and its subfolders, in the order of their paths.
    StreamingDataset can then read them.

        index_folder("/data/saved_with_save_to_disk")
        dataset = StreamingDataset("/data/saved_with_save_to_disk", split="train")

    Several files are indexed at a time, with progress on standard error from the third second on. A call continues one
    that was killed. Hidden files and folders, and those whose names begin with `_` and have no `=`, are left out.

    Args:
        folder: folder with files of one format: Parquet (.parquet), Arrow IPC (.arrow), JSON lines (.jsonl, .ndjson),
            CSV and TSV with a header (.csv, .tsv), tar archives of WebDataset (.tar), TFRecord (.tfrecord and the
            like), ArrayRecord (.array_record and the like), Megatron-core's token files (.bin beside .idx), or a
            Dataset or DatasetDict of Hugging Face datasets that `save_to_disk` wrote. A DatasetDict gets an index in
            the folder of each split. A folder that Megatron Energon prepared keeps its splits and
            fields. Beside each file of lines, rows, tar members or TFRecords a file .penstock-index is written.
        format: "parquet", "arrow", "json_lines", "csv_rows", "webdataset", "tfrecord", "array_record" or "megatron";
            None: the format of the files in the folder. "-example" or "-bytes" after "tfrecord" or "array_record" gives
            the kind of the records; without it, records are read as examples (tf.train.Example) if the first record of
            each file is one.

    Returns the shards. Raises InvalidArgumentError, DatasetError, ShardCorruptError.
    """
    root = Path(folder)
    if not root.is_dir():
        raise DatasetError(
            f"{root} must be a local folder with a dataset's files. Download a remote folder first; index_parquet "
            "also takes URLs"
        )
    if format is not None and format not in (PARQUET, *INDEXABLE):
        raise InvalidArgumentError(f"format must be one of {', '.join((PARQUET, *INDEXABLE))}, got {format!r}")
    splits = saved_splits(root) if format in (None, "arrow") else None
    if splits is not None:
        return join_indexes([(split, index_folder(root / split, "arrow")) for split in splits])
    files, found = _files(root), {}
    for name in [format] if format else [PARQUET, *(name for name in INDEXABLE if "-" not in name)]:
        own = (
            [path for path in files if path.suffix.lower() == ".parquet"]
            if name == PARQUET
            else INDEXABLE[name].find(root, files)
        )
        if own:
            found[name] = [(path.relative_to(root).as_posix(), path) for path in own]
    if len(found) != 1:
        raise DatasetError(
            f"{root} must have files of one format ({', '.join((PARQUET, *INDEXABLE))}), got "
            f"{' and '.join(f'{len(own)} of {name}' for name, own in found.items()) or 'none'}. Pass format, or "
            "another folder"
        )
    [(name, named)] = found.items()
    _refuse_written(root)
    if name == PARQUET:
        return index_parquet(root)
    _refuse_packed(root, files, name)
    shards = INDEXABLE[name].join(root, index_each(root, named, INDEXABLE[name].index_file))
    write_whole(root / INDEX, write_index(shards))
    (root / JOURNAL).unlink(missing_ok=True)
    return shards


def _refuse_written(root: Path) -> None:
    """Raise DatasetError if a writer of shards has written the folder's index, which would be lost."""
    path = root / INDEX
    if not path.exists():
        return
    written = {shard.format for shard in read_index(path.read_bytes(), str(path))} - {PARQUET, *INDEXABLE}
    if written:
        raise DatasetError(
            f"{path} must not be replaced, because a writer made it for shards of {', '.join(sorted(written))}. Read "
            "the folder as it is, or move the other files to a folder of their own"
        )


def _refuse_packed(root: Path, files: Sequence[Path], name: str) -> None:
    """Raise DatasetError if some of a format's files are compressed, and would be left out."""
    for path in files:
        if path.suffix.lower() in PACKED and INDEXABLE[name].find(root, [path.with_suffix("")]):
            raise DatasetError(
                f"{path} must not be compressed, because samples are read in any order. Decompress it first"
            )


def _files(root: Path) -> list[Path]:
    """Return the files below a folder, in the order of their paths, without hidden and temporary ones."""
    found = [path for path in sorted(root.rglob("*")) if not is_hidden(path.relative_to(root).as_posix())]
    for path in found:
        if path.is_symlink() and not path.is_file():
            raise DatasetError(
                f"{path} must be a file or a folder, got a link to a folder or a broken link. Index the target of the "
                "link"
            )
    return [path for path in found if path.is_file()]
