"""Indexing of files, several at a time, with progress. A later call continues after a kill."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import IO

from penstock.data.formats.index import read_index, write_index
from penstock.data.formats.shards import Shard
from penstock.proto.errors import DatasetError
from penstock.runtime.files.atomic_files import write_whole
from penstock.runtime.telemetry.progress import FILES_S, Progress

__all__ = ["JOURNAL", "index_each"]

JOURNAL = ".penstock-indexing"
"""Name of the file with the entries of the files that are finished, while a folder is indexed."""

_Key = tuple[str, int, int, int, int]
"""Identity of a file's content: name, size in bytes, mtime and ctime in nanoseconds, inode number."""


def index_each(root: Path, files: Sequence[tuple[str, Path]], index_file: Callable[[Path, str], Shard]) -> list[Shard]:
    """Return the shards of files, in their order. `root`: the dataset's folder; `files`: (path relative to it, path) of
    each; `index_file`: function from (path, relative path) to a shard.

    Files that an earlier call finished, and that have not changed since, are not read again. The caller removes
    JOURNAL from the dataset's folder once the index is written. Raises DatasetError, and what `index_file` raises.
    """
    names = [name for name, _ in files]
    keys = {name: _key(root, name) for name in names}
    done = {name: entry for name, entry in _finished(root).items() if entry[0] == keys.get(name)}
    journal = root / JOURNAL
    try:
        write_whole(journal, b"".join(_line(key, shard) for key, shard in done.values()))
        with journal.open("ab") as log, ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            waiting = {pool.submit(_indexed, index_file, root / name, name): name for name in names if name not in done}
            progress = Progress(FILES_S)
            try:
                for future in as_completed(waiting):
                    name = waiting[future]
                    done[name] = keys[name], future.result()
                    _append(log, *done[name])
                    progress.update(f"{root}: indexed {len(done)} of {len(names)} files")
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
            finally:
                progress.finish()
    except OSError as error:
        raise DatasetError(
            f"{journal} cannot be written: {error}. Index a copy of the folder that you can write to"
        ) from error
    return [done[name][1] for name in names]


def _indexed(index_file: Callable[[Path, str], Shard], path: Path, name: str) -> Shard:
    try:
        return index_file(path, name)
    except OSError as error:
        raise DatasetError(
            f"{name}: {path} cannot be read: {error}. Check that the file exists and that this user may read it"
        ) from error


def _key(root: Path, name: str) -> _Key:
    try:
        status = (root / name).stat()
    except OSError as error:
        raise DatasetError(
            f"{root / name} cannot be read: {error}. Check that the file exists and that this user may read it"
        ) from error
    return name, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def _line(key: _Key, shard: Shard) -> bytes:
    return json.dumps([*key, write_index([shard]).decode()]).encode() + b"\n"


def _append(log: IO[bytes], key: _Key, shard: Shard) -> None:
    log.write(_line(key, shard))
    log.flush()


def _finished(root: Path) -> dict[str, tuple[_Key, Shard]]:
    """Return the files that an earlier run finished. A line that a kill cut short does not count, and a file whose file
    of offsets is missing does not either."""
    found = {}
    try:
        lines = (root / JOURNAL).read_bytes().splitlines()
    except FileNotFoundError:
        return {}
    for line in lines:
        try:
            *key, entry = json.loads(line)
            name, *numbers = key
            (shard,) = read_index(entry.encode(), JOURNAL)
            whole = all((root / file.raw.name).stat().st_size == file.raw.size for file in shard.files)
        except (ValueError, TypeError, AttributeError, OSError, DatasetError):
            continue
        if whole:
            found[name] = (name, *numbers), shard
    return found
