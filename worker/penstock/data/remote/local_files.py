"""Reading and writing of files on this machine. Failures raise the same errors as for a remote folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from penstock.proto.errors import ShardUnavailableError
from penstock.runtime.files.atomic_files import write_whole
from penstock.runtime.files.plain_files import open_plain, read_plain

PIECE = 16 << 20
"""Bytes of a file that are copied at a time."""


def read_file(path: Path, limit: int, first: int | None) -> bytes:
    """Return a file, or its first `first` bytes. Raises ShardUnavailableError, also for more than `limit` bytes."""
    try:
        if first is None:
            return read_plain(path, limit)
        with open(path, "rb", opener=open_plain) as file:
            return file.read(first)
    except OSError as error:
        raise ShardUnavailableError(
            f"{path} cannot be read: {error.strerror}. Check the path and its permissions"
        ) from error


def write_file(path: Path, data: bytes | Iterator[bytes]) -> None:
    """Write a file completely or not at all. Raises ShardUnavailableError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, data)
    except OSError as error:
        raise ShardUnavailableError(
            f"{path} could not be written: {error.strerror}. Make space, or give a folder that you can write to"
        ) from error


def copy_file(source: Path, path: Path) -> None:
    """Copy a file completely or not at all. Raises ShardUnavailableError, or OSError for an unreadable source."""
    with open(source, "rb", buffering=0, opener=open_plain) as file:
        write_file(path, iter(lambda: file.read(PIECE), b""))
