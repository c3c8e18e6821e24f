"""Index of Parquet files where they lie: in a local folder, or in any folder that fsspec reaches.

mosaicml-streaming 0.13.0 has no Parquet shards, so an index that lists them is an extension of Penstock. It is made
from the files' footers, which contain the number of rows of each row group; nothing else of a file is read.
"""

from __future__ import annotations

import importlib
import io
import os
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import IO, Any

from penstock.data.formats.descriptors import Descriptor
from penstock.data.formats.index import INDEX, write_index
from penstock.data.formats.parquet.parquet_footer import TAIL_BYTES, footer_length, row_groups
from penstock.data.formats.shards import Shard, ShardFile, StoredFile
from penstock.data.remote.folders import RemoteFolder
from penstock.proto.errors import DatasetError, InvalidArgumentError, PenstockError, ShardCorruptError
from penstock.runtime.files.atomic_files import write_whole

__all__ = ["data_files", "index_parquet", "parquet_shards", "pyarrow_parquet"]

REMOTE_THREADS = 16
"""Number of remote files whose footers are read at a time."""
_WILD = re.compile(r"[*?\[]")


def pyarrow_parquet() -> Any:
    """Return the module pyarrow.parquet. Raises DatasetError if it is not installed."""
    try:
        return importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise DatasetError("Parquet files need the package pyarrow: pip install 'penstock[parquet]'") from error


def index_parquet(
    folder: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    out: str | os.PathLike[str] | None = None,
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
    names = data_files(found, pattern)
    if not names:
        what = "neither this folder nor one below it has a *.parquet file" if not pattern else f"no file is {pattern}"
        raise DatasetError(f"{remote.url}: {what} (hidden files, and those in _temporary and the like, do not count)")
    if local:
        shards = parquet_shards((name, local / name) for name in names)
        write_whole(local / INDEX, write_index(shards))
        return shards
    try:
        with ThreadPoolExecutor(REMOTE_THREADS) as threads:
            tails = list(threads.map(lambda name: _remote_tail(remote, name, timeout_s), names))
        shards = _shards((name, partial(_unchanged, tail)) for name, tail in zip(names, tails, strict=True))
        if out is None:
            remote.write(INDEX, write_index(shards), deadline_s=timeout_s)
        else:
            Path(out).mkdir(parents=True, exist_ok=True)
            write_whole(Path(out) / INDEX, write_index(shards))
    finally:
        remote.close()
    return shards


def parquet_shards(files: Iterable[tuple[str, Path | IO[bytes]]]) -> list[Shard]:
    """Return a shard for each file. `files`: (path relative to the dataset's folder, source of the footer) for each.

    All files must have columns of the same names, because a loader makes batches of rows from any of them. Raises
    DatasetError.
    """

    return _shards(
        (name, partial(_local_tail, source) if isinstance(source, Path) else partial(_opened_tail, source))
        for name, source in files
    )


def data_files(names: Iterable[str], pattern: str = "") -> list[str]:
    """Return the names that are data files, sorted. `names`: paths relative to the dataset's folder; `pattern`: pattern
    of the files, with wildcards; "" for all *.parquet."""
    matches = re.compile(_expression(pattern)).fullmatch if pattern else lambda name: name.endswith(".parquet")
    return sorted(
        name
        for name in names
        if matches(name) and not any(step[0] == "." or (step[0] == "_" and "=" not in step) for step in name.split("/"))
    )


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


def _shards(files: Iterable[tuple[str, Callable[[], tuple[bytes, int]]]]) -> list[Shard]:
    """Return a shard for each file. `files`: (name, function that returns the footer, to the file's end, and the file's
    size) for each."""
    library = pyarrow_parquet()
    shards: list[Shard] = []
    first: tuple[str, list[str]] | None = None
    for name, tail_of in files:
        try:
            tail, size = tail_of()
            groups = row_groups(tail[:-8])  # before pyarrow reads it, see parquet_footer.py
            footer = library.read_metadata(io.BytesIO(tail))
            columns = list(footer.schema.to_arrow_schema().names)
            if sum(group.rows for group in groups) != footer.num_rows:
                raise ValueError("its row groups have other numbers of rows together than the file")
        except PenstockError:
            raise
        except Exception as error:  # errors of pyarrow, of the system, and of the file's source
            raise ShardCorruptError(f"{name}: it is not a Parquet file: {error}") from error
        if len(set(columns)) != len(columns):
            raise DatasetError(f"{name}: the names of columns must be unique, got {', '.join(columns)}")
        if first is None:
            first = name, columns
        elif set(first[1]) != set(columns):
            raise DatasetError(
                f"all Parquet files of a dataset must have the same columns: {first[0]} has {', '.join(first[1])}, but "
                f"{name} has {', '.join(columns)}. Move files of other data into another folder"
            )
        shards.append(
            Shard(
                "parquet",
                footer.num_rows,
                (ShardFile(StoredFile(name, size)),),
                settings={"column_names": first[1]},
                blocks=tuple(group.rows for group in groups),
                decoded_bytes=sum(group.nbytes for group in groups),
            )
        )
    return shards


def _unchanged(tail: tuple[bytes, int]) -> tuple[bytes, int]:
    return tail


def _local_tail(path: Path) -> tuple[bytes, int]:
    opened = Descriptor(path)  # a plain file, so that nothing waits for a pipe or a device
    size = os.fstat(opened.fileno()).st_size
    length = footer_length(opened.read(8, max(0, size - 8)), size)
    return opened.read(length, size - length), size


def _opened_tail(source: IO[bytes]) -> tuple[bytes, int]:
    size = source.seek(0, os.SEEK_END)
    source.seek(max(0, size - 8))
    length = footer_length(source.read(8), size)
    source.seek(size - length)
    return source.read(length), size


def _remote_tail(remote: RemoteFolder, name: str, timeout_s: float) -> tuple[bytes, int]:
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
