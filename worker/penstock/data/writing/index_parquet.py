"""Index of Parquet files where they lie: in a local folder, or in any folder that fsspec reaches."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from penstock.data.formats.index import INDEX, write_index
from penstock.data.formats.parquet.parquet_footer import TAIL_BYTES, footer_length
from penstock.data.formats.parquet.parquet_shards import Tail, parquet_shards, shards_of_tails
from penstock.data.formats.shards import Shard
from penstock.data.remote.folders import RemoteFolder
from penstock.proto.errors import DatasetError, InvalidArgumentError, ShardCorruptError
from penstock.runtime.files.atomic_files import write_whole

__all__ = ["data_files", "index_parquet", "is_hidden"]

REMOTE_THREADS = 16
"""Number of remote files whose footers are read at a time."""
TABLE_FORMATS = re.compile(r"(^|/)(_delta_log/|\.hoodie/|metadata/[^/]*\.metadata\.json$)")
"""Files of tables whose own logs say which of their Parquet files count."""
_WILD = re.compile(r"[*?\[]")


def index_parquet(
    folder: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    out: str | os.PathLike[str] | None = None,
    ranges: bool = True,
    timeout_s: float = 600.0,
) -> list[Shard]:
    """Write an index of all Parquet files in a folder and its subfolders, in the order of their paths. StreamingDataset
    can then read them. Only the files' footers are read.

    Hidden files and folders are left out, and those whose name begins with `_` and has no `=`: jobs of Spark and others
    write to `_temporary` and `_tmp`, and their logs lie in such folders.

    Args:
        folder: local path, or any URL that fsspec opens. From the first step of it that has a wildcard (`*`, `**`, `?`,
            `[...]`) it is a pattern of the files; the dataset's folder is what lies before.
        storage_options: keyword arguments for fsspec's filesystem.
        out: local folder that the index is written to; None: the dataset's folder. Use it for a remote folder that you
            cannot write to, and give it as `local` of the StreamingDataset.
        ranges: True: readers of a remote folder fetch only the row groups that they need, if the server knows ranges.
            False: they fetch whole files. The order of samples is the same.
        timeout_s: seconds for each request to a remote folder.

    Returns the shards: a file each, with its row groups as blocks. Raises DatasetError; ShardCorruptError, which names
    the file; ShardUnavailableError; InvalidArgumentError.
    """
    root, pattern = _split(os.fspath(folder))
    remote = RemoteFolder(root, storage_options)
    if remote.local and out is not None:
        raise InvalidArgumentError(
            f"out is for remote folders, got the local folder {root}: the index of a local folder lies in it"
        )
    local = remote.local
    if local:
        found = [path.relative_to(local).as_posix() for path in local.rglob("*") if not path.is_dir()]
    else:
        found = remote.find(deadline_s=timeout_s)
    tables = [name for name in found if TABLE_FORMATS.search(name)]
    if tables:
        raise DatasetError(
            f"{remote.url} must be plain Parquet files, but {tables[0]} is of a Delta Lake, Hudi or Iceberg table, of "
            "whose files some may be removed: write its rows to a folder of their own"
        )
    names = data_files(found, pattern)
    if not names:
        what = "neither this folder nor one below it has a *.parquet file" if not pattern else f"no file is {pattern}"
        raise DatasetError(f"{remote.url}: {what} (hidden files, and those in _temporary and the like, do not count)")
    if local:
        shards = parquet_shards((name, local / name) for name in names)
        shards = shards if ranges else [replace(shard, ranges=()) for shard in shards]
        write_whole(local / INDEX, write_index(shards))
        return shards
    try:
        with ThreadPoolExecutor(REMOTE_THREADS) as threads:
            tails = list(threads.map(lambda name: _remote_tail(remote, name, timeout_s), names))
        shards = shards_of_tails((name, partial(_unchanged, tail)) for name, tail in zip(names, tails, strict=True))
        shards = shards if ranges else [replace(shard, ranges=()) for shard in shards]
        if out is None:
            remote.write(INDEX, write_index(shards), deadline_s=timeout_s)
        else:
            Path(out).mkdir(parents=True, exist_ok=True)
            write_whole(Path(out) / INDEX, write_index(shards))
    finally:
        remote.close()
    return shards


def data_files(names: Iterable[str], pattern: str = "") -> list[str]:
    """Return the names that are data files, sorted. `names`: paths relative to the dataset's folder; `pattern`: pattern
    of the files, with wildcards; "" for all *.parquet."""
    matches = re.compile(_expression(pattern)).fullmatch if pattern else lambda name: name.lower().endswith(".parquet")
    return sorted(name for name in names if matches(name) and not is_hidden(name))


def is_hidden(name: str) -> bool:
    """Return True for a path with a step that begins with `.`, or with `_` and has no `=`. `name`: path relative to the
    dataset's folder."""
    return any(step[0] == "." or (step[0] == "_" and "=" not in step) for step in name.split("/"))


def _split(folder: str) -> tuple[str, str]:
    """Return the folder before the first step with a wildcard, and the pattern of the files below it; "" without a
    wildcard. In an address of http, `?` begins the query."""
    scheme, mark, path = folder.rpartition("://")
    wild = re.compile(r"[*\[]") if scheme.startswith("http") else _WILD
    steps = path.split("/")
    first = next((number for number, step in enumerate(steps) if wild.search(step)), None)
    if first is None or os.path.isdir(folder):
        return folder, ""
    return scheme + mark + ("/".join(steps[:first]) or ("/" if path.startswith("/") else ".")), "/".join(steps[first:])


def _expression(pattern: str) -> str:
    """Return the regular expression of a pattern with wildcards."""
    kinds = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\[[^\]/]+\])", pattern)
    return "".join(
        kinds.get(part) or (part.replace("[!", "[^") if part.startswith("[") and len(part) > 2 else re.escape(part))
        for part in parts
    )


def _unchanged(tail: Tail) -> Tail:
    return tail


def _remote_tail(remote: RemoteFolder, name: str, timeout_s: float) -> Tail:
    size = remote.size(name, deadline_s=timeout_s)
    begin = max(0, size - TAIL_BYTES)
    tail = remote.read_range(name, begin, size, deadline_s=timeout_s)
    try:
        length = footer_length(tail[-8:], size)
    except ValueError as error:
        raise ShardCorruptError(f"{remote.url_of(name)}: it is not a Parquet file: {error}") from error
    if length > len(tail):
        tail = remote.read_range(name, size - length, begin, deadline_s=timeout_s) + tail
    return tail[-length:], size
