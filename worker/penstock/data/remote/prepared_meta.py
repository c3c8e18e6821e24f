"""Copies, in the cache, of the files in which Energon describes the splits, such as "train", of a remote folder. With
them a process knows the splits without a request, and whether the cached index is older than their description."""

from __future__ import annotations

from pathlib import Path

from penstock.data.formats.records.energon_folder import META, META_FILES, SPLITS, is_prepared
from penstock.data.remote.folders import RemoteFolder
from penstock.proto.errors import ShardUnavailableError
from penstock.runtime.files.atomic_files import write_whole

MARK = b"split_parts"
"""Text in each file of splits, and not in a page that a web server sends for a missing file."""


def fetch_meta(remote: RemoteFolder, folder: Path, *, deadline_s: float) -> bool:
    """Copy the files in a remote folder's subfolder META. Return False if Energon has not prepared it; raise
    ShardUnavailableError without an answer."""
    found: dict[str, bytes] = {}
    for name in META_FILES:
        try:
            found[name] = remote.read(f"{META}/{name}", deadline_s=deadline_s)
        except ShardUnavailableError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
        if name == SPLITS[-1] and not any(MARK in found.get(each, b"") for each in SPLITS):
            return False
    (folder / META).mkdir(parents=True, exist_ok=True)
    for name in reversed(META_FILES):  # the files of splits, which is_prepared looks for, come last
        if name in found:
            write_whole(folder / META / name, found[name])
    return is_prepared(folder)
