"""Indexing of files that other libraries wrote, so that StreamingDataset can read them. The files are not changed."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from penstock.data.arguments import one_of
from penstock.data.formats.arrow.saved_datasets import saved_files, saved_note, saved_splits
from penstock.data.formats.compressed_files import SEQUENTIAL
from penstock.data.formats.index import SOURCE_NOTE, join_indexes, local_index, read_index
from penstock.data.formats.records.energon_folder import is_prepared, prepared_note
from penstock.data.formats.records.tar_samples import LAST_DOT
from penstock.data.formats.shards import Shard
from penstock.data.formats.splits import check_split, splits_of
from penstock.data.remote.file_versions import with_versions
from penstock.data.remote.folders import RemoteFolder, joined
from penstock.data.writing.dataset_files import (
    CARD,
    DatasetFiles,
    is_hidden,
    local_names,
    with_hashes,
    write_local_index,
    write_remote_index,
)
from penstock.data.writing.index_parquet import index_parquet, is_parquet, is_pattern
from penstock.data.writing.index_prepared import index_prepared, warn_of_loader
from penstock.data.writing.index_remote import StandIn
from penstock.data.writing.index_table import index_table
from penstock.data.writing.indexable_files import INDEXABLE
from penstock.data.writing.indexing import index_files
from penstock.data.writing.tables.recognise import table_at
from penstock.proto.errors import DatasetError, InvalidArgumentError

PARQUET = "parquet"
PACKED = (
    ".gz",
    ".gzip",
    ".zst",
    ".zstd",
    ".bz2",
    ".xz",
    ".lzma",
    ".lz4",
    ".zip",
    ".br",
    ".snappy",
    ".z",
    ".tgz",
    ".tzst",
)
IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff")


def index_folder(
    folder: str | os.PathLike[str],
    format: str | None = None,
    *,
    split: str | None = None,
    key: Literal["first_dot", "last_dot"] = "first_dot",
    hashes: bool = False,
    out: str | os.PathLike[str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    ranges: bool = True,
    timeout_s: float = 600.0,
) -> list[Shard]:
    """Write an index of another library's files in a folder and its subfolders, in the order of their paths; a dataset
    that `save_to_disk` or `energon prepare` wrote keeps its own order. StreamingDataset can then read them.

        index_folder("/data/saved_with_save_to_disk")
        dataset = StreamingDataset("/data/saved_with_save_to_disk", split="train")

        index_folder("s3://bucket/prepared", out="/data/cache")
        dataset = StreamingDataset("s3://bucket/prepared", "/data/cache", split="train")

    Many local files are indexed in several processes, with progress on standard error from the third second on. A call
    continues one that was killed, and skips files that have not changed (size, times and inode; of a remote file size
    and ETag or time). The hidden file .penstock-indexed beside the index lists them: remove it to have all read. Hidden
    files and folders, and those whose names begin with `_` and have no `=`, are left out; so are, with a warning, files
    that belong to no split where others do.

    Of remote Parquet files only the footers are read, of archives that Megatron Energon prepared only the offsets
    beside them, of Megatron-core's token files only the .idx files. Others are read once, as a whole, four at a time,
    and take their size on the disk (TMPDIR) meanwhile; with `out`, a later call does not read them again.

    Args:
        folder: folder, or any URL that fsspec opens, with files of one format: Parquet (.parquet), Arrow IPC (.arrow),
            JSON lines (.jsonl, .ndjson), CSV and TSV with a header (.csv, .tsv), tar archives of WebDataset (.tar),
            TFRecord (.tfrecord and the like), ArrayRecord (.array_record and the like), Megatron-core's token files
            (.bin beside .idx), or a Dataset or DatasetDict of Hugging Face datasets that `save_to_disk` wrote. A
            DatasetDict gets an index in each split's folder. A table of Delta Lake or Iceberg is indexed as by
            index_table. A folder that Megatron Energon prepared keeps its splits
            and fields. Each JSON lines, CSV, tar or TFRecord file gets a file of offsets in a folder __penstock__
            beside it.
        format: "parquet", "arrow", "json_lines", "csv_rows", "webdataset", "tfrecord", "array_record" or "megatron";
            None: that of the files. "-example" or "-bytes" after "tfrecord" or "array_record" gives the kind of the
            records; without it, they are examples (tf.train.Example) if the first one of each file is.
        split: None: the index has the files of all splits, which StreamingDataset's `split` chooses. Splits are those
            that the head of README.md lists (`configs`), or that the files' paths say by the rule of Hugging Face
            datasets: data/NAME-00000-of-00005, or a whole word such as train, valid, test in a folder's or a file's
            name. A name: index this split alone, in its own folder if there is one. "*": all files are one dataset.
        key: of tar archives: members are one sample if their paths are equal up to the "first_dot" of the file's name,
            as WebDataset has it, or up to the "last_dot": for `song v1.0.mp3` and `song v1.5.mp3`.
        hashes: True: read all files, and write a hash of each into the index. Fetched files are then verified by it,
            whole, and files in place with `validate_hash="xxh3_128"`.
        out: local folder for the index and the files of offsets; None: the dataset's folder. Use it for a folder
            that you cannot write to, and give it as `local` of the StreamingDataset.
        storage_options: keyword arguments for fsspec's filesystem.
        ranges: True: readers of a remote folder fetch only the parts of large files that they need. False: they fetch
            whole files. The order of samples is the same.
        timeout_s: seconds for each request to a remote folder.

    Returns the shards. Raises InvalidArgumentError, DatasetError, ShardCorruptError, ShardUnavailableError.
    """
    if key != "first_dot":
        one_of("key", key, ("first_dot", LAST_DOT))
        if format not in (None, "webdataset"):
            raise InvalidArgumentError(f'key must be "first_dot" for format {format!r}, got {key!r}')
        format = f"webdataset-{key}"
    if format is not None and format not in (PARQUET, *INDEXABLE):
        raise InvalidArgumentError(f"format must be one of {', '.join((PARQUET, *INDEXABLE))}, got {format!r}")
    if format in (None, PARQUET) and table_at(folder, storage_options, timeout_s):
        return index_table(folder, out=out, storage_options=storage_options, timeout_s=timeout_s)
    check_split(split)
    remote = RemoteFolder(folder, storage_options)
    root = remote.local
    if root is None:
        return _index_remote(remote, format, split, out, storage_options, ranges, hashes, timeout_s)
    if not root.is_dir():
        raise DatasetError(f"{root} must be a folder with a dataset's files, got no folder. Correct the path")
    if split and (root / split).is_dir():
        return _index_splits([split], str(root), format, out, ranges=ranges, hashes=hashes)
    splits = saved_splits(root) if format in (None, "arrow") else None
    if splits is not None:
        return _index_splits(splits, str(root), "arrow", out, ranges=ranges, hashes=hashes)
    return _index_local(root, format, split, root if out is None else Path(out).absolute(), ranges, hashes)


def _index_splits(
    splits: Sequence[str], address: str, format: str | None, out: str | os.PathLike[str] | None, **options: Any
) -> list[Shard]:
    below = {split: None if out is None else Path(out) / split for split in splits}
    return join_indexes(
        (split, index_folder(joined(address, split), format, out=below[split], **options)) for split in splits
    )


def _index_local(
    root: Path, format: str | None, split: str | None, out: Path, ranges: bool, hashes: bool
) -> list[Shard]:
    name, named = _found(root, format, str(root))
    _refuse_written(out)
    if name == PARQUET:
        return index_parquet(root, out=None if out == root else out, split=split, ranges=ranges, hashes=hashes)
    files, named = _chosen(root, named, name, split, str(root))
    out.mkdir(parents=True, exist_ok=True)
    shards = files.completed(_joined(root, str(root), name, index_files(root, named, name, out), ranges))
    shards = with_hashes(shards, RemoteFolder(root), out, 0.0) if hashes else shards
    notes = files.notes | (prepared_note(root) if name.startswith("webdataset") else {}) | saved_note(root)
    warn_of_loader(notes, str(root))
    if out != root:
        notes |= {SOURCE_NOTE: str(root)}
    write_local_index(out, shards, notes)
    return shards


def _index_remote(
    remote: RemoteFolder,
    format: str | None,
    split: str | None,
    out: str | os.PathLike[str] | None,
    storage_options: Mapping[str, Any] | None,
    ranges: bool,
    hashes: bool,
    timeout_s: float,
) -> list[Shard]:
    options: dict[str, Any] = {"timeout_s": timeout_s, "storage_options": storage_options}
    options |= {"ranges": ranges, "hashes": hashes}
    if format == PARQUET or is_pattern(remote.address):
        return index_parquet(remote.address, out=out, split=split, **options)
    with tempfile.TemporaryDirectory(prefix="penstock-index-") as scratch, contextlib.closing(remote):
        prepared = index_prepared(remote, out, ranges=ranges, hashes=hashes, timeout_s=timeout_s)
        if prepared is not None:
            return prepared
        root, made = Path(scratch, "files"), Path(scratch, "out") if out is None else Path(out)
        root.mkdir()
        stand_in = StandIn(remote, root, timeout_s)
        stand_in.fill()
        if split and (root / split).is_dir():
            return _index_splits([split], remote.address, format, out, **options)
        splits = saved_splits(root) if format in (None, "arrow") else None
        if splits is not None:
            return _index_splits(splits, remote.address, "arrow", out, **options)
        name, named = _found(root, format, remote.url)
        if name == PARQUET:
            return index_parquet(remote.address, out=out, split=split, **options)
        files, named = _chosen(root, named, name, split, remote.url)
        made.mkdir(parents=True, exist_ok=True)
        shards = files.completed(_joined(root, remote.url, name, stand_in.index_files(named, name, made), ranges))
        shards = with_hashes(shards, remote, made, timeout_s) if hashes else with_versions(shards, remote, timeout_s)
        notes = files.notes | saved_note(root)
        if out is None:
            stand_in.upload(shards, made)
            write_remote_index(remote, shards, notes, timeout_s)
        else:
            write_local_index(made, shards, notes)
        return shards


_JSON_REMEDY = (
    "name those of JSON lines .jsonl to index them, or read them in sequence, by LogicalShards([LineFile(path), ...])"
)


def _found(root: Path, format: str | None, where: str) -> tuple[str, list[tuple[str, Path]]]:
    files, found = [root / name for name in local_names(root) if not is_hidden(name)], {}
    for name in [format] if format else [PARQUET, *(name for name in INDEXABLE if "-" not in name)]:
        own = (
            [path for path in files if is_parquet(path.name)] if name == PARQUET else INDEXABLE[name].find(root, files)
        )
        if own:
            found[name] = [(path.relative_to(root).as_posix(), path) for path in own]
    if len(found) != 1:
        _refuse_packed(root, files, found or INDEXABLE)
        if not found and any(path.suffix.lower() == ".json" for path in files):
            raise DatasetError(f"{where} has .json files: {_JSON_REMEDY}")
        images = [path for path in files if path.suffix.lower() in IMAGES]
        if not found and images:
            raise DatasetError(
                f"{where} has {len(images)} images, such as {images[0].relative_to(root)}, which need no index: read "
                "class folders by DataLoader(torchvision.datasets.ImageFolder(PATH), batch_size=, shuffle=True), or "
                "pack them into shards by MDSWriter, as docs/recipe_images.md does"
            )
        raise DatasetError(
            f"{where} must have files of one format ({', '.join((PARQUET, *INDEXABLE))}), got "
            f"{' and '.join(f'{len(own)} of {name}' for name, own in found.items()) or 'none'}. Pass format, or "
            "another folder"
        )
    [(name, named)] = found.items()
    beside = [path.relative_to(root).as_posix() for path in files if path.suffix.lower() == ".json"]
    if not format and (named_splits := splits_of(beside)):  # its other split would silently be the whole dataset
        split, (file, *_) = next(iter(named_splits.items()))
        raise DatasetError(
            f"{where} has {len(named)} files of {name}, and {file}, which may be its split {split}: pass "
            f"format={name!r} to leave .json files out, or {_JSON_REMEDY}"
        )
    if name != PARQUET:
        _refuse_packed(root, files, [name])
    return name, named


def _chosen(
    root: Path, named: list[tuple[str, Path]], format: str, split: str | None, where: str
) -> tuple[DatasetFiles, list[tuple[str, Path]]]:
    names = [name for name, _ in named]
    keeps_own = (format.startswith("webdataset") and is_prepared(root)) or (format == "arrow" and saved_files(root))
    if keeps_own and split is not None:
        raise InvalidArgumentError(
            f"{where}: split must be None, got {split!r}, because the folder lists its files itself. Index it without "
            "split, and pass split to StreamingDataset"
        )
    card = (root / CARD).read_bytes if (root / CARD).is_file() else None
    files = DatasetFiles(names, {}) if keeps_own else DatasetFiles.of(names, split, where, card)
    chosen = set(files.names)
    return files, [(name, path) for name, path in named if name in chosen]


def _joined(root: Path, where: str, format: str, shards: list[Shard], ranges: bool) -> list[Shard]:
    shards = INDEXABLE[format].join(root, shards)
    if not any(shard.samples for shard in shards):
        raise DatasetError(f"{where} must have at least one sample, but its {len(shards)} files of {format} have none")
    return shards if ranges else [replace(shard, spans=(), ranges=()) for shard in shards]


def _refuse_written(out: Path) -> None:
    """Refuse to replace an index that a Writer wrote, for shards of a format that index_folder cannot index."""
    path = local_index(out)
    if not path.exists():
        return
    written = {shard.format for shard in read_index(path.read_bytes(), str(path))} - {PARQUET, *INDEXABLE}
    if written:
        raise DatasetError(
            f"{path} must not be replaced, because a writer made it for shards of {', '.join(sorted(written))}"
        )


def _refuse_packed(root: Path, files: Sequence[Path], formats: Iterable[str]) -> None:
    for path in files:
        plain = path.with_name(f"{path.stem}.tar") if path.suffix.lower() in (".tgz", ".tzst") else path.with_suffix("")
        if path.suffix.lower() not in PACKED:
            continue
        kinds = [name for name in formats if name != PARQUET and INDEXABLE[name].find(root, [plain])]
        if kinds:
            lines = SEQUENTIAL.keys() & {path.suffix.lower()} and kinds[0] in ("json_lines", "csv_rows")
            remedy = (
                "Read it in sequence, by LogicalShards([LineFile(path), ...]), or decompress it"
                if lines
                else "Decompress it first"
            )
            raise DatasetError(f"{path} must not be compressed, because samples are read in any order. {remedy}")
