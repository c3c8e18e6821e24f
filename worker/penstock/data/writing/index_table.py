"""Indexing of tables of Delta Lake and Iceberg in place: over the Parquet files of a snapshot, without a copy. Each
snapshot becomes a version of the dataset, which has the snapshot's own number."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from penstock.data.cache.dataset_versions import check_version
from penstock.data.formats.index import INDEX, OWN, OWN_INDEX, SOURCE_NOTE, VERSION_NOTE, version_index, write_index
from penstock.data.formats.parquet.shards import Tail, local_tail, shard_of_tail
from penstock.data.formats.parquet.table_files import TABLE_FILE, Bits, encoded_rows, live_counts
from penstock.data.formats.shards import Shard
from penstock.data.formats.table_marks import DELTA, FOLDERS, HUDI, ICEBERG, METADATA, table_error
from penstock.data.remote.folders import RemoteFolder
from penstock.data.writing.index_parquet import REMOTE_THREADS, remote_tail
from penstock.data.writing.tables.delta import VECTOR, delta_snapshot
from penstock.data.writing.tables.iceberg import iceberg_snapshot
from penstock.data.writing.tables.recognise import table_at
from penstock.data.writing.tables.snapshot import TableFile, TableSnapshot, are_as_stored, columns_in
from penstock.proto.errors import DatasetError, ShardCorruptError, ShardUnavailableError, SnapshotExpiredError


def index_table(
    uri: str | os.PathLike[str],
    snapshot: int | None = None,
    *,
    out: str | os.PathLike[str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    timeout_s: float = 600.0,
) -> list[Shard]:
    """Write an index of a snapshot of a Delta Lake or Iceberg table, for StreamingDataset. Its samples are the
    snapshot's rows: without deleted ones, with partitions, and with columns added, renamed and widened since a file was
    written. The table's Parquet files are read where they lie; only its log and the files' footers are read here, and
    files that Iceberg's equality deletes may concern.

        index_table("s3://bucket/sales", out="/data/cache")
        dataset = StreamingDataset("s3://bucket/sales", "/data/cache")

    A snapshot is a version of the dataset, and keeps its number (docs/datasets.md): a state names it, and a loader goes
    on in it after later commits. Call `index_table` again to index the newest snapshot. Needs penstock[delta] or
    penstock[iceberg].

    Args:
        uri: folder of the table, or any URL that fsspec opens: the folder with `_delta_log` or `metadata`. Of an
            Iceberg table also the address of a file metadata/....metadata.json; with a folder the newest one is read.
        snapshot: version of a Delta Lake table, or snapshot ID of an Iceberg table, to be read with `version=`. None:
            the table's present one, which StreamingDataset then reads by default.
        out: local folder for the indexes; None: the table's folder. Give it as `local` of the StreamingDataset.
        storage_options: keyword arguments for fsspec's filesystem.
        timeout_s: seconds for each request to a remote folder.

    Returns the shards: a file each, with its live rows. Raises SnapshotExpiredError if the table no longer has the
    snapshot, DatasetError for a feature of tables that is not read, ShardCorruptError, ShardUnavailableError,
    InvalidArgumentError.
    """
    check_version("snapshot", snapshot)
    folder, metadata = _parts(os.fspath(uri))
    remote = RemoteFolder(folder, storage_options)
    try:
        found = _snapshot(remote, metadata, snapshot, storage_options, timeout_s)
        shards = _shards(remote, found, timeout_s)
        _publish(remote, shards, found.number, out, is_newest=snapshot is None, timeout_s=timeout_s)
    finally:
        remote.close()
    return shards


def _parts(uri: str) -> tuple[str, str]:
    """Return a table's folder, and the name of the file of metadata if `uri` is one, else ""."""
    above, _, name = uri.rpartition("/")
    is_metadata = METADATA.fullmatch(name) and above.endswith(f"/{FOLDERS[ICEBERG]}")
    return (above.rpartition("/")[0], name) if is_metadata else (uri, "")


def _snapshot(
    remote: RemoteFolder, metadata: str, number: int | None, options: Mapping[str, Any] | None, timeout_s: float
) -> TableSnapshot:
    kind = ICEBERG if metadata else table_at(remote.address, options, timeout_s)
    if kind == HUDI:
        raise table_error(kind, remote.url)
    if kind == ICEBERG:
        with contextlib.closing(RemoteFolder(f"{remote.address.rstrip('/')}/{FOLDERS[ICEBERG]}", options)) as inside:
            names = [metadata] if metadata else inside.names(deadline_s=timeout_s)
        return iceberg_snapshot(remote, names, number, timeout_s)
    if not kind:
        raise DatasetError(
            f"{remote.url} must be the folder of a Delta Lake or Iceberg table, but has neither _delta_log nor "
            "metadata/*.metadata.json. Correct the address; index plain files with index_folder"
        )
    if remote.local:
        return delta_snapshot(remote.local, number, remote.url)
    found = remote.find(deadline_s=timeout_s)
    names = [name for name in found if name.startswith(f"{FOLDERS[DELTA]}/") or VECTOR.search(name)]
    with tempfile.TemporaryDirectory(prefix="penstock-log-") as scratch, ThreadPoolExecutor(REMOTE_THREADS) as threads:
        for name in names:
            Path(scratch, name).parent.mkdir(parents=True, exist_ok=True)
        list(threads.map(lambda name: remote.copy(name, Path(scratch, name), deadline_s=timeout_s), names))
        return delta_snapshot(Path(scratch), number, remote.url)


def _shards(remote: RemoteFolder, snapshot: TableSnapshot, timeout_s: float) -> list[Shard]:
    with ThreadPoolExecutor(REMOTE_THREADS) as threads:
        shards = list(threads.map(lambda file: _shard(remote, snapshot, file, timeout_s), snapshot.files))
    if not any(shard.samples for shard in shards):
        raise DatasetError(f"{remote.url}: snapshot {snapshot.number} of the table has no rows. Index another one")
    return shards


def _shard(remote: RemoteFolder, snapshot: TableSnapshot, file: TableFile, timeout_s: float) -> Shard:
    where = remote.url_of(file.name)

    def tail() -> Tail:
        return local_tail(remote.local / file.name) if remote.local else remote_tail(remote, file.name, timeout_s)

    try:
        shard, footer = shard_of_tail(file.name, tail)
    except (ShardCorruptError, ShardUnavailableError) as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
        raise SnapshotExpiredError(
            f"{where} is missing, so snapshot {snapshot.number} of the {snapshot.kind} table can no longer be read: it "
            "was expired, or its files vacuumed. Index a newer snapshot"
        ) from error
    deleted = _bits(file, shard.samples, where)
    columns = columns_in(snapshot.columns, file.constants, footer.schema, where)
    counts = live_counts(deleted, footer.groups)
    settings = {"column_names": [column.name for column in snapshot.columns]}
    if not are_as_stored(columns, footer.schema):
        settings["table"] = columns
    return replace(
        shard,
        format=TABLE_FILE,
        samples=sum(counts),
        settings=settings,
        blocks=counts,
        deleted="" if deleted is None else encoded_rows(deleted),
    )


def _bits(file: TableFile, rows: int, where: str) -> Bits | None:
    """Return True for each deleted row; shape (rows,)."""
    if file.deleted is None or not len(file.deleted):
        return None
    if int(file.deleted[0]) < 0 or int(file.deleted[-1]) >= rows:
        raise ShardCorruptError(f"{where}: the table deletes row {int(file.deleted[-1])} of {rows} rows")
    deleted = np.zeros(rows, np.bool_)
    deleted[file.deleted] = True
    return deleted


def _publish(
    remote: RemoteFolder,
    shards: Sequence[Shard],
    number: int,
    out: str | os.PathLike[str] | None,
    *,
    is_newest: bool,
    timeout_s: float,
) -> None:
    """Write the index of a snapshot. Without the argument `snapshot`, it becomes the dataset's newest version."""
    notes: dict[str, Any] = {VERSION_NOTE: number}
    folder = remote
    if out is not None:
        folder, notes = RemoteFolder(Path(out)), notes | {SOURCE_NOTE: str(remote.local or remote.url)}
    index, present = write_index(shards, notes), set(folder.names(deadline_s=timeout_s))
    names = [OWN + version_index(number), *([OWN_INDEX] if is_newest or OWN_INDEX not in present else [])]
    try:
        for name in names:
            folder.write(name, index, deadline_s=timeout_s)
        if INDEX in present:  # of plain files, before they became a table's
            folder.remove(INDEX, deadline_s=timeout_s)
    except OSError as error:
        raise DatasetError(
            f"{folder.url} cannot be written: {error}. Give the argument `out`, a folder that you may write to"
        ) from error
