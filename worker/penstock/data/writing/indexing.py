"""Indexing of files, in several processes if it takes long, with progress. Entries stay in a hidden file beside the
index, so a call continues one that was killed, and reads only new and changed files of a folder that has grown."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from penstock.data.formats.contents import of_pieces
from penstock.data.formats.descriptors import Descriptor
from penstock.data.formats.index import read_index, write_index
from penstock.data.formats.records.offset_file import ENDING
from penstock.data.formats.shards import Shard
from penstock.data.job_processes import in_processes, serve_jobs
from penstock.data.writing.indexable_files import INDEXABLE, IndexFile
from penstock.proto.errors import DatasetError
from penstock.runtime.files.atomic_files import write_whole
from penstock.runtime.telemetry.progress import FILES_S, Progress

STAMPS = ".penstock-indexed"
"""File with the entries of indexed files, each with the identity of the file's content."""
STAMPS_VERSION = 2
"""Increase it when a change of the code gives the same file another entry in the index: entries of older versions are
ignored, so all files are read again."""
PROGRAM = "penstock.data.writing.indexing"
MEASURE_S = 0.5
"""Seconds for which this process indexes files before it estimates the rest."""
WORTH_S = 2.0
"""Estimated seconds for the rest from which processes are started. Each takes 0.3 s of processor time to begin."""

Key = tuple[Any, ...]
"""Identity of a file's content: its name, bytes, and numbers or texts that change with the content."""


def index_files(root: Path, files: Sequence[tuple[str, Path]], format: str, out: Path) -> list[Shard]:
    """Return the shards of `files`, (path relative to the dataset's folder `root`, path) each. `format`: key of
    INDEXABLE; `out`: folder of the index. Files that have not changed since an earlier call are not read again. Raises
    DatasetError, and as `index_file`."""
    names = [name for name, _ in files]
    keys = {name: _key(root, name) for name in names}
    return continued(str(root), keys, format, out, lambda left: _shards(root, left, format, out))


def continued(
    where: str,
    keys: Mapping[str, Key],
    format: str,
    out: Path,
    index: Callable[[Sequence[str]], Generator[tuple[str, Shard], None, None]],
) -> list[Shard]:
    """Return the shards of the files in `keys` (name -> identity of the content), from STAMPS if an earlier call
    indexed them, else from `index`. `where`: address of the folder, for messages. Raises as `index_files`."""
    done = {name: entry for name, entry in _finished(out, format).items() if entry[0] == keys.get(name)}
    left, stamps = [name for name in keys if name not in done], out / STAMPS
    progress = Progress(FILES_S)
    try:
        if done:
            progress.show(f"{where}: {len(done)} of {len(keys)} files have not changed since they were indexed")
        write_whole(stamps, _head(format) + b"".join(_line(key, shard) for key, shard in done.values()))
        with stamps.open("ab") as log, contextlib.closing(index(left)) as found:
            for name, shard in found:
                done[name] = keys[name], shard
                _append(log, *done[name])
                progress.count(f"{where}: indexed", len(done), len(keys))
    except OSError as error:
        raise DatasetError(
            f"{stamps} cannot be written: {error}. Give index_folder an argument `out`, a folder that you can write to"
        ) from error
    finally:
        progress.finish()
    return [done[name][1] for name in keys]


def _shards(root: Path, names: Sequence[str], format: str, out: Path) -> Generator[tuple[str, Shard], None, None]:
    """Yield the name and shard of each file. Several processes share what would take more than WORTH_S."""
    index_file, began = INDEXABLE[format].index_file, time.monotonic()
    for count, name in enumerate(names, 1):
        yield name, index_one(index_file, root / name, name, out)
        left, spent = len(names) - count, time.monotonic() - began
        processes = min(len(os.sched_getaffinity(0)), left)
        if processes > 1 and spent >= MEASURE_S and spent / count * left >= WORTH_S:
            yield from _in_processes(root, names[count:], format, out, processes)
            return


def _in_processes(
    root: Path, names: Sequence[str], format: str, out: Path, processes: int
) -> Iterator[tuple[str, Shard]]:
    plan = {"root": str(root), "out": str(out), "names": names, "format": format}
    for said in in_processes(PROGRAM, json.dumps(plan).encode(), range(len(names)), processes):
        (shard,) = read_index(said["entry"].encode(), "the report of a process that indexes files")
        yield names[said["number"]], shard


def index_one(index_file: IndexFile, path: Path, name: str, out: Path) -> Shard:
    """Return the shard of a file, as `index_file` returns it. Raises DatasetError in place of an OSError."""
    try:
        shard = index_file(path, name, out)
        if shard.content or shard.format == "megatron":  # of a remote .bin file no byte is read
            return shard
        file = Descriptor(path)
        return replace(shard, content=of_pieces(file, shard.files[0].raw.size))
    except OSError as error:
        raise DatasetError(
            f"{name}: {path} cannot be read: {error}. Check that the file exists and that this user may read it"
        ) from error


def _key(root: Path, name: str) -> Key:
    try:
        status = (root / name).stat()
    except OSError as error:
        raise DatasetError(
            f"{root / name} cannot be read: {error}. Check that the file exists and that this user may read it"
        ) from error
    return name, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def _head(format: str) -> bytes:
    return json.dumps([STAMPS_VERSION, format]).encode() + b"\n"


def _line(key: Key, shard: Shard) -> bytes:
    return json.dumps([*key, write_index([shard]).decode()]).encode() + b"\n"


def _append(log: IO[bytes], key: Key, shard: Shard) -> None:
    log.write(_line(key, shard))
    log.flush()


def _finished(out: Path, format: str) -> dict[str, tuple[Key, Shard]]:
    """Return what STAMPS has: name -> (identity, shard), without the incomplete line of a killed run, and without files
    whose file of offsets is missing."""
    found = {}
    try:
        text = (out / STAMPS).read_bytes()
    except FileNotFoundError:
        return {}
    head = _head(format)
    for line in text.removeprefix(head).splitlines() if text.startswith(head) else ():
        try:
            *key, entry = json.loads(line)
            name, *numbers = key
            (shard,) = read_index(entry.encode(), STAMPS)
            whole = all(
                (out / file.raw.name).stat().st_size == file.raw.size
                for file in shard.files
                if file.raw.name.endswith(ENDING)
            )
        except (ValueError, TypeError, AttributeError, OSError, DatasetError):
            continue
        if whole:
            found[name] = (name, *numbers), shard
    return found


@contextlib.contextmanager
def index_jobs(plan: bytes) -> Iterator[Callable[[int], dict[str, Any]]]:
    """Yield a function that indexes the file with a given number. `plan`: JSON text of `index_files`."""
    task = json.loads(plan)
    root, out, names = Path(task["root"]), Path(task["out"]), task["names"]
    index_file = INDEXABLE[task["format"]].index_file

    def index(number: int) -> dict[str, Any]:
        shard = index_one(index_file, root / names[number], names[number], out)
        return {"number": number, "entry": write_index([shard]).decode()}

    yield index


if __name__ == "__main__":
    sys.exit(serve_jobs(index_jobs))
