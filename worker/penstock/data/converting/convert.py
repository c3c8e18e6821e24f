"""Conversion of a dataset of any format that Penstock reads to MDS or Parquet.

Each shard of the source is a part, or several if it is large; consecutive small shards are one part. A part is written
into a folder of its own, read back and compared, and then gets its index; several processes convert parts at a time.
When all parts are finished, their indexes are merged into the index of the result. So a run may be killed at any
moment, and the next one makes only the parts that are not finished.

Samples keep their numbers. Unless keep_order=False, the index notes how the source's shards divided the samples
(indexes/order_layout.py). Then the result is shuffled in the source's order, and a state that a job saved with the
source can be resumed on the result.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.data.arguments import at_least_one, truth
from penstock.data.cache.file_locks import FileLock, take
from penstock.data.cache.shard_cache import ShardCache
from penstock.data.converting.argument_names import ARGUMENTS, ArgumentNames
from penstock.data.converting.conversion_plan import ConversionPlan, parts_of
from penstock.data.converting.convert_part import PartConverter, shard_digests, source_of
from penstock.data.converting.target_columns import TargetColumn, mds_columns, parquet_columns
from penstock.data.converting.target_settings import target_settings
from penstock.data.formats.index import INDEX, index_notes, join_indexes, read_index, write_index
from penstock.data.formats.parquet.extension_types import storage_of
from penstock.data.formats.readers import open_shard
from penstock.data.formats.shards import ReadOptions, Shard, rows_of
from penstock.data.indexes.order_layout import OrderLayout
from penstock.data.indexes.shard_table import ListedShards
from penstock.data.job_processes import in_processes
from penstock.data.remote.folders import RemoteFolder
from penstock.data.writing.uploads import writable_remote
from penstock.proto.errors import DatasetError, InvalidArgumentError, ShardUnavailableError
from penstock.runtime.files.atomic_files import sync_folder
from penstock.runtime.telemetry.progress import FILES_S, Progress

__all__ = ["Converted", "convert_dataset"]

MARKER = ".penstock-converting"
"""Name of the file in the result's folder that identifies an unfinished conversion."""
SAMPLED_SHARDS, SAMPLED_ROWS = 8, 64
"""Largest number of shards, and of rows in each of them, that are read to choose the types of columns."""
ARROW_FILE = b"ARROW1"
"""First bytes of a file in Arrow's file format. Its stream format begins with other bytes."""
PROCESS_BYTES = 128 << 20
"""Number of bytes of data for which a process is started: with fewer, starting it takes longer than it saves."""
THREADS = 16
"""Number of small files that are read or removed at the same time."""
PROGRAM = "penstock.data.converting.part_process"


@dataclass(frozen=True)
class Converted:
    """Result of a conversion."""

    shards: list[Shard]
    """Shards of the result, as its index lists them."""
    samples: int
    digest: str
    """Digest of all rows as a reader of the result gets them, made from the digests of the parts: hexadecimal text.
    Results in MDS and in Parquet have the same digest, unless values of a column were changed for one of them, such as
    times to text."""
    parts: int
    """Number of parts into which the conversion was divided. This call converted `made` of them; an earlier call had
    finished the others."""
    made: int
    columns: Mapping[str, str]
    """Type of each column: the encoding of MDS, or Arrow's type."""


def convert_dataset(
    source: str | os.PathLike[str],
    dest: str | os.PathLike[str],
    to: str,
    *,
    columns: Sequence[str] | None = None,
    types: Mapping[str, str] | None = None,
    compression: str | None = "default",
    hashes: Collection[str] | None = None,
    size_limit: int | str | None = None,
    keep_order: bool = True,
    verify: bool = True,
    processes: int | None = None,
    source_options: Mapping[str, Any] | None = None,
    dest_options: Mapping[str, Any] | None = None,
    timeout_s: float = 600.0,
    names: ArgumentNames = ARGUMENTS,
) -> Converted:
    """Convert a dataset to MDS or Parquet, in parallel. A call continues an earlier one that was killed.

        convert_dataset("/data/web", "s3://bucket/web", "mds")

    Progress is printed on standard error from the third second on.

    Args:
        source: folder of the dataset, local or any URL that fsspec opens. It must have an index.
        dest: folder of the result, local or a URL; empty, or with the same conversion, which was killed or has
            finished.
        to: "mds" or "parquet".
        columns: names of the columns to convert; None: all.
        types: types of some columns, instead of those that are chosen from samples: MDS encodings, or Arrow's types by
            name; "json" stores JSON.
        compression: compression of the files: for MDS as in MDSWriter, for Parquet as in pyarrow; "default": none for
            MDS, zstd for Parquet.
        hashes: hash algorithms of MDS files, as in MDSWriter; None: xxh64.
        size_limit: largest size of an MDS shard in bytes (64 MiB), or of the values in a row group of Parquet (16 MiB).
        keep_order: True: the result has the order of the source, so states that were saved with the source can be
            resumed on the result. False: the result's own shards decide its order.
        verify: True: read each part back, and compare its rows with those that were written.
        processes: number of processes; None: one for each processor, but no more than one for each 128 MiB of data.
        source_options, dest_options: keyword arguments for fsspec's filesystems.
        timeout_s: seconds for each file of a remote.
        names: names of these arguments in errors; commands pass those of their options.

    Raises InvalidArgumentError, DatasetError, ShardCorruptError, ShardUnavailableError.
    """
    settings = target_settings(to, compression, hashes, size_limit, names)
    workers = None if processes is None else at_least_one(names.of("processes"), processes)
    truth("keep_order", keep_order)
    truth("verify", verify)
    remote = writable_remote(os.fspath(dest), dest_options)
    with tempfile.TemporaryDirectory(prefix="penstock-convert-") as scratch, contextlib.closing(remote):
        origin = source_of(os.fspath(source), source_options, scratch, limit=None, timeout_s=timeout_s)
        try:
            text = origin.index().read_all()
            shards = read_index(text, os.fspath(source))
            size = sum(shard.size for shard in shards)
            workers = workers or max(1, min(len(os.sched_getaffinity(0)), size // PROCESS_BYTES))
            chosen = _choose(origin, shards, to, columns, types or {}, os.fspath(source), names)
        finally:
            origin.close()
        layout = OrderLayout.noted(index_notes(text), ListedShards(shards), os.fspath(source)) if keep_order else None
        plan = ConversionPlan(
            _address(source),
            _address(dest),
            to,
            *chosen,
            settings=settings,
            data=_digest("".join(shard_digests(shards, RemoteFolder(_address(source), source_options)))),
            parts=parts_of(shards),
            verify=verify,
            timeout_s=timeout_s,
            order="" if layout is None else _digest(json.dumps(layout.note())),
            cache=scratch,
            cache_limit=max(4 << 30, (workers + 1) * max((shard.size for shard in shards), default=0)),
            source_options=dict(source_options or {}),
            dest_options=dict(dest_options or {}),
            names=names,
        )
        return _Conversion(plan, remote, layout, timeout_s).run(min(workers, max(1, len(plan.parts))))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _address(folder: str | os.PathLike[str]) -> str:
    text = os.fspath(folder)
    return text if "://" in text else os.path.abspath(os.path.expanduser(text))


def _choose(
    cache: ShardCache,
    shards: Sequence[Shard],
    to: str,
    columns: Sequence[str] | None,
    types: Mapping[str, str],
    name: str,
    say: ArgumentNames,
) -> tuple[list[TargetColumn], str, bool]:
    """Return the columns of the result, the Parquet schema in hexadecimal ("" for MDS), and True if values are copied
    as they are stored."""
    if not any(shard.samples for shard in shards):
        raise DatasetError(
            f"{name}: the index must list at least one sample, got none. Give the folder of another dataset"
        )
    plain = {
        (tuple(each.settings.get("column_names", ())), tuple(each.settings.get("column_encodings", ())))
        for each in shards
    }
    if to == "mds" and all(shard.format == "mds" for shard in shards) and len(plain) == 1 and not types:
        [(stored, encodings)] = plain
        known = dict(zip(stored, encodings, strict=True))
        return [TargetColumn(each, known[each]) for each in _chosen(columns, stored, types, name, say)], "", True
    samples = _sampled(cache, shards)
    names = _chosen(columns, list(samples[0]), types, name, say)
    if to == "parquet":
        made, schema = parquet_columns(samples, names, types, _declared(cache, shards[0]), say)
        return made, schema.serialize().to_pybytes().hex(), False
    known_encodings = _known_encodings(shards, names)
    return mds_columns(samples, names, {**known_encodings, **types}, say), "", False


def _chosen(
    columns: Sequence[str] | None, known: Sequence[str], types: Mapping[str, str], name: str, say: ArgumentNames
) -> list[str]:
    names = list(known) if columns is None else list(columns)
    for argument, given, among in (("columns", names, known), ("types", list(types), names)):
        wrong = [each for each in given if each not in among or given.count(each) > 1]
        if wrong or not names:
            raise InvalidArgumentError(
                f"{name}: {say.of(argument)} must be some of {', '.join(among)}, each once, got "
                f"{', '.join(wrong) or 'none'}. Correct the columns' names"
            )
    return names


def _declared(cache: ShardCache, shard: Shard) -> dict[str, Any]:
    """Return the pyarrow type of each column in the source's files, by the column's name, with storage types in place
    of extension types. Return an empty dict if the source is neither Parquet nor Arrow."""
    if shard.format not in ("parquet", "arrow"):
        return {}
    arrow, parquet = map(importlib.import_module, ("pyarrow", "pyarrow.parquet"))
    with cache.hold(shard) as held, held.paths[0].open("rb") as file:
        if shard.format == "parquet":
            schema = parquet.read_schema(file)
        else:
            begin = file.read(len(ARROW_FILE))
            file.seek(0)
            schema = (arrow.ipc.open_file if begin == ARROW_FILE else arrow.ipc.open_stream)(file).schema
        return {field.name: storage_of(field.type) for field in schema}


def _known_encodings(shards: Sequence[Shard], names: Sequence[str]) -> dict[str, str]:
    """Return the MDS encodings, by column, that the source itself gives: those of all columns of an MDS dataset, or
    "jpeg" and "png" for the images in tar archives. Other encodings are chosen from samples."""
    kinds = {"jpg": "jpeg", "jpeg": "jpeg", "png": "png"}
    if shards[0].format == "webdataset":
        return {name: kinds[end] for name in names if (end := name.rpartition(".")[2]) in kinds}
    if shards[0].format == "mds":
        pairs = zip(shards[0].settings["column_names"], shards[0].settings["column_encodings"], strict=True)
        return {name: encoding for name, encoding in pairs if name in names}
    return {}


def _sampled(cache: ShardCache, shards: Sequence[Shard]) -> list[dict[str, Any]]:
    """Return some rows of some shards, as dicts, from which the types of columns are chosen."""
    filled = [shard for shard in shards if shard.samples]
    step = -(-len(filled) // SAMPLED_SHARDS)
    found: list[dict[str, Any]] = []
    for shard in filled[::step]:
        with cache.hold(shard) as held:
            reader = open_shard(shard, held.paths, ReadOptions(images="file"))
            try:
                found += rows_of(reader, range(0, shard.samples, -(-shard.samples // SAMPLED_ROWS)))
            finally:
                reader.close()
    return found


@dataclass
class _Conversion:
    """Run of a conversion in this process."""

    plan: ConversionPlan
    remote: RemoteFolder
    layout: OrderLayout | None
    timeout_s: float

    def __post_init__(self) -> None:
        self._line = Progress(FILES_S)

    def run(self, processes: int) -> Converted:
        with contextlib.ExitStack() as stack:
            stack.callback(self._line.finish)
            finished = self._finished_before()
            if finished is None:
                lock = stack.enter_context(self._sole_writer())
                finished = self._finished_before()  # another run may have ended before this one took the lock
            if finished is not None:
                self._clean_up()
                return finished
            self._begin(lock)
            return self._run(processes)

    @contextlib.contextmanager
    def _sole_writer(self) -> Iterator[FileLock | None]:
        """Hold a lock on the file MARKER while the `with` block runs, so that only one process converts into the
        folder. Yield the lock; None for a remote folder, which has no locks."""
        folder = self.remote.local
        if folder is None:
            yield None
            return
        with self._writes_marker():
            folder.mkdir(parents=True, exist_ok=True)
            lock = take(str(folder), MARKER, shared=False)
        if lock is None:
            raise DatasetError(
                f"{self.remote.url} must have one writer, but another process converts into it. Wait until that "
                "process has ended"
            )
        try:
            yield lock
        except BaseException:
            if not lock.read():  # the run has written nothing yet
                lock.remove()
            raise
        finally:
            lock.release()

    def _begin(self, lock: FileLock | None) -> None:
        """Write the plan's key into the file MARKER. `lock`: lock of this file, if the folder is local; else None. A
        locked file is not replaced, because a new file would not be locked: the key is written into it, unless it is
        there already."""
        text = self.plan.key.encode() + b"\n"
        if lock is None:
            self.remote.write(MARKER, text, deadline_s=self.timeout_s)
        elif lock.read() != text:
            with self._writes_marker():
                lock.write(text)
                with open(lock.path, "rb") as file:
                    os.fsync(file.fileno())
                sync_folder(Path(lock.root))

    @contextlib.contextmanager
    def _writes_marker(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ShardUnavailableError(
                f"{self.remote.url_of(MARKER)} could not be written: {error.strerror}. Make space, or give a folder "
                "that you can write to"
            ) from error

    def _run(self, processes: int) -> Converted:
        parts = self._finished_parts()
        missing = [number for number in range(len(self.plan.parts)) if number not in parts]
        if missing:
            self._convert(missing, min(processes, len(missing)), len(parts))
            parts = self._finished_parts()
        return self._finish(parts, len(missing))

    # ---- what is there

    def _finished_before(self) -> Converted | None:
        """Return the result if an earlier run of the same conversion has finished it; None otherwise. Raise
        DatasetError if the folder holds anything but this conversion."""
        names = self.remote.names(deadline_s=self.timeout_s)
        if INDEX in names:
            text = self.remote.read(INDEX, deadline_s=self.timeout_s)
            notes = index_notes(text).get("convert", {})
            if notes.get("key") != self.plan.key:
                raise DatasetError(f"{self.remote.url} must be empty, but it has a dataset. Give another folder")
            return self._converted(read_index(text, self.remote.url), notes["digest"], 0)
        begun = self.remote.read(MARKER, deadline_s=self.timeout_s).strip() if MARKER in names else b""
        others = [name for name in names if name != MARKER]
        if begun and begun != self.plan.key.encode():
            raise DatasetError(
                f"{self.remote.url} must be empty, got an unfinished conversion of other data or with other settings. "
                "Give another folder, or remove this one"
            )
        if others and not begun:
            raise DatasetError(f"{self.remote.url} must be empty, but it has {min(others)}. Give another folder")
        return None

    def _finished_parts(self) -> dict[int, tuple[list[Shard], dict[str, Any]]]:
        """Return the finished parts, as number of the part -> (shards of the part, notes of the part's index)."""
        present = {name for name in self.remote.find(deadline_s=self.timeout_s) if name.endswith(f"/{INDEX}")}
        numbers = [n for n in range(len(self.plan.parts)) if f"{self.plan.folder_of(n)}/{INDEX}" in present]

        def one(number: int) -> tuple[list[Shard], dict[str, Any]] | None:
            name = f"{self.plan.folder_of(number)}/{INDEX}"
            text = self.remote.read(name, deadline_s=self.timeout_s)
            notes = index_notes(text).get("convert", {})
            if (notes.get("key"), notes.get("part")) != (self.plan.key, number):
                return None
            return read_index(text, self.remote.url_of(name)), notes

        with ThreadPoolExecutor(THREADS) as threads:
            found = zip(numbers, threads.map(one, numbers), strict=True)
            return {number: part for number, part in found if part is not None}

    # ---- work

    def _convert(self, missing: list[int], processes: int, done: int) -> None:
        total = len(self.plan.parts)
        if processes == 1:
            converter = PartConverter(self.plan)
            try:
                for number in missing:
                    converter.convert(number)
                    done += 1
                    self._progress(done, total)
            finally:
                converter.close()
            return
        for _ in in_processes(PROGRAM, self.plan.encoded_text(), missing, processes):
            done += 1
            self._progress(done, total)

    def _progress(self, done: int, total: int) -> None:
        samples = sum(part.end - part.begin for part in self.plan.parts)
        self._line.update(f"{self.remote.url}: converted {done} of {total} parts of {samples} samples")

    # ---- the end

    def _finish(self, parts: Mapping[int, tuple[list[Shard], dict[str, Any]]], made: int) -> Converted:
        for number, part in enumerate(self.plan.parts):
            if number not in parts or parts[number][1]["rows"] != part.end - part.begin:
                raise DatasetError(
                    f"{self.remote.url_of(self.plan.folder_of(number))} must not change while other parts are "
                    "converted, but it was changed or removed. Convert again"
                )
        shards = join_indexes((self.plan.folder_of(number), parts[number][0]) for number in sorted(parts))
        digests = "".join(str(parts[number][1]["digest"]) for number in sorted(parts))
        digest = _digest(digests)[:32]
        notes: dict[str, Any] = {"convert": {"key": self.plan.key, "digest": digest}}
        if self.layout is not None:
            notes["order"] = self.layout.note()
        self.remote.write(INDEX, write_index(shards, notes), deadline_s=self.timeout_s)
        self._clean_up()
        return self._converted(shards, digest, made)

    def _clean_up(self) -> None:
        """Remove the parts' own indexes, temporary files of killed runs, and then the file MARKER. Call this once the
        dataset's index lists all shards."""
        shards = read_index(self.remote.read(INDEX, deadline_s=self.timeout_s), self.remote.url)
        needed = {(file.packed or file.raw).name for shard in shards for file in shard.files}
        folders = {self.plan.folder_of(number) for number in range(len(self.plan.parts))}
        names = [name for name in self.remote.find(deadline_s=self.timeout_s) if name.partition("/")[0] in folders]
        with ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(self._remove, [name for name in names if name not in needed]))
        self._remove(MARKER)

    def _remove(self, name: str) -> None:
        self.remote.remove(name, deadline_s=self.timeout_s)

    def _converted(self, shards: list[Shard], digest: str, made: int) -> Converted:
        columns = {column.name: column.type for column in self.plan.columns}
        return Converted(shards, sum(shard.samples for shard in shards), digest, len(self.plan.parts), made, columns)
