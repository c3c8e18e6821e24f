"""A dataset's files on their way to another place: sent as they are written, the index behind all others.

A place without an index is no dataset. So one that is replaced loses its index first, and what an error or a killed
process leaves there is never read as if it were complete.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from penstock.data.formats.index import INDEX
from penstock.data.remote.folders import RemoteFolder
from penstock.proto.errors import DatasetError, InvalidArgumentError

__all__ = ["Uploads", "local_folder", "writable_place"]

_SCHEME_LOST_A_SLASH = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def local_folder(name: str, value: Any) -> Path:
    """A folder of this machine. Raises InvalidArgumentError for an address: pathlib makes a folder "s3:" of one."""
    path = Path(value).expanduser()
    if _SCHEME_LOST_A_SLASH.match(str(path)):
        raise InvalidArgumentError(
            f"{name}={str(value)!r} must be a folder of this machine, got an address; give one as text, where "
            "one is taken (pathlib makes a folder of it)"
        )
    return path


def writable_place(url: str, storage_options: Any = None) -> RemoteFolder:
    """Raises DatasetError for a place that takes no files."""
    if url.startswith(("http://", "https://")):
        raise DatasetError(f"{url}: a web server takes no files; write to a folder or an object store")
    return RemoteFolder(url, storage_options)


class Uploads:
    """Of one dataset's files. Threads send them; `send` waits while they have enough to do."""

    def __init__(self, place: RemoteFolder, *, keep_local: bool, threads: int, timeout_s: float) -> None:
        """`timeout_s`: of each file."""
        self._place, self._keep_local, self._timeout_s = place, keep_local, timeout_s
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="penstock-upload")
        self._free = threading.Semaphore(2 * threads)
        self._sent: list[Future[None]] = []

    def clear(self, is_shard: Callable[[str], Any], *, exist_ok: bool) -> None:
        """Make room for a new dataset. Raises DatasetError if something is there, and must not be."""
        names = self._place.names(deadline_s=self._timeout_s)
        if names and not exist_ok:
            raise DatasetError(
                f"{self._place.url} is not empty; exist_ok=True replaces the dataset in it and leaves other files alone"
            )
        for name in sorted(names, key=lambda name: name != INDEX):  # the index first
            if name == INDEX or is_shard(name):
                self._place.remove(name, deadline_s=self._timeout_s)

    def send(self, path: Path) -> None:
        """A file that is whole. Raises the error of an earlier one."""
        self._free.acquire()
        for future in self._sent:
            if future.done():
                future.result()
        self._sent = [future for future in self._sent if not future.done()]
        self._sent.append(self._threads.submit(self._send, path))

    def _send(self, path: Path) -> None:
        try:
            self._place.upload(path.name, path, deadline_s=self._timeout_s)
            if not self._keep_local:
                path.unlink()
        finally:
            self._free.release()

    def finish(self, index: bytes) -> None:
        """All files are there, and then the index. Raises ShardUnavailableError."""
        for future in self._sent:
            future.result()
        self._place.write(INDEX, index, deadline_s=self._timeout_s)

    def close(self) -> None:
        """Nothing more is sent."""
        self._threads.shutdown(cancel_futures=True)
        self._place.close()
