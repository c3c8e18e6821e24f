"""Upload of a dataset's files: each shard when it is written, and the index last. A folder without an index is not a
dataset, so it is removed first when one is replaced, and what an error or a killed process leaves is never read."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from penstock.data.formats.index import INDEX
from penstock.data.remote.folders import RemoteFolder
from penstock.data.writing.publish import check_no_versions
from penstock.proto.errors import DatasetError, InvalidArgumentError
from penstock.runtime.telemetry.progress import FILES_S, Progress

_SCHEME_LOST_A_SLASH = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def local_folder(name: str, value: Any) -> Path:
    """Return a path. Raise InvalidArgumentError for a URL, also as a Path: pathlib makes a folder "s3:" of it."""
    path = Path(value).expanduser()
    if _SCHEME_LOST_A_SLASH.match(str(path)):
        raise InvalidArgumentError(f"{name} must be a folder of this machine, got the address {str(value)!r}")
    return path


def writable_remote(url: str, storage_options: Any = None) -> RemoteFolder:
    """Return the folder at this address. Raise DatasetError for a web server, to which files cannot be written."""
    if url.startswith(("http://", "https://")):
        raise DatasetError(f"{url} must be a folder or an object store, got a web server, which accepts no files")
    return RemoteFolder(url, storage_options)


def not_empty(where: str | Path) -> DatasetError:
    return DatasetError(
        f"{where} must be empty, got a folder with files. Pass another folder, or exist_ok=True to replace its dataset "
        "and keep other files, or append=True to publish a version with more samples"
    )


class Uploads:
    """Threads that upload the files of one dataset. `send` blocks while two files per thread are pending."""

    def __init__(
        self, remote: RemoteFolder, *, keep_local: bool, threads: int, timeout_s: float, progress: bool = False
    ) -> None:
        """Start the threads. `keep_local` False: remove local files after upload; `timeout_s`: for each file."""
        self._remote, self._keep_local, self._timeout_s = remote, keep_local, timeout_s
        self._threads, self._most = ThreadPoolExecutor(threads, thread_name_prefix="penstock-upload"), 2 * threads
        self._sent: deque[Future[None]] = deque()
        self._progress = Progress(FILES_S) if progress else None
        self._sizes = list[int]()

    def clear(self, is_shard: Callable[[str], Any], *, exist_ok: bool) -> None:
        """Remove the dataset in the remote folder. Raise DatasetError if it has versions, and without `exist_ok` if
        there are any files. `is_shard`: whether a name is that of a shard's file."""
        names = self._remote.names(deadline_s=self._timeout_s)
        if names and not exist_ok:
            raise not_empty(self._remote.url)
        check_no_versions(names, self._remote.url)
        for name in sorted(names, key=lambda name: name != INDEX):  # the index goes first
            if name == INDEX or is_shard(name):
                self._remote.remove(name, deadline_s=self._timeout_s)

    def send(self, path: Path) -> None:
        """Upload a complete file in a thread. Raise the error of an earlier upload that failed."""
        while self._sent and (self._sent[0].done() or len(self._sent) >= self._most):
            self._sent.popleft().result()
        self._sent.append(self._threads.submit(self._send, path))

    def _send(self, path: Path) -> None:
        size = path.stat().st_size
        self._remote.upload(path.name, path, deadline_s=self._timeout_s)
        self._sizes.append(size)
        self._show()
        if not self._keep_local:
            path.unlink()

    def _show(self, *, always: bool = False) -> None:
        if self._progress:
            note = f"{sum(self._sizes)} bytes"
            self._progress.count(f"{self._remote.url}: uploaded", len(self._sizes), note=note, always=always)

    def wait(self) -> None:
        for future in self._sent:
            future.result()

    def finish(self, index: bytes) -> None:
        """Wait for all uploads, then write the index. Raise ShardUnavailableError if a file cannot be uploaded."""
        self.wait()
        self._remote.write(INDEX, index, deadline_s=self._timeout_s)
        if self._progress:
            self._show(always=True)
            self._progress.finish()

    def close(self) -> None:
        """End the threads. Files that are still waiting are not uploaded."""
        self._threads.shutdown(cancel_futures=True)
        self._remote.close()
