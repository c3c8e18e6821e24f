"""Indexing of files that other libraries wrote, so that StreamingDataset can read them. The files are not changed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.data.formats.arrow.saved_datasets import saved_splits
from penstock.data.formats.index import INDEX, SOURCE_NOTE, join_indexes, read_index, write_index
from penstock.data.formats.records.energon_folder import prepared_note
from penstock.data.formats.shards import Shard
from penstock.data.remote.folders import RemoteFolder
from penstock.data.writing.index_each import index_each
from penstock.data.writing.index_parquet import index_parquet, is_hidden
from penstock.data.writing.index_prepared import index_prepared, warn_of_loader
from penstock.data.writing.indexable_files import INDEXABLE
from penstock.proto.errors import DatasetError, InvalidArgumentError
from penstock.runtime.files.atomic_files import write_whole

__all__ = ["index_folder"]

PARQUET = "parquet"
PACKED = (".gz", ".gzip", ".zst", ".zstd", ".bz2", ".xz", ".lzma", ".lz4", ".zip", ".br", ".snappy", ".z")
"""File name extensions of compressed files."""


def index_folder(
    folder: str | os.PathLike[str],
    format: str | None = None,
    *,
    out: str | os.PathLike[str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    ranges: bool = True,
    timeout_s: float = 600.0,
) -> list[Shard]:
    """Write an index of another library's files in a folder and its subfolders, in the order of their paths.
    StreamingDataset can then read them.

        index_folder("/data/saved_with_save_to_disk")
        dataset = StreamingDataset("/data/saved_with_save_to_disk", split="train")

        index_folder("s3://bucket/prepared", out="/data/cache")
        dataset = StreamingDataset("s3://bucket/prepared", "/data/cache", split="train")

    Many files are indexed in several processes, with progress on standard error from the third second on. A call
    continues one that was killed, and does not read files again that have not changed since they were indexed (size,
    times and inode). The hidden file .penstock-indexed beside the index lists them: remove it to have all files read.
    Hidden files and folders, and those whose names begin with `_` and have no `=`, are left out.

    A remote folder must be one that Megatron Energon prepared, or have Parquet files. Of its archives only the offsets
    are read, which Energon has stored beside them. Other remote files: index a local copy, and upload index.json and
    the files .penstock-index with it.

    Args:
        folder: folder with files of one format: Parquet (.parquet), Arrow IPC (.arrow), JSON lines (.jsonl, .ndjson),
            CSV and TSV with a header (.csv, .tsv), tar archives of WebDataset (.tar), TFRecord (.tfrecord and the
            like), ArrayRecord (.array_record and the like), Megatron-core's token files (.bin beside .idx), or a
            Dataset or DatasetDict of Hugging Face datasets that `save_to_disk` wrote. A DatasetDict gets an index in
            the folder of each split. A folder that Megatron Energon prepared keeps its splits and
            fields. Beside each file of lines, rows, tar members or TFRecords a file .penstock-index is written. A
            remote folder is any URL that fsspec opens.
        format: "parquet", "arrow", "json_lines", "csv_rows", "webdataset", "tfrecord", "array_record" or "megatron";
            None: the format of the files in the folder. "-example" or "-bytes" after "tfrecord" or "array_record" gives
            the kind of the records; without it, records are read as examples (tf.train.Example) if the first record of
            each file is one.
        out: local folder that the index and the files .penstock-index are written to; None: the dataset's folder. Use
            it for a folder that you cannot write to, and give it as `local` of the StreamingDataset.
        storage_options: keyword arguments for fsspec's filesystem.
        ranges: True: readers of a remote folder fetch only the parts of large files that they need. False: they fetch
            whole files. The order of samples is the same.
        timeout_s: seconds for each request to a remote folder.

    Returns the shards. Raises InvalidArgumentError, DatasetError, ShardCorruptError.
    """
    if format is not None and format not in (PARQUET, *INDEXABLE):
        raise InvalidArgumentError(f"format must be one of {', '.join((PARQUET, *INDEXABLE))}, got {format!r}")
    remote = RemoteFolder(folder, storage_options)
    if remote.local is None:
        shards = index_prepared(remote, out, ranges=ranges, timeout_s=timeout_s) if format != PARQUET else None
        if shards is None and format not in (None, PARQUET):
            raise DatasetError(
                f"{remote.url} must be a folder that Megatron Energon prepared, or a local one, to be indexed as "
                f"{format}. Index a local copy, and upload its index.json and its files .penstock-index"
            )
        if shards is None:
            return index_parquet(folder, storage_options=storage_options, out=out, ranges=ranges, timeout_s=timeout_s)
        return shards
    root = remote.local
    if not root.is_dir():
        raise DatasetError(f"{root} must be a folder with a dataset's files. Correct the path")
    splits = saved_splits(root) if format in (None, "arrow") else None
    if splits is not None:
        below = {split: None if out is None else Path(out) / split for split in splits}
        return join_indexes(
            [(split, index_folder(root / split, "arrow", out=below[split], ranges=ranges)) for split in splits]
        )
    return _index_local(root, format, root if out is None else Path(out).absolute(), ranges)


def _index_local(root: Path, format: str | None, out: Path, ranges: bool) -> list[Shard]:
    """Index the files in a local folder. `out`: folder of the index; other arguments as in `index_folder`."""
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
    _refuse_written(out)
    if name == PARQUET:
        return index_parquet(root, out=None if out == root else out, ranges=ranges)
    _refuse_packed(root, files, name)
    out.mkdir(parents=True, exist_ok=True)
    shards = INDEXABLE[name].join(root, index_each(root, named, name, out))
    if not any(shard.samples for shard in shards):
        raise DatasetError(
            f"{root} must have at least one sample, but its {len(shards)} files of {name} have none. Wait until their "
            "writer has ended, or give another folder"
        )
    shards = shards if ranges else [replace(shard, spans=(), ranges=()) for shard in shards]
    notes = prepared_note(root) if name == "webdataset" else {}
    warn_of_loader(notes, str(root))
    if out != root:
        notes |= {SOURCE_NOTE: str(root)}
    write_whole(out / INDEX, write_index(shards, notes))
    return shards


def _refuse_written(out: Path) -> None:
    """Raise DatasetError if the index in the folder is one that a writer of shards wrote, because it would be
    replaced."""
    path = out / INDEX
    if not path.exists():
        return
    written = {shard.format for shard in read_index(path.read_bytes(), str(path))} - {PARQUET, *INDEXABLE}
    if written:
        raise DatasetError(
            f"{path} must not be replaced, because a writer made it for shards of {', '.join(sorted(written))}. Read "
            "the folder as it is, or move the other files to a folder of their own"
        )


def _refuse_packed(root: Path, files: Sequence[Path], name: str) -> None:
    """Raise DatasetError if some files of the format `name` are compressed, because they would be left out."""
    for path in files:
        if path.suffix.lower() in PACKED and INDEXABLE[name].find(root, [path.with_suffix("")]):
            raise DatasetError(
                f"{path} must not be compressed, because samples are read in any order. Decompress it first"
            )


def _files(root: Path) -> list[Path]:
    """Return the files in a folder and its subfolders, in the order of their paths, without hidden and temporary
    ones."""
    found = [path for path in sorted(root.rglob("*")) if not is_hidden(path.relative_to(root).as_posix())]
    for path in found:
        if path.is_symlink() and not path.is_file():
            raise DatasetError(
                f"{path} must be a file or a folder, got a link to a folder or a broken link. Index the target of the "
                "link"
            )
    return [path for path in found if path.is_file()]
