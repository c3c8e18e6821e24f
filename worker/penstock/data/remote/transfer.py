"""One try at getting a file's bytes through fsspec, and what a failure of it means.

HTTP is read as one stream, each answer looked at before its body: a broken stream is gone on with at its byte, if the
server says by its validator (ETag or Last-Modified) that the file is still the same one. Everything else that fsspec
reaches (object stores, memory, SFTP) is read in pieces by `cat_file`, and what the place tells of the file is compared
before and after: a file that changed under way is begun again, never mixed.
"""

from __future__ import annotations

import email.utils
import errno
import io
import os
import re
import socket
import tarfile
import threading
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.proto.errors import PenstockError, ShardCorruptError, ShardUnavailableError

__all__ = [
    "PIECE",
    "DownloadProgress",
    "DownloadTarget",
    "FailureKind",
    "FileChanged",
    "TransferBroken",
    "age_of",
    "by_pieces",
    "http_headers",
    "judge",
    "over_http",
    "scrubbed",
]

PIECE = 4 << 20
"""Bytes asked of an object store at a time: large beside a request's latency, small beside what a slow line brings
before it counts as stalled."""
_PASSING = frozenset((408, 425, 429))
"""The statuses below 500 that a later try may not meet."""
_HOPELESS = (
    FileNotFoundError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    ValueError,  # an address that is none, a certificate that is not trusted
    TypeError,
    LookupError,
    ImportError,
    NotImplementedError,
    tarfile.TarError,
    zipfile.BadZipFile,
)
_AGES = ("Last-Modified", "LastModified", "last_modified", "modified", "updated", "mtime", "created", "ETag", "etag")
"""By which names places say when a file was written, the best first. An ETag is the last resort: it may be that of the
content."""
_ADDRESS = re.compile(r"(\w+://)(?:[^/\s?#]*@)?([^\s?#'\"<>]*)(?:[?#][^\s'\"<>]*)?")


class TransferBroken(Exception):
    """The transfer ended before its end; it may be gone on with."""


class FileChanged(Exception):
    """The file is not the one that the transfer began with."""


def scrubbed(text: str) -> str:
    """Without credentials, query strings and fragments in addresses."""
    return _ADDRESS.sub(r"\1\2", text)


class DownloadTarget(io.RawIOBase):
    """Where the bytes of one try land: a file, from a position on, and never more than `limit`.

    Written by the event loop's thread and abandoned by another's: after `abandon` nothing is written any more.
    """

    def __init__(self, file: io.FileIO | io.BytesIO, at: int, limit: int, source: str) -> None:
        super().__init__()
        self._file = file
        self._limit = limit
        self._source = source
        self._lock = threading.Lock()
        self._abandoned = False
        self.at = at

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        with self._lock:
            if self._abandoned:
                raise TransferBroken("was given up")
            if self.at + len(data) > self._limit:
                raise ShardCorruptError(f"{self._source} has more than the {self._limit} bytes that it should have")
            view = memoryview(data)
            while view:
                try:
                    self._file.seek(self.at)
                    written = self._file.write(view)
                except OSError as error:
                    raise unwritable(error, self._file, self._limit, self._source) from error
                self.at += written
                view = view[written:]
            return len(data)

    def rewind(self) -> None:
        """The bytes come from the first on."""
        with self._lock:
            self.at = 0

    def abandon(self) -> None:
        with self._lock:
            self._abandoned = True


def unwritable(error: OSError, file: io.FileIO | io.BytesIO, needed: int, source: str) -> ShardUnavailableError:
    """The error for bytes that this machine's disk does not take."""
    name = str(getattr(file, "name", ""))
    text = f"{source} could not be written to {name}: {error.strerror}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        disk = os.statvfs(os.path.dirname(name))
        text += f"; it needs {needed} bytes, {disk.f_bavail * disk.f_frsize} are free: make room, or set a cache limit"
    return ShardUnavailableError(text)


@dataclass
class DownloadProgress:
    """What is known of a file that is being fetched, from one try to the next."""

    expected: int | None
    """Bytes, by the index."""
    at: int = 0
    """Bytes that have landed."""
    validator: str = ""
    """HTTP: what the server calls this version of the file; "" if it has no name that may be relied on."""
    told: Any = None
    """Other places: what they told of the file."""

    def begin_again(self) -> None:
        self.at, self.validator, self.told = 0, "", None

    def check_size(self, size: int, source: str) -> None:
        if self.expected is not None and size != self.expected:
            raise ShardCorruptError(
                f"{source} has {size} bytes, its index says {self.expected}: has it changed since then?"
            )


async def over_http(fs: Any, url: str, target: DownloadTarget, progress: DownloadProgress, source: str) -> None:
    """As one stream, from `progress.at` on if the file can be shown to be the same."""
    import aiohttp  # here, for it comes with an extra

    headers = {**fs.kwargs.get("headers", {}), "Accept-Encoding": "identity"}
    if not progress.validator:
        target.rewind()
    elif target.at:
        headers |= {"Range": f"bytes={target.at}-", "If-Range": progress.validator}

    async def look(response: aiohttp.ClientResponse) -> None:
        if response.status == 416:
            raise FileChanged("has become shorter while it was read")
        if response.status >= 400:
            response.raise_for_status()
        validator = _validator(response.headers)
        if response.status == 206 and target.at:
            found = re.match(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", ""))
            if not found or int(found[1]) != target.at or (validator and validator != progress.validator):
                raise FileChanged("was changed while it was read")
        else:
            target.rewind()
            progress.validator = validator
        if response.content_length is not None:
            progress.check_size(target.at + response.content_length, source)

    timeout = aiohttp.ClientTimeout(total=None)  # whoever waits for this looks at its progress
    await fs._get_file(url, target, headers=headers, raise_for_status=look, timeout=timeout)


async def http_headers(fs: Any, url: str) -> Any:
    """What a server says of a file. Raises FileNotFoundError if there is none."""
    session = await fs.set_session()
    async with session.head(fs.encode_url(url), allow_redirects=True, **fs.kwargs) as response:
        if response.status in (404, 410):
            raise FileNotFoundError(url)
        response.raise_for_status()
        return dict(response.headers)


def age_of(told: Any) -> str | None:
    """When a file was written, of what a place tells of it, as a text to be compared."""
    return next((f"{name}: {told[name]}" for name in _AGES if told.get(name)), None)


def _validator(headers: Any) -> str:
    """Only what changes whenever a byte does: no weak ETag."""
    tag = str(headers.get("ETag", ""))
    if tag:
        return "" if tag.startswith("W/") else tag
    return str(headers.get("Last-Modified", ""))


def by_pieces(
    call: Callable[..., Any], path: str, target: DownloadTarget, progress: DownloadProgress, source: str
) -> None:
    """By ranges; `call` is the filesystem's method of a name, with a deadline for each call."""
    size = progress.expected
    if size is not None and size <= PIECE and not target.at:
        # One request, for one byte more than there should be.
        data = call("cat_file", path, start=0, end=size + 1)
        progress.check_size(len(data) if len(data) <= size else call("info", path)["size"], source)
        target.write(data)
        return
    if progress.told is None:
        target.rewind()
        progress.told = call("info", path)
    size = progress.told["size"]
    if size is None:
        target.write(call("cat_file", path))
        return
    progress.check_size(size, source)
    while target.at < size:
        end = min(size, target.at + PIECE)
        data = call("cat_file", path, start=target.at, end=end)
        if len(data) != end - target.at:
            raise TransferBroken(f"{len(data)} bytes came where {end - target.at} were asked for")
        target.write(data)
    if call("info", path) != progress.told:
        raise FileChanged("was changed while it was read")


@dataclass(frozen=True)
class FailureKind:
    """What a failure means."""

    reason: str
    final: bool
    again_after_s: float = 0.0
    """What the server asks for."""
    no_such_host: bool = False
    """Nobody has the name in its address; also said where a network is down."""


def judge(error: Exception) -> FailureKind:
    status = getattr(error, "status", None)
    if isinstance(status, int) and status >= 400:  # aiohttp's, without being imported here
        reason = f"HTTP {status} {getattr(error, 'message', '')}".rstrip()
        final = status < 500 and status not in _PASSING
        return FailureKind(reason, final, _retry_after(getattr(error, "headers", None) or {}))
    if isinstance(error, FileNotFoundError):
        return FailureKind("there is no such file", final=True)
    if isinstance(error, PermissionError):
        return FailureKind(f"access is denied ({scrubbed(str(error))})", final=True)
    text = f"{type(error).__name__}: {scrubbed(str(error))}" if str(error) else type(error).__name__
    if isinstance(error, TransferBroken | FileChanged):
        text = str(error)
    hopeless = isinstance(error, _HOPELESS) or type(error).__name__ == "NoCredentialsError"
    return FailureKind(text, hopeless or isinstance(error, PenstockError), no_such_host=_no_such_host(error))


def _no_such_host(error: BaseException) -> bool:
    """A name that no server has; an answer that did not come is another error (EAI_AGAIN)."""
    cause: Any = getattr(error, "os_error", error)  # aiohttp's errors have it inside
    return isinstance(cause, socket.gaierror) and cause.errno == socket.EAI_NONAME


def _retry_after(headers: Any) -> float:
    """Seconds, from a number or a date; 0 if it is neither."""
    text = str(headers.get("Retry-After", "")).strip()
    if text.isdecimal():
        return float(text)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except ValueError:
        return 0.0
