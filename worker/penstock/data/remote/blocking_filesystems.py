"""Deadlines for calls to those fsspec filesystems that have no event loop (SFTP, FTP, archives, chained URLs).

A call may block forever, so each runs in a thread of its own, which the caller may abandon. Few of these filesystems
may be used by two threads at a time (FTP has one connection, an archive one position), so running calls share no
filesystem object, and one whose call failed or hangs is not used again.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from typing import Any

from penstock.data.remote.transfer import CLOSED, TransferBroken


class PlainFilesystems:
    """Filesystem objects of one remote folder in one process, one for each running call."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self._url, self._options = url, options
        self._lock = threading.RLock()  # reentrant, like the remote's lock
        self._free: list[tuple[Any, str]] = []
        self._calls: set[Future[Any]] = set()

    def begin(self, work: Callable[[Any, str], Any]) -> Future[Any]:
        """Start `work(filesystem, path of the remote folder)` in a thread. Cancelling the future abandons the call."""
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
