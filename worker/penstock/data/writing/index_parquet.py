"""Indexing of Parquet files in place: in a local folder, or in any folder that fsspec reaches."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from penstock.data.arguments import truth
from penstock.data.formats.index import SOURCE_NOTE
from penstock.data.formats.parquet.footer import TAIL_BYTES, footer_length
from penstock.data.formats.parquet.shards import Tail, parquet_shards, shards_of_tails
from penstock.data.formats.shards import Shard
from penstock.data.remote.file_versions import with_versions
from penstock.data.remote.folders import RemoteFolder
from penstock.data.writing.dataset_files import (
    CARD,
    DatasetFiles,
    is_hidden,
    local_names,
    matching,
    with_hashes,
    write_local_index,
    write_remote_index,
)
from penstock.data.writing.tables.recognise import refuse_tables
from penstock.proto.errors import DatasetError, ShardCorruptError

REMOTE_THREADS = 16
"""Remote files whose footers are read at the same time."""
_WILD = re.compile(r"[*?\[]")


def index_parquet(
    folder: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    out: str | os.PathLike[str] | None = None,
    split: str | None = None,
    hashes: bool = False,
    ranges: bool = True,
    timeout_s: float = 600.0,
) -> list[Shard]:
    """Write an index of all Parquet files in a folder and its subfolders, in the order of their paths, for
    StreamingDataset. Only the files' footers are read.

    Hidden files and folders are left out, and those whose name begins with `_` and has no `=`: jobs of Spark and others
    write to `_temporary` and `_tmp`, and their logs lie in such folders.

    Args:
        folder: local path, or any URL that fsspec opens. A path with wildcards (`*`, `**`, `?`, `[...]`) is a pattern
            of the files; the dataset's folder is then the part before the first wildcard.
        storage_options: keyword arguments for fsspec's filesystem.
        out: local folder for the index; None: the dataset's folder. Use it for a folder that you cannot write to, and
            give it as `local` of the StreamingDataset.
        split, hashes: as in `index_folder`.
        ranges: True: readers of a remote folder fetch only the row groups that they need, if the server allows it.
            False: they fetch whole files. The order of samples is the same.
        timeout_s: seconds for each request to a remote folder.

    Returns the shards: a file each, with its row groups as blocks. Raises DatasetError, ShardCorruptError,
    ShardUnavailableError, InvalidArgumentError.
    """
    truth("ranges", ranges)
    truth("hashes", hashes)
    root, pattern = _split(os.fspath(folder))
    remote = RemoteFolder(root, storage_options)
    local = remote.local
    found = local_names(local, pattern) if local else remote.find(deadline_s=timeout_s)
    refuse_tables(remote, found, storage_options, timeout_s)
    names = sorted(matching(found, pattern) if pattern else filter(is_parquet, found))
    names = [name for name in names if not is_hidden(name)]
    if not names:
        what, remedy = (
            (f"a file must match the pattern {pattern}", "Correct the pattern")
            if pattern
            else ("the folder and its subfolders must have a *.parquet file", "Give the folder of the files")
        )
        raise DatasetError(f"{remote.url}: {what}, got none; hidden files and folders are ignored. {remedy}")
    card = partial(remote.read, CARD, deadline_s=timeout_s) if CARD in found else None
    files = DatasetFiles.of(names, split, remote.url, card)
    if local:
        place = local if out is None else Path(out)
        shards = files.completed(parquet_shards((name, local / name) for name in files.names))
        shards = with_hashes(shards, remote, None, timeout_s) if hashes else shards
        shards = shards if ranges else [replace(shard, ranges=()) for shard in shards]
        source = {} if out is None else {SOURCE_NOTE: str(local)}
        write_local_index(place, shards, source | files.notes)
        return shards
    try:
        with ThreadPoolExecutor(REMOTE_THREADS) as threads:
            read = threads.map(lambda name: remote_tail(remote, name, timeout_s), files.names)
            tails = dict(zip(files.names, read, strict=True))
        shards = shards_of_tails((name, partial(tails.__getitem__, name)) for name in files.names)
        shards = files.completed(shards)
        shards = with_hashes(shards, remote, None, timeout_s) if hashes else with_versions(shards, remote, timeout_s)
        shards = shards if ranges else [replace(shard, ranges=()) for shard in shards]
        if out is None:
            write_remote_index(remote, shards, files.notes, timeout_s)
        else:
            write_local_index(Path(out), shards, files.notes)
    finally:
        remote.close()
    return shards


def is_parquet(name: str) -> bool:
    return name.lower().endswith(".parquet")


def is_pattern(folder: str) -> bool:
    return bool(_split(folder)[1])


def _split(folder: str) -> tuple[str, str]:
    """Return the path before its first part with a wildcard, and the rest ("" without one). In an http address, `?` is
    no wildcard, because it begins the query."""
    scheme, mark, path = folder.rpartition("://")
    wild = re.compile(r"[*\[]") if scheme.startswith("http") else _WILD
    steps = path.split("/")
    first = next((number for number, step in enumerate(steps) if wild.search(step)), None)
    if first is None or os.path.isdir(folder):
        return folder, ""
    return scheme + mark + ("/".join(steps[:first]) or ("/" if path.startswith("/") else ".")), "/".join(steps[first:])


def remote_tail(remote: RemoteFolder, name: str, timeout_s: float) -> Tail:
    size = remote.size(name, deadline_s=timeout_s)
    begin = max(0, size - TAIL_BYTES)
    tail = remote.read_range(name, begin, size, deadline_s=timeout_s)
    try:
        length = footer_length(tail[-8:], size)
    except ValueError as error:
        raise ShardCorruptError(
            f"{remote.url_of(name)} must be a Parquet file: {error}. Write the file again, or move it out of the folder"
        ) from error
    if length > len(tail):
        tail = remote.read_range(name, size - length, begin, deadline_s=timeout_s) + tail
    return tail[-length:], size
