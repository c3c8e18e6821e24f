"""Indexing of a remote folder that Megatron Energon prepared. `energon prepare` stores beside each archive the offset
of each sample (NAME.tar.idx: 8 bytes each, then the end of the last), so any archive costs three small requests."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from penstock.data.formats.records.energon_folder import NOTE, prepared_names, prepared_note, prepared_shards
from penstock.data.formats.records.record_file import record_shard
from penstock.data.formats.shards import Shard
from penstock.data.ordering.permutation import Ints
from penstock.data.remote.file_versions import with_versions
from penstock.data.remote.folders import RemoteFolder
from penstock.data.remote.prepared_meta import fetch_meta
from penstock.data.writing.dataset_files import with_hashes, write_local_index, write_remote_index
from penstock.proto.errors import DatasetError, ShardCorruptError, ShardUnavailableError
from penstock.runtime.telemetry.progress import FILES_S, Progress

THREADS = 16
"""Archives that are indexed at the same time."""
OFFSETS_ENDING = ".idx"
BLOCK = 512
"""Bytes of a header in a tar archive, and of a block of zeros at its end."""


def index_prepared(
    remote: RemoteFolder, out: str | os.PathLike[str] | None, *, ranges: bool, hashes: bool, timeout_s: float
) -> list[Shard] | None:
    """Index a remote folder as `index_folder` does; return None if Energon has not prepared it. Raises DatasetError,
    ShardCorruptError, ShardUnavailableError."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch if out is None else out)
        if not fetch_meta(remote, folder, deadline_s=timeout_s):
            return None
        shards = prepared_shards(folder, _archives(remote, folder, timeout_s))
        shards = shards if ranges else [replace(shard, spans=(), ranges=()) for shard in shards]
        shards = with_hashes(shards, remote, folder, timeout_s) if hashes else with_versions(shards, remote, timeout_s)
        notes = prepared_note(folder)
        warn_of_loader(notes, remote.url)
        if out is not None:
            write_local_index(folder, shards, notes)
            return shards
        with ThreadPoolExecutor(THREADS) as threads:
            upload = partial(_upload, remote, folder, timeout_s)
            list(threads.map(upload, (shard.files[1].raw.name for shard in shards)))
        write_remote_index(remote, shards, notes, timeout_s)
    return shards


def warn_of_loader(notes: Mapping[str, Any], where: str) -> None:
    """Warn if a folder that Energon prepared names a function that loads samples: Penstock does not call it."""
    loader = notes.get(NOTE, {}).get("sample_loader")
    if loader:
        warnings.warn(
            f"{where}: the sample_loader {loader!r} that dataset.yaml names is not run, because code in a data folder "
            "is never run: a sample has the members of its archive. Import the function yourself, and pass it: "
            "Mapped(source, sample_loader), or energon_blend(..., sample_loaders={NAME: sample_loader})",
            stacklevel=3,
        )


def _archives(remote: RemoteFolder, folder: Path, timeout_s: float) -> list[Shard]:
    names = prepared_names(folder)
    progress, found = Progress(FILES_S), list[Shard]()
    try:
        with ThreadPoolExecutor(THREADS) as threads:
            for shard in threads.map(partial(_archive, remote, folder, timeout_s), names):
                found.append(shard)
                progress.count(f"{remote.url}: indexed", len(found), len(names))
    finally:
        progress.finish()
    return found


def _archive(remote: RemoteFolder, folder: Path, timeout_s: float, name: str) -> Shard:
    size, offsets = remote.size(name, deadline_s=timeout_s), _offsets(remote, name, timeout_s)
    if offsets[0] < 0 or (offsets[1:] <= offsets[:-1]).any() or (offsets % BLOCK).any() or offsets[-1] > size - BLOCK:
        _refuse(remote, name, "the offsets must ascend within the archive")
    end = int(offsets[-1])
    if remote.read_range(name, end, end + BLOCK, deadline_s=timeout_s).strip(b"\0"):
        _refuse(remote, name, f"the archive must end at byte {end}, but has data there")
    return record_shard("webdataset", None, folder, name, size, offsets)


def _offsets(remote: RemoteFolder, name: str, timeout_s: float) -> Ints:
    try:
        data = remote.read(name + OFFSETS_ENDING, deadline_s=timeout_s)
    except ShardUnavailableError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
        raise DatasetError(
            f"{remote.url_of(name + OFFSETS_ENDING)} is missing. Run `energon prepare` again, or index a local copy"
        ) from error
    if len(data) < 16 or len(data) % 8:
        _refuse(remote, name, f"the file must have 8 bytes for each sample, and 8 more, got {len(data)}")
    return np.frombuffer(data, "<i8").astype(np.int64)


def _refuse(remote: RemoteFolder, name: str, why: str) -> None:
    raise ShardCorruptError(
        f"{remote.url_of(name + OFFSETS_ENDING)} does not fit its archive: {why}. Run `energon prepare` again"
    )


def _upload(remote: RemoteFolder, folder: Path, timeout_s: float, name: str) -> None:
    remote.upload(name, folder / name, deadline_s=timeout_s)
