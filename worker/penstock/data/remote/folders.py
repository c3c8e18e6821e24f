"""Access to a dataset's folder on this machine, a web server, an object store, or anything else that fsspec reaches.

A temporary failure is retried until the deadline, with growing pauses; a permanent one is raised at once. A download by
HTTP or an object store's client has a minimum rate, too: a server that sends a byte now and then counts as stalled.

fsspec's shared event loop does not survive a fork, and closes its connections at any time. So each RemoteFolder of an
asynchronous filesystem has an event loop in a thread of its own, which the first transfer starts and `close` ends. A
forked child starts its own, and never touches the inherited loop, whose sockets belong to the parent. That loop is not
freed: the frame of its thread still refers to it, although the thread does not run there.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import io
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit, urlunsplit

from penstock.data.remote.blocking_filesystems import PlainFilesystems
from penstock.data.remote.local_files import copy_file, read_file, write_file
from penstock.data.remote.remote_loop import RemoteLoop
from penstock.data.remote.transfer import (
    CLOSED,
    LARGEST_COPY,
    LAST_PAUSE_S,
    PARALLEL,
    DownloadProgress,
    DownloadTarget,
    FailureKind,
    FileChanged,
    Request,
    TransferBroken,
    age_of,
    by_pieces,
    check_encoding,
    http_headers,
    http_part,
    judge,
    over_http,
    pause_before_retry,
    scrubbed,
    tries_text,
)
from penstock.proto.errors import (
    DatasetError,
    InvalidArgumentError,
    PenstockError,
    ShardCorruptError,
    ShardUnavailableError,
)
from penstock.runtime.files.plain_files import open_plain

LARGEST_READ = 1 << 30
"""Bytes of the largest file that is read into memory as a whole."""
RANGE_BYTES = 16 << 20
"""Most bytes that one request of `download_range` asks for."""
PAST_END = 416
"""HTTP status for a part that begins after the file's end."""
QUIET_TRIES = 5
"""Failures in a row, in about 2 s, after which a warning is logged, or a host never reached counts as mistyped."""
MIN_PROGRESS_BYTES = 1 << 16
"""Bytes of an HTTP download that must arrive every `stall_s` seconds, or else a new attempt continues it."""
_SERVERS = ("endpoint_url", "endpoint", "host", "port", "account_name")
"""Options of fsspec's filesystems that say which server a URL belongs to."""
_BY_RANGES: dict[str, dict[str, Any]] = {"hf": {"cache_type": "none"}}
"""Protocols without an event loop of which parts of a file can be requested at the same time -> options that keep
`cat_file` from reading more than was asked for."""
_log = logging.getLogger(__name__)
_EXTRAS = {"http": "http", "https": "http", "s3": "s3", "s3a": "s3"}


def joined(url: str, name: str) -> str:
    """Return a file's address. In http URLs the name is quoted, and a query stays at the end."""
    if not url.startswith(("http://", "https://")):
        return f"{url.rstrip('/')}/{name}"
    parts = urlsplit(url)
    return urlunsplit(parts._replace(path=f"{parts.path.rstrip('/')}/{quote(name)}"))


class RemoteFolder:
    """Folder on any filesystem, for any thread. Each process opens the filesystem at its first transfer."""

    def __init__(
        self,
        url: str | os.PathLike[str],
        storage_options: Mapping[str, Any] | None = None,
        *,
        tries: int | None = None,
        stall_s: float = 30.0,
    ) -> None:
        """Store the settings, without connecting. `tries`: failures in a row, without a new byte, after which a
        transfer fails; None: until the deadline. `stall_s`: without progress until an attempt is cancelled."""
        self._url = os.fspath(url)
        self._options = dict(storage_options or {})
        self._tries = tries
        self._stall_s = stall_s
        self._protocol = self._url.split("://")[0].split("::")[0] if "://" in self._url else "file"
        self.local: Path | None = None
        """Path of the folder on this machine; None for a remote folder."""
        import fsspec  # imported here: it takes 0.1 s, which runners without a remote save

        try:
            kind = fsspec.get_filesystem_class(self._protocol)
        except ValueError as error:
            raise InvalidArgumentError(
                f"{self.url} must have a scheme that fsspec knows, got {self._protocol}://"
            ) from error
        except ImportError as error:
            extra = _EXTRAS.get(self._protocol)
            remedy = f"Install penstock[{extra}]" if extra else str(error)
            raise DatasetError(f"{self.url} needs a package that is not installed. {remedy}") from error
        if self._protocol in ("file", "local"):
            self.local = Path(kind._strip_protocol(self._url)).absolute()
        self._is_http = self._protocol in ("http", "https")
        if self._is_http:
            # Files must arrive as they are stored, but aiohttp would decompress them if a server declares .gz as an
            # encoding.
            self._options["client_kwargs"] = {"auto_decompress": False} | self._options.get("client_kwargs", {})
            # a server that compresses what it sends ignores ranges, or counts them in what is compressed
            self._options["headers"] = {**self._options.get("headers", {}), "Accept-Encoding": "identity"}
        self._asynchronous = kind.async_impl and "::" not in self._url
        self._reset()
        _remotes.add(self)

    def _reset(self) -> None:
        # reentrant: garbage collection of a dataset, which closes its remotes, may run at any point
        self._lock = threading.RLock()
        self._loop: RemoteLoop | None = None
        self._plain = PlainFilesystems(self._url, self._options)
        self._reached = False
        """True once a file was fetched from the remote."""
        self._root: str | None = None
        """Path in a filesystem without an event loop; None until one was opened."""
        self._closed = threading.Event()
        self._moving: set[concurrent.futures.Future[Any]] = set()

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self._url, "options": self._options, "tries": self._tries, "stall_s": self._stall_s}

    def __setstate__(self, state: dict[str, Any]) -> None:
        RemoteFolder.__init__(self, state["url"], state["options"], tries=state["tries"], stall_s=state["stall_s"])

    @property
    def address(self) -> str:
        """Address as the user gave it, which may contain credentials; never use it in messages."""
        return self._url

    @property
    def url(self) -> str:
        """Address without credentials and query, for messages."""
        return scrubbed(self._url)

    @property
    def identity(self) -> str:
        """URL without credentials, and the server, because two servers may have buckets of the same name."""
        options = {**self._options, **self._options.get("client_kwargs", {})}
        server = [scrubbed(str(options[name])) for name in _SERVERS if options.get(name)]
        return " ".join([self.url, *(["at", *server] if server else [])])

    def url_of(self, name: str) -> str:
        return str(self.local / name) if self.local else scrubbed(joined(self._url, name))

    def read(self, name: str, *, deadline_s: float, first: int | None = None) -> bytes:
        """Return a small file, or its first `first` bytes. Raise ShardUnavailableError, with FileNotFoundError as the
        cause for a missing file; ShardCorruptError for more than LARGEST_READ bytes of a remote file."""
        if self.local:
            return read_file(self.local / name, LARGEST_READ, first)
        if first is not None:
            return self._part(name, 0, first, deadline_s)[:first]
        buffer = io.BytesIO()
        self._fetch(name, buffer, None, deadline_s)
        return buffer.getvalue()

    def copy(self, name: str, to: Path, *, deadline_s: float) -> None:
        """Download a file of unknown size. Raises ShardUnavailableError."""
        with open(to, "wb", buffering=0, opener=open_plain) as file:
            file.truncate(self._fetch(name, file, None, deadline_s))

    def download(self, name: str, to: Path, *, expected_size: int, deadline_s: float) -> None:
        """Download a file. Raises ShardUnavailableError (also: full disk), ShardCorruptError for another size."""
        with open(to, "wb", buffering=0, opener=open_plain) as file:
            self._fetch(name, file, expected_size, deadline_s)
            file.truncate(expected_size)

    def has(self, name: str, size: int, *, deadline_s: float) -> bool:
        """Return True if the remote reports a file of this name and size; False also if it does not answer."""
        if self.local:
            return (self.local / name).is_file() and (self.local / name).stat().st_size == size
        try:
            until = time.monotonic() + deadline_s
            info = self._call(until, "info", self._path_of(name, until))
        except PenstockError:
            raise
        except Exception:
            return False
        return bool(info.get("size") == size)

    def size(self, name: str, *, deadline_s: float) -> int:
        """Return a file's size in bytes. Raises ShardUnavailableError; DatasetError if the server reports none."""

        def work(until: float) -> int:
            info = self._call(until, "info", self._path_of(name, until))
            if type(info.get("size")) is not int:
                raise DatasetError(
                    f"{self.url_of(name)}: the server must report the file's size. Use another server, or a local copy"
                )
            return int(info["size"])

        found: int = self._retry(work, name, deadline_s, "read")
        return found

    def read_range(self, name: str, begin: int, end: int, *, deadline_s: float) -> bytes:
        """Return the bytes from `begin` to before `end`. Raise ShardUnavailableError, ShardCorruptError if the file
        ends before, DatasetError if the server sends more than it was asked for."""
        data = self._part(name, begin, end, deadline_s)
        if len(data) < end - begin:
            raise ShardCorruptError(
                f"{self.url_of(name)} must have {end - begin} bytes from byte {begin} on, got {len(data)}"
            )
        if len(data) > end - begin:
            raise DatasetError(
                f"{self.url_of(name)}: the server must send bytes {begin} to {end - 1} of it, got {len(data)} bytes. "
                "Use a server that supports ranges, or index a copy of the files by index_folder(ranges=False)"
            )
        return data

    def _part(self, name: str, begin: int, end: int, deadline_s: float) -> bytes:
        def work(until: float) -> bytes:
            path = self._path_of(name, until)
            try:
                if self._is_http:
                    loop, fs, _ = self._opened(until)
                    data = self._run(loop, http_part(fs, path, begin, end, self.url_of(name)), until, None)
                else:
                    data = self._call(until, "cat_file", path, start=begin, end=end)
            except Exception as error:
                if getattr(error, "status", None) != PAST_END:
                    raise
                data = b""
            return bytes(data)

        data: bytes = self._retry(work, name, deadline_s, "read")
        return data

    def download_range(self, name: str, to: Path, *, begin: int, size: int, deadline_s: float) -> None:
        """Download `size` bytes from `begin` on. Raises as `read_range`, and ShardUnavailableError for a full disk."""
        until = time.monotonic() + deadline_s
        with open(to, "wb", opener=open_plain) as file:
            for at in range(begin, begin + size, RANGE_BYTES):
                end = min(at + RANGE_BYTES, begin + size)
                file.write(self.read_range(name, at, end, deadline_s=until - time.monotonic()))

    def exists(self, name: str, *, deadline_s: float) -> bool:
        """Return False if a file is missing, or if the remote does not say whether it exists."""
        if self.local:
            return (self.local / name).exists()
        try:
            self.version(name, deadline_s=deadline_s)
        except PenstockError:
            raise
        except Exception:
            return False
        return True

    def version(self, name: str, *, deadline_s: float, of_content: bool = False) -> str | None:
        """Return the time or ETag, which changes with the file; None if the remote reports neither. `of_content`: the
        ETag rather than the time, which may stay the same for the same content. Raises FileNotFoundError, or any other
        error of the remote."""
        until = time.monotonic() + deadline_s
        path = self._path_of(name, until)
        if self._is_http:
            loop, fs, _ = self._opened(until)
            return age_of(self._run(loop, http_headers(fs, path), until, None), of_content=of_content)
        return age_of(self._call(until, "info", path), of_content=of_content)

    # ---- writing

    def names(self, *, deadline_s: float) -> list[str]:
        """Return the names in the folder; none without a folder. Raises ShardUnavailableError, locally OSError."""
        if self.local:
            return [path.name for path in self.local.iterdir()] if self.local.is_dir() else []
        return self._listed("ls", deadline_s, detail=False)

    def find(self, *, deadline_s: float) -> list[str]:
        """Return relative paths of all files; none without a folder. Raises ShardUnavailableError, locally OSError."""
        if self.local:
            files = (path for path in self.local.rglob("*") if path.is_file())
            return sorted(path.relative_to(self.local).as_posix() for path in files)
        return sorted(self._listed("find", deadline_s))

    def _listed(self, method: str, deadline_s: float, **options: Any) -> list[str]:
        def work(until: float) -> list[str]:
            root = self._path_of("", until).strip("/")
            try:
                found = self._call(until, method, root, **options)
            except FileNotFoundError:
                return []
            names = [name.strip("/").removeprefix(root).strip("/") for name in found]
            return [name for name in names if name]

        names: list[str] = self._retry(work, "", deadline_s, "listed")
        return names

    def upload(self, name: str, source: Path, *, deadline_s: float) -> None:
        """Upload a file: completely or not at all to a folder or an object store; others may keep a part of it after a
        failure. Raises ShardUnavailableError."""
        if self.local:
            copy_file(source, self.local / name)
            return
        self._retry(
            lambda until: self._call(until, "put_file", str(source), self._path_of(name, until), stall_s=math.inf),
            name,
            deadline_s,
            "written",
        )

    def write(self, name: str, data: bytes, *, deadline_s: float) -> None:
        """Write `data` to a file in the remote folder, as `upload` does. Raises ShardUnavailableError."""
        if self.local:
            write_file(self.local / name, data)
            return
        self._retry(
            lambda until: self._call(until, "pipe_file", self._path_of(name, until), data, stall_s=math.inf),
            name,
            deadline_s,
            "written",
        )

    def remove(self, name: str, *, deadline_s: float) -> None:
        """Remove a file, if there is one. Raises ShardUnavailableError, for a local folder OSError."""
        if self.local:
            (self.local / name).unlink(missing_ok=True)
            return

        def work(until: float) -> None:
            with contextlib.suppress(FileNotFoundError):
                self._call(until, "rm_file", self._path_of(name, until))

        self._retry(work, name, deadline_s, "removed")

    def _retry(self, work: Callable[[float], Any], name: str, deadline_s: float, done: str) -> Any:
        """Call `work` (with the monotonic deadline) until it succeeds. Raise ShardUnavailableError if it fails
        permanently or `tries` times, or at the deadline. `done`: for errors, such as "read"."""
        until = time.monotonic() + deadline_s
        failures = 0
        while True:
            self._check_open(name, done)
            try:
                return work(until)
            except PenstockError:
                raise
            except Exception as error:
                failure_kind = judge(error)
                error.__traceback__ = (
                    None  # the traceback's frames refer to the error, and to the caller's dataset and locks
                )
            failures += 1
            self._pause(name, done, failures, failure_kind, until, deadline_s)

    def close(self) -> None:
        """End all transfers with an error. Remotes with an event loop end them within a second."""
        self._closed.set()
        with self._lock:
            moving, loop, self._loop = tuple(self._moving), self._loop, None
        self._plain.close()
        for future in moving:
            future.cancel()
        if loop:
            loop.close()

    def _fetch(self, name: str, file: io.FileIO | io.BytesIO, expected: int | None, deadline_s: float) -> int:
        until = time.monotonic() + deadline_s
        parallel = self._asynchronous or self._protocol in _BY_RANGES
        progress = DownloadProgress(expected, parallel=PARALLEL if parallel else 1)
        source = self.url_of(name)
        failures = 0
        limit = expected if expected is not None else LARGEST_READ if isinstance(file, io.BytesIO) else LARGEST_COPY
        while True:
            target = DownloadTarget(file, progress.at, limit, source, is_known=expected is not None)
            try:
                self._check_open(name, "fetched")
                self._try(name, target, progress, until, source)
                if expected is not None and target.at != expected:
                    raise TransferBroken(f"the transfer ended after {target.at} of {expected} bytes")
                self._reached = True
                return target.at
            except ShardCorruptError:
                self._check_encoding(name, until)
                raise
            except PenstockError:
                raise
            except Exception as error:
                failure_kind = judge(error)
                changed = isinstance(error, FileChanged)
            finally:
                target.abandon()
            failures = failures + 1 if target.at <= progress.at or changed else 1
            progress.at = target.at
            if changed:
                progress.begin_again()
            if failure_kind.no_such_host and not self._reached and failures == QUIET_TRIES:  # probably mistyped
                failure_kind = replace(failure_kind, final=True)
            self._pause(name, "fetched", failures, failure_kind, until, deadline_s)

    def _check_encoding(self, name: str, until: float) -> None:
        """Raise DatasetError for an object of S3 that says that it is compressed; s3fs does not tell of that."""
        if self._protocol in ("s3", "s3a") and self._asynchronous:
            bucket, key, _ = self._opened(until)[1].split_path(self._path_of(name, until))
            head = self._call(until, "call_s3", "head_object", Bucket=bucket, Key=key)
            check_encoding(head.get("ContentEncoding"), self.url_of(name))

    def _check_open(self, name: str, done: str) -> None:
        if self._closed.is_set():
            raise ShardUnavailableError(
                f"{self.url_of(name)} could not be {done}, because {CLOSED}. Open the dataset again"
            )

    def _pause(
        self, name: str, done: str, failures: int, failure_kind: FailureKind, until: float, deadline_s: float
    ) -> None:
        """Wait before the next attempt. Raise ShardUnavailableError if there is none. `done`: as in `_retry`."""
        source, left = self.url_of(name), until - time.monotonic()
        pause = pause_before_retry(failures, left, failure_kind)
        if failure_kind.final or failures == self._tries:
            code = failure_kind.code
            cause = OSError(code, os.strerror(code), source) if code else None  # of the class that fits the code
            # Any other cause is left out, because its text may contain credentials.
            raise ShardUnavailableError(
                f"{source} could not be {done} after {tries_text(failures)}: {failure_kind.reason}. Check the address "
                "and storage_options"
            ) from cause
        if pause >= left or left < LAST_PAUSE_S:
            raise ShardUnavailableError(
                f"{source} could not be {done} within {max(0.0, deadline_s):.3g} s, {tries_text(failures)}: "
                f"{failure_kind.reason}. Check that the server answers and that storage_options are right, or raise "
                "timeout_s"
            )
        if failures == QUIET_TRIES:
            _log.warning(
                "%s could not be %s yet: %s; retrying for %.0f s more", source, done, failure_kind.reason, left
            )
        self._closed.wait(pause)

    def _try(self, name: str, target: DownloadTarget, progress: DownloadProgress, until: float, source: str) -> None:
        path = self._path_of(name, until)
        if not self._asynchronous:
            by_pieces(partial(self._begin, until), path, target, progress, source)
            return
        loop, fs, _ = self._opened(until)
        if self._is_http:
            self._run(loop, over_http(fs, path, target, progress, source), until, target)
        else:
            by_pieces(partial(self._begin, until), path, target, progress, source)

    def _path_of(self, name: str, until: float) -> str:
        if self._asynchronous:
            return joined(self._opened(until)[2], name)
        if self._root is None:
            self._root = self._wait(self._plain.begin(lambda fs, root: root), until, math.inf, None)
        return joined(self._root, name)

    def _call(self, until: float, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._begin(until, method, *args, **kwargs).result()

    def _begin(self, until: float, method: str, *args: Any, stall_s: float | None = None, **kwargs: Any) -> Request:
        """Begin a call of a method or its coroutine `_METHOD`, which is cancelled after `stall_s` without progress."""
        if not self._asynchronous:
            if method == "cat_file":
                kwargs |= _BY_RANGES.get(self._protocol, {})
            # One call may transfer a whole file or archive, so only the deadline ends the call.
            future = self._plain.begin(lambda fs, root: getattr(fs, method)(*args, **kwargs))
            return Request(future, partial(self._wait, until=until, stall_s=math.inf, target=None))
        loop, fs, _ = self._opened(until)
        future = self._started(loop, loop.renewing(partial(getattr(fs, f"_{method}"), *args, **kwargs)))
        return Request(future, partial(self._wait, until=until, stall_s=stall_s or self._stall_s, target=None))

    def _run(
        self, loop: RemoteLoop, work: Coroutine[Any, Any, Any], until: float, target: DownloadTarget | None
    ) -> Any:
        return self._wait(self._started(loop, work), until, self._stall_s, target)

    def _started(self, loop: RemoteLoop, work: Coroutine[Any, Any, Any]) -> concurrent.futures.Future[Any]:
        with self._lock:
            if self._closed.is_set():
                work.close()
                raise TransferBroken(CLOSED)
            return loop.call(work)

    def _wait(
        self, future: concurrent.futures.Future[Any], until: float, stall_s: float, target: DownloadTarget | None
    ) -> Any:
        """Return the result. Without progress, which `target` counts, cancel the future and raise TransferBroken."""
        try:
            with self._lock:
                if self._closed.is_set():
                    raise TransferBroken(CLOSED)
                self._moving.add(future)
            while True:
                before = target.at if target else 0
                concurrent.futures.wait((future,), min(stall_s, max(0.0, until - time.monotonic())))
                if future.cancelled():
                    raise TransferBroken(CLOSED)
                if future.done():
                    return future.result()
                if time.monotonic() >= until:
                    raise TransferBroken("the deadline passed")
                if not target or target.at - before < MIN_PROGRESS_BYTES:
                    received = f"{target.at - before} bytes" if target else "nothing"
                    raise TransferBroken(f"{received} arrived in {stall_s:g} s")
        finally:
            future.cancel()
            with self._lock:
                self._moving.discard(future)

    def _opened(self, until: float) -> tuple[RemoteLoop, Any, str]:
        with self._lock:
            if self._closed.is_set():
                raise TransferBroken(CLOSED)
            if self._loop is None:
                self._loop = RemoteLoop(self._url, self._options)
                weakref.finalize(self, RemoteLoop.close, self._loop)  # called also at the interpreter's exit
            loop = self._loop
            if loop.ended:
                raise ShardUnavailableError(f"{self.url} cannot be read or written, because the interpreter is exiting")
        concurrent.futures.wait((loop.opening,), min(self._stall_s, max(0.0, until - time.monotonic())))
        if loop.opening.cancelled():
            raise TransferBroken(CLOSED)
        if not loop.opening.done():
            raise TransferBroken("the remote was not opened in time")
        if loop.opening.exception():
            with self._lock:
                self._loop = None if self._loop is loop else self._loop
            loop.close()
        fs, root = loop.opening.result()
        return loop, fs, root


_remotes: weakref.WeakSet[RemoteFolder] = weakref.WeakSet()


def _forked() -> None:
    for remote in list(_remotes):
        remote._reset()


os.register_at_fork(after_in_child=_forked)
