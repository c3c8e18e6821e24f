"""Deadlines for calls to those fsspec filesystems that have no event loop (SFTP, FTP, archives, chained URLs).

A call to such a filesystem may block forever. So each call runs in a thread of its own, which the caller may abandon;
the thread ends when the call does. Few of these filesystems may be used by two threads at a time: FTP has one
connection, an archive has one position. So each call gets a filesystem object that no other call uses. After a call
that failed or hangs, its object is not used again.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from typing import Any

from penstock.data.remote.transfer import CLOSED, TransferBroken

__all__ = ["PlainFilesystems"]


class PlainFilesystems:
    """Filesystem objects of one remote folder in one process. Each running call uses an object that no other call
    uses."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self._url, self._options = url, options
        self._lock = threading.RLock()  # reentrant, like the remote's lock
        self._free: list[tuple[Any, str]] = []
        self._calls: set[Future[Any]] = set()
        """Calls of the filesystem that are running."""

    def begin(self, work: Callable[[Any, str], Any]) -> Future[Any]:
        """Start a call of `work(filesystem, path)` in a thread, and return a future for its result. `path` is that of
        the remote folder in the filesystem. Cancelling the future abandons the call."""
        future: Future[Any] = Future()
        with self._lock:
            self._calls.add(future)
        future.add_done_callback(self._ended)
        threading.Thread(target=self._run, args=(work, future), name="penstock-remote", daemon=True).start()
        return future

    def close(self) -> None:
        """Abandon all calls in progress. Threads that wait for a call get an error."""
        with self._lock:
            calls = tuple(self._calls)
        for future in calls:
            with contextlib.suppress(InvalidStateError):
                future.set_exception(TransferBroken(CLOSED))

    def _ended(self, future: Future[Any]) -> None:
        with self._lock:
            self._calls.discard(future)

    def _run(self, work: Callable[[Any, str], Any], future: Future[Any]) -> None:
        with contextlib.suppress(InvalidStateError):  # the call was abandoned
            try:
                opened = self._take() or self._opened()
                result = work(*opened)
            except BaseException as error:
                future.set_exception(error)
                return
            with self._lock:
                self._free.append(opened)
            future.set_result(result)

    def _take(self) -> tuple[Any, str] | None:
        with self._lock:
            return self._free.pop() if self._free else None

    def _opened(self) -> tuple[Any, str]:
        import fsspec  # imported here: it takes 0.1 s, which runners without a remote save

        fs, root = fsspec.core.url_to_fs(self._url, skip_instance_cache=True, **self._options)
        return fs, root
