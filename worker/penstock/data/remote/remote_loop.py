"""Event loop of a remote folder in a thread of its own, in which the filesystem's methods run."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Coroutine, Mapping
from typing import Any
from urllib.parse import urlsplit

from penstock.data.remote.redirects import RedirectLimit
from penstock.data.remote.transfer import CLOSED, TransferBroken

_OUTDATED = ("ExpiredToken", "InvalidToken", "TokenRefreshRequired", "InvalidAccessKeyId", "400", "403")
"""S3's codes of errors for credentials that were replaced; answers to HEAD have a status alone."""


class RemoteLoop:
    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self.pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        self._session: Any = None
        self._earlier: Any = None
        """Session before this one, in which requests may be under way."""
        self._renewing = asyncio.Lock()
        self._fs: Any = None
        self._lock = threading.RLock()  # reentrant, like the remote's lock
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="penstock-remote", daemon=True)
        self._thread.start()
        self.opening = self.call(self._open(url, options))
        """Future of (filesystem, path of the folder in it)."""

    def _run(self) -> None:
        self.loop.run_forever()
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()

    async def _open(self, url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
        import fsspec

        fs, root = fsspec.core.url_to_fs(url, asynchronous=True, loop=self.loop, skip_instance_cache=True, **options)
        self._fs = fs
        if urlsplit(url).scheme in ("http", "https"):
            import yarl  # imported here, because it comes with an extra

            RedirectLimit(yarl.URL(url).raw_host or "").install(fs)
        if hasattr(fs, "set_session"):
            self._session = await fs.set_session()
        return fs, root

    @property
    def ended(self) -> bool:
        """True after the loop has stopped accepting calls, for example while the interpreter exits."""
        return self._ending

    def call(self, work: Coroutine[Any, Any, Any]) -> concurrent.futures.Future[Any]:
        with self._lock:
            if self._ending:  # for example at the interpreter's exit, when a thread retries a call that `close` ended
                work.close()
                raise TransferBroken(CLOSED)
            return asyncio.run_coroutine_threadsafe(work, self.loop)

    async def renewing(self, request: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Make a request; once more, in a new session, if S3 refuses the credentials. A new session looks for them
        again: in files, at a container's address, by credential_process."""
        session = self._session
        try:
            return await request()
        except Exception as error:
            response = getattr(error.__cause__, "response", None)
            if not isinstance(response, dict) or response.get("Error", {}).get("Code") not in _OUTDATED:
                raise
        async with self._renewing:
            if self._session is session:
                earlier, self._earlier = self._earlier, session
                self._session = await self._fs.set_session(refresh=True)
                if earlier is not None:
                    await earlier.close()
        return await request()

    def close(self) -> None:
        """End the loop's thread, and all transfers in it. In a forked child this does nothing."""
        if self.pid != os.getpid():
            return
        with self._lock:
            if not self._ending:
                self.call(self._end())
                self._ending = True
        if threading.current_thread() is not self._thread:
            self._thread.join(1.0)

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for session in (self._earlier, self._session):
            if session is not None:
                await session.close()
        await _close_client(self._fs)
        await asyncio.sleep(0)  # lets the transports run their last callbacks
        self.loop.stop()


async def _close_client(fs: Any) -> None:
    """Close the client of a filesystem that has one instead of a session (Azure). Its finalizers are removed: they
    would close the client in the loop, which has ended when the filesystem is freed."""
    client = getattr(fs, "service_client", None)
    if client is None:
        return
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        if (found := finalizer.peek()) and found[0] is fs:
            finalizer.detach()
    for each in (client, getattr(fs, "credential", None)):
        close = getattr(each, "close", None)
        if asyncio.iscoroutinefunction(close):
            with contextlib.suppress(Exception):  # errors of the library no longer matter
                await close()
