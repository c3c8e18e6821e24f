"""Filesystems of fsspec that have no event loop (SFTP, FTP, archives, URLs of several parts), with deadlines.

Their calls block for as long as they like. So each runs in a thread of its own, and who waits for it may give it up;
the thread ends when the call does. And few of them may be used by two threads at a time: FTP has one connection, an
archive one position. So a call has its filesystem to itself, and a call that failed, or hangs, keeps it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from typing import Any

from penstock.data.remote.transfer import TransferBroken

__all__ = ["PlainFilesystems"]


class PlainFilesystems:
    """Of one place, for one process. As many are opened as there are calls at a time."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self._url, self._options = url, options
        self._lock = threading.RLock()  # as the place's
        self._free: list[tuple[Any, str]] = []
        self._calls: set[Future[Any]] = set()
        """That go on."""

    def begin(self, work: Callable[[Any, str], Any]) -> Future[Any]:
        """Call `work(filesystem, path of the place's folder in it)`. To cancel the future is to give the call up."""
        future: Future[Any] = Future()
        with self._lock:
            self._calls.add(future)
        future.add_done_callback(self._ended)
        threading.Thread(target=self._run, args=(work, future), name="penstock-place", daemon=True).start()
        return future

    def close(self) -> None:
        """All calls that go on are given up, with an error for those who wait."""
        with self._lock:
            calls = tuple(self._calls)
        for future in calls:
            with contextlib.suppress(InvalidStateError):
                future.set_exception(TransferBroken("was closed"))

    def _ended(self, future: Future[Any]) -> None:
        with self._lock:
            self._calls.discard(future)

    def _run(self, work: Callable[[Any, str], Any], future: Future[Any]) -> None:
        with contextlib.suppress(InvalidStateError):  # it was given up
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
        import fsspec  # 0.1 s of a core, which runners without a place do not pay

        fs, root = fsspec.core.url_to_fs(self._url, skip_instance_cache=True, **self._options)
        return fs, root
