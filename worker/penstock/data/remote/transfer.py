"""One attempt to fetch a file's bytes through fsspec, and classification of what made an attempt fail.

HTTP is read as one stream. A broken one is continued if the server's *validator* (ETag or Last-Modified) shows that the
file is unchanged. Other storage (object stores, memory, SFTP) is read in pieces, several at a time where there is an
event loop; the file's `info` is compared before and after.
A file that changed meanwhile is read again from its beginning.
"""

from __future__ import annotations

import email.utils
import errno
import io
import os
import random
import re
import shutil
import socket
import tarfile
import threading
import time
import zipfile
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from penstock.proto.errors import DatasetError, PenstockError, ShardCorruptError, ShardUnavailableError

PIECE = 4 << 20
"""Bytes of a request: so many that latency hardly matters, so few that a slow connection is not taken as stalled."""
PARALLEL, LARGE_PIECE = 4, 8 << 20
"""Number and bytes of pieces that are requested at the same time while nothing fails. Latency is tens of ms and the
rate of a request limited, so 4 bring 32 MiB in little more time than 1 brings 8. boto3's pieces are as large."""
CLOSED = "the dataset was closed"
"""Reason, in errors, of calls that end because the RemoteFolder was closed."""
LARGEST_COPY = 1 << 44
"""Largest size in bytes of a file of unknown size that is copied to a disk."""
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 10.0
MOST_DOUBLINGS = 30
"""Most doublings of the pause: enough for LONGEST_PAUSE_S, and a float holds the result."""
LAST_PAUSE_S = 0.2
"""Least seconds until the deadline with which a new attempt begins."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
_PASSING = frozenset((408, 425, 429))
"""HTTP statuses below 500 of temporary errors."""
FORBIDDEN = 403
_ABSENT = (404, 410)
"""HTTP statuses for a file that does not exist."""
_PERMANENT = (
    FileNotFoundError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    ValueError,  # an invalid address, an untrusted certificate
    TypeError,
    LookupError,
    ImportError,
    NotImplementedError,
    tarfile.TarError,
    zipfile.BadZipFile,
)
_AGES = (
    "Last-Modified",
    "LastModified",
    "last_modified",
    "modified",
    "updated",
    "mtime",
    "created",
    "ETag",
    "etag",
    "blob_id",
)
"""Fields in which remotes report a file's time or version, the best first. ETag and blob_id come last, because they may
be digests, which stay the same when the same content is written again."""
_ADDRESS = re.compile(r"(\w+://)(?:[^/\s?#]*@)?([^\s?#'\"<>]*)(?:[?#][^\s'\"<>]*)?")


class TransferBroken(Exception):
    """Error of an attempt that ended before all bytes arrived. Another attempt may continue the transfer."""


class FileChanged(Exception):
    """Error for a file that was changed while it was read, so it has to be read again from its beginning."""


def scrubbed(text: str) -> str:
    """Return the text without the credentials, query strings and fragments of the addresses in it."""
    return _ADDRESS.sub(r"\1\2", text)


class DownloadTarget(io.RawIOBase):
    """File to which one attempt of a download writes, from offset `at` up to `limit` bytes in all. Over HTTP the event
    loop's thread writes to it, else the downloading one. After `abandon` nothing more is written."""

    def __init__(self, file: io.FileIO | io.BytesIO, at: int, limit: int, source: str, *, is_known: bool) -> None:
        """`is_known`: `limit` is the size in the index, and not only the largest that is accepted."""
        super().__init__()
        self._file = file
        self._limit, self._is_known = limit, is_known
        self._source = source
        self._lock = threading.Lock()
        self._abandoned = False
        self.at = at

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        with self._lock:
            if self._abandoned:
                raise TransferBroken("the attempt was abandoned")
            if self.at + len(data) > self._limit:
                raise ShardCorruptError(
                    f"{self._source} must have {self._limit} bytes, as the dataset's index lists, got more. Upload the "
                    "index and the files of the same version of the dataset"
                    if self._is_known
                    else f"{self._source} must have at most {self._limit} bytes, got more. Check the address"
                )
            view = memoryview(data)
            while view:
                try:
                    self._file.seek(self.at)
                    written = self._file.write(view)
                except OSError as error:
                    needed = self._limit if self._limit < LARGEST_COPY else self.at + len(view)
                    raise unwritable(error, str(getattr(self._file, "name", "")), needed, self._source) from error
                self.at += written
                view = view[written:]
            return len(data)

    def rewind(self) -> None:
        """Go back to the first byte, because the file is downloaded again from its beginning."""
        with self._lock:
            self.at = 0

    def abandon(self) -> None:
        with self._lock:
            self._abandoned = True


def unwritable(error: OSError, path: str, needed: int, source: str) -> ShardUnavailableError:
    """Return the error for a local disk that refuses bytes at `path`. `needed`: size of the whole file in bytes."""
    name = os.path.realpath(path)  # the path may be a descriptor's number
    text = f"{source} could not be written to {name}: {error if error.filename else error.strerror}"
    if error.errno in (*_FULL, errno.EFBIG):
        free = shutil.disk_usage(name if os.path.isdir(name) else os.path.dirname(name)).free
        text += (
            f"; it needs {needed} bytes, {free} are free. Free space or raise the quota, set "
            "cache_limit, or give a cache folder on another disk"
        )
    else:
        text += ". Give a cache folder that this user can write to"
    return ShardUnavailableError(text)


def is_full(error: BaseException, kinds: Collection[int] = _FULL) -> bool:
    """Return True if `error`, or its cause, says (by an errno in `kinds`) that the disk or a quota on it is full."""
    return any(isinstance(each, OSError) and each.errno in kinds for each in (error, error.__cause__))


@dataclass
class DownloadProgress:
    """State of a file's download after an attempt, from which the next attempt continues."""

    expected: int | None
    """Bytes of the file, according to the index; None if unknown."""
    at: int = 0
    """Bytes written so far."""
    validator: str = ""
    """Changes with the content: ETag, or over HTTP else Last-Modified; "" for a weak ETag, or without either."""
    info: Any = None
    """Result of fsspec's `info`; None before it was requested, and over HTTP."""
    parallel: int = 1
    """Number of pieces that are requested at the same time, except over HTTP."""

    @property
    def is_small(self) -> bool:
        """A single request can fetch the whole file."""
        return self.expected is not None and self.expected <= PIECE and not self.at

    def begin_again(self) -> None:
        self.at, self.validator, self.info = 0, "", None

    def check_size(self, size: int, source: str) -> None:
        if self.expected is not None and size != self.expected:
            raise ShardCorruptError(
                f"{source} must have {self.expected} bytes, as the dataset's index lists, got {size}. Open it again"
            )


async def over_http(fs: Any, url: str, target: DownloadTarget, progress: DownloadProgress, source: str) -> None:
    """Read a file over HTTP as one stream. Continue after the bytes in `target` if the validator shows that the file is
    unchanged; otherwise begin again. `source`: for errors."""
    import aiohttp  # imported here, because it comes with an extra

    headers = dict(fs.kwargs["headers"])
    if not progress.validator:
        target.rewind()
    elif target.at:
        headers |= {"Range": f"bytes={target.at}-", "If-Range": progress.validator}

    async def check(response: aiohttp.ClientResponse) -> None:
        if response.status == 416:
            raise FileChanged("the file became shorter while it was read")
        if response.status >= 400:
            response.raise_for_status()
        validator = _validator(response.headers)
        if response.status == 206 and target.at:
            found = re.match(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", ""))
            if not found or int(found[1]) != target.at or (validator and validator != progress.validator):
                raise FileChanged("the file was changed while it was read")
        else:
            target.rewind()
            progress.validator = validator
        length = response.content_length
        if length is None or progress.expected not in (None, target.at + length):
            check_encoding(response.headers.get("Content-Encoding"), source)
        if length is not None:
            progress.check_size(target.at + length, source)

    timeout = aiohttp.ClientTimeout(total=None)  # no timeout here: the waiting thread watches the progress
    await fs._get_file(url, target, headers=headers, raise_for_status=check, timeout=timeout)


async def http_part(fs: Any, url: str, begin: int, end: int, source: str) -> bytes:
    """Return the bytes that a server sends for a range of a file, which may be others. `source`: for errors."""
    session = await fs.set_session()
    options = {**fs.kwargs, "headers": {**fs.kwargs["headers"], "Range": f"bytes={begin}-{end - 1}"}}
    async with session.get(fs.encode_url(url), **options) as response:
        data: bytes = await response.read()
        fs._raise_not_found_for_status(response, url)
    if response.status != 206 or len(data) != end - begin:
        check_encoding(response.headers.get("Content-Encoding"), source)
    return data


def check_encoding(encoding: str | None, source: str) -> None:
    """Raise DatasetError if the Content-Encoding of an answer, whose length is wrong or unknown, is the cause."""
    if encoding not in (None, "", "identity", "aws-chunked"):
        raise DatasetError(
            f"{source} must arrive as it was indexed, and arrives compressed (Content-Encoding: {encoding}). Turn off "
            "the server's compression for data, or store the file without that encoding"
        )


async def http_headers(fs: Any, url: str) -> Any:
    """Return a server's headers for a file. Raise FileNotFoundError if it has no such file."""
    session = await fs.set_session()
    async with session.head(fs.encode_url(url), allow_redirects=True, **fs.kwargs) as response:
        if response.status in (404, 410):
            raise FileNotFoundError(url)
        response.raise_for_status()
        return dict(response.headers)


def age_of(info: Any, *, of_content: bool = False) -> str | None:
    """Return a file's time or version, which changes with each write, from its `info` or headers; or None.
    `of_content`: the last of them in _AGES, which may stay the same for the same content."""
    names = reversed(_AGES) if of_content else _AGES
    return next((f"{name}: {info[name]}" for name in names if info.get(name)), None)


def _validator(headers: Any) -> str:
    """Return a strong ETag, or Last-Modified without an ETag, which change with any byte; "" for others."""
    tag = str(headers.get("ETag", ""))
    if tag:
        return "" if tag.startswith("W/") else tag
    return str(headers.get("Last-Modified", ""))


@dataclass(frozen=True, slots=True)
class Request:
    """Running call of a filesystem's method."""

    future: Future[Any]
    wait: Callable[[Future[Any]], Any]

    def result(self) -> Any:
        """Wait until the call ends, or its deadline; return its result or raise its error, or TransferBroken."""
        return self.wait(self.future)


def by_pieces(
    begin: Callable[..., Request], path: str, target: DownloadTarget, progress: DownloadProgress, source: str
) -> None:
    """Read a file in pieces, several at a time. `begin(method, ...)` begins a call of the filesystem's method."""

    def call(*arguments: Any, **options: Any) -> Any:
        return begin(*arguments, **options).result()

    size = progress.expected
    if size is not None and progress.is_small:
        # Request one byte more than expected, to detect a longer file.
        data = call("cat_file", path, start=0, end=size + 1)
        progress.check_size(len(data) if len(data) <= size else call("info", path)["size"], source)
        target.write(data)
        return
    if progress.info is None:
        target.rewind()
        progress.info = call("info", path)
    size = progress.info["size"]
    if size is None:
        target.write(call("cat_file", path))
        return
    progress.check_size(size, source)
    _copy_pieces(lambda start, end: begin("cat_file", path, start=start, end=end), size, target, progress)
    if call("info", path) != progress.info:
        raise FileChanged("the file was changed while it was read")


def _copy_pieces(
    begin: Callable[[int, int], Request],
    size: int,
    target: DownloadTarget,
    progress: DownloadProgress,
) -> None:
    """Copy a file from `target.at` to `size`, by requests of `begin(start, end)`.

    After an error, further attempts request one smaller piece at a time: several would share a slow connection's rate,
    so that each counts as stalled, and some servers refuse parallel requests.
    """
    requests: deque[tuple[int, Request]] = deque()
    requested = target.at
    try:
        while target.at < size:
            while requested < size and len(requests) < progress.parallel:
                end = min(size, requested + (LARGE_PIECE if progress.parallel > 1 else PIECE))
                requests.append((end, begin(requested, end)))
                requested = end
            end, request = requests.popleft()
            data = request.result()
            # the server does not support ranges, and sent the whole file
            if len(data) == size and end - target.at < size:
                data, end = data[target.at :], size
            if len(data) != end - target.at:
                raise TransferBroken(f"{end - target.at} bytes were requested, but {len(data)} arrived")
            target.write(data)
    except Exception:
        progress.parallel = 1
        raise
    finally:
        for _, request in requests:
            request.future.cancel()


@dataclass(frozen=True)
class FailureKind:
    """Reason of a failed attempt, and whether another one may succeed (`final` is False)."""

    reason: str
    final: bool
    again_after_s: float = 0.0
    """Seconds to wait before the next attempt, as the server asks; 0 if it does not say."""
    no_such_host: bool = False
    """DNS says that the host does not exist. It also says so while the network is down."""
    code: int = 0
    """ENOENT if the server reports that the file does not exist, EACCES if that it may not be read, else 0."""


def judge(error: Exception) -> FailureKind:
    status = getattr(error, "status", None)
    if isinstance(status, int) and status >= 400:  # aiohttp's error, without importing aiohttp here
        reason = f"HTTP {status} {getattr(error, 'message', '')}".rstrip()
        final = status < 500 and status not in _PASSING
        again_after_s = _retry_after(getattr(error, "headers", None) or {})
        code = errno.ENOENT if status in _ABSENT else errno.EACCES if status == FORBIDDEN else 0
        return FailureKind(reason, final, again_after_s, code=code)
    if isinstance(error, FileNotFoundError):
        return FailureKind("the file does not exist", final=True, code=errno.ENOENT)
    if isinstance(error, PermissionError):
        return FailureKind(f"access is denied ({scrubbed(str(error))})", final=True, code=errno.EACCES)
    text = f"{type(error).__name__}: {scrubbed(str(error))}" if str(error) else type(error).__name__
    if isinstance(error, TransferBroken | FileChanged):
        text = str(error)
    permanent = isinstance(error, _PERMANENT) or type(error).__name__ == "NoCredentialsError"
    return FailureKind(text, permanent or isinstance(error, PenstockError), no_such_host=_no_such_host(error))


def _no_such_host(error: BaseException) -> bool:
    """Return True if the name does not exist in DNS. An unreachable DNS server is another error (EAI_AGAIN)."""
    cause: Any = getattr(error, "os_error", error)  # aiohttp's errors have the system's error in `os_error`
    return isinstance(cause, socket.gaierror) and cause.errno == socket.EAI_NONAME


def _retry_after(headers: Any) -> float:
    text = str(headers.get("Retry-After", "")).strip()
    if text.isdecimal():
        return float(text)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except ValueError:
        return 0.0


def pause_before_retry(failures: int, left: float, failure_kind: FailureKind) -> float:
    """Return the seconds to wait after `failures` in a row, with `left` seconds until the deadline."""
    growth = 2.0 ** min(failures - 1, MOST_DOUBLINGS)
    pause: float = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * growth) * random.uniform(0.5, 1.0)
    return max(min(pause, left / 2), failure_kind.again_after_s)


def tries_text(count: int) -> str:
    """Return "1 try", "3 tries" and so on, for errors."""
    return "1 try" if count == 1 else f"{count} tries"
