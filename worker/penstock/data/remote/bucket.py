"""A folder in a bucket of an object store that speaks S3, for programs that also write it: uploads from memory in
parallel parts, objects that are made only if no other has their name, and listings that no cache answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

from penstock.data.remote.folders import RemoteFolder
from penstock.proto.errors import DatasetError, ShardUnavailableError

WRITTEN = "written"
PART = 8 << 20
"""Bytes of a part of an upload; an object of at most as many is one request. Each part on its way is a copy, because
s3fs makes a request again with the same body."""
MOST_PARTS = 10_000
PARALLEL = 4
"""Parts of one object that are uploaded at the same time."""
PART_STALL_S = 300.0
"""Seconds that one request may take, until it is made again."""
MOST_REMOVED = 1000
"""Most objects that one request removes."""
END_S = 10.0
"""Seconds for requests that an upload does not depend on."""
_FULL = ("XMinioStorageFull", "XMinioAdminBucketQuotaExceeded", "QuotaExceeded", "InsufficientStorage", "507")
_EXISTS = ("PreconditionFailed", "412")
_UNKNOWN = ("NotImplemented", "501")
_PASSING = ("BadDigest", "IncompleteBody", "RequestTimeout", "XAmzContentSHA256Mismatch", "ConditionalRequestConflict")
"""Codes of errors with an HTTP status from 400 to 499 that another attempt may not meet."""


class Bucket(RemoteFolder):
    """`url`: s3://BUCKET/PATH. All methods raise ShardUnavailableError once the deadline has passed, or for an error
    that remains, such as missing rights; DatasetError for a store that lacks a function."""

    def create(self, name: str, data: bytes, *, deadline_s: float) -> bool:
        """Write an object in one request, unless it exists already. Return False if one with other content exists.
        (With the same content it is this one: a request whose answer was lost is made again.)"""
        return self._put_new(name, data, deadline_s) or self.content(name, deadline_s=deadline_s) == data

    def check_conditions(self, name: str, data: bytes, *, deadline_s: float) -> None:
        """Raise DatasetError if the store writes over the object `name`, which has this content, in `create`."""
        if self._put_new(name, data, deadline_s):
            raise self._without_conditions()

    def _put_new(self, name: str, data: bytes, deadline_s: float) -> bool:
        def work(until: float) -> bool:
            try:
                self._s3(until, "put_object", name, Body=data, IfNoneMatch="*")
            except Exception as error:
                if isinstance(error, FileExistsError) or _code(error) in _EXISTS:
                    return False
                if _code(error) in _UNKNOWN:
                    raise self._without_conditions() from None
                raise
            return True

        return bool(self._retry(work, name, deadline_s, WRITTEN))

    def _without_conditions(self) -> DatasetError:
        return DatasetError(
            f"{self.url}: the object store must support conditional writes (If-None-Match), as S3 and MinIO do, and "
            "this one, or the installed botocore, does not. Use another store, or upgrade s3fs and botocore"
        )

    def put(self, name: str, data: bytes | memoryview, *, deadline_s: float, passed: Callable[[int], None]) -> None:
        """Write an object, in parallel parts if it is large. `passed` is called with the number of bytes of each part
        that has arrived; if it raises an error, the upload ends with it. After any error nothing of it remains."""
        if len(data) <= PART:
            self._send(WRITTEN, deadline_s, "put_object", name, Body=bytes(data))
            passed(len(data))
            return
        upload = self._send(WRITTEN, deadline_s, "create_multipart_upload", name)["UploadId"]
        length = max(PART, -(-len(data) // MOST_PARTS))

        def put_part(begin: int) -> dict[str, Any]:
            number, section = begin // length + 1, memoryview(data)[begin : begin + length]
            part = {"UploadId": upload, "PartNumber": number, "Body": bytes(section)}
            answer = self._send(WRITTEN, deadline_s, "upload_part", name, **part)
            passed(len(section))
            return {"PartNumber": number, "ETag": answer["ETag"]}

        def complete(until: float) -> None:
            try:
                self._s3(until, "complete_multipart_upload", name, UploadId=upload, MultipartUpload={"Parts": parts})
            except FileNotFoundError:  # no such upload: the answer to an earlier request may have been lost
                if not self.has(name, len(data), deadline_s=END_S):
                    raise

        try:
            with ThreadPoolExecutor(PARALLEL) as pool:
                tasks = [pool.submit(put_part, begin) for begin in range(0, len(data), length)]
                try:
                    parts = [task.result() for task in tasks]
                finally:
                    for task in tasks:
                        task.cancel()
            self._retry(complete, name, deadline_s, WRITTEN)
        except BaseException:
            with suppress(Exception):  # a later save ends it
                self.end_uploads([(name, upload)], deadline_s=END_S)
            raise

    def content(self, name: str, *, deadline_s: float) -> bytes | None:
        """Return a small object by one request; None if there is none."""

        async def body(fs: Any, bucket: str, key: str) -> bytes:
            answer = await fs._call_s3("get_object", Bucket=bucket, Key=key)
            async with answer["Body"] as stream:
                return bytes(await stream.read())

        def work(until: float) -> Any:
            loop, fs, _ = self._opened(until)
            with suppress(FileNotFoundError):
                request = partial(body, fs, self._place()[0], self._key(name))
                return self._run(loop, loop.renewing(request), until, None)

        data: bytes | None = self._retry(work, name, deadline_s, "read")
        return data

    def listed(self, prefix: str = "", *, deadline_s: float) -> dict[str, int]:
        """Return the sizes of all objects below whose names begin with `prefix`, by name."""
        found: dict[str, int] = {}
        for page in self._pages("list_objects_v2", "ContinuationToken", prefix, deadline_s):
            found.update({self._name_of(one["Key"]): one["Size"] for one in page.get("Contents", ())})
        return found

    def remove_all(self, names: Iterable[str], *, deadline_s: float) -> None:
        """Remove objects; names without one are left out."""
        keys = [{"Key": self._key(name)} for name in names]
        for begin in range(0, len(keys), MOST_REMOVED):
            batch = {"Objects": keys[begin : begin + MOST_REMOVED], "Quiet": True}
            self._send("removed", deadline_s, "delete_objects", Delete=batch)

    def uploads(self, *, deadline_s: float) -> list[tuple[str, str]]:
        """Return the uploads that have begun and not ended: (name of the object, id of the upload)."""
        return [
            (self._name_of(one["Key"]), one["UploadId"])
            for page in self._pages("list_multipart_uploads", "KeyMarker", "", deadline_s)
            for one in page.get("Uploads", ())
        ]

    def end_uploads(self, uploads: Iterable[tuple[str, str]], *, deadline_s: float) -> None:
        """End such uploads, and delete their parts. One that has ended meanwhile is left out."""
        for name, upload in uploads:
            self._retry(partial(self._end_upload, name, upload), name, deadline_s, "ended")

    def _end_upload(self, name: str, upload: str, until: float) -> None:
        with suppress(FileNotFoundError):
            self._s3(until, "abort_multipart_upload", name, UploadId=upload)

    def _pages(self, method: str, continuation: str, prefix: str, deadline_s: float) -> Iterator[dict[str, Any]]:
        further: dict[str, Any] = {}
        while True:
            page = self._send("listed", deadline_s, method, Prefix=self._key(prefix), **further)
            yield page
            if not page.get("IsTruncated"):
                return
            further = {continuation: page[f"Next{continuation}"]}
            if "NextUploadIdMarker" in page:
                further["UploadIdMarker"] = page["NextUploadIdMarker"]

    def _send(self, done: str, deadline_s: float, method: str, name: str | None = None, **options: Any) -> Any:
        """Make a request of S3 until it succeeds. `done`: as in `_retry`."""
        return self._retry(lambda until: self._s3(until, method, name, **options), name or "", deadline_s, done)

    def _s3(self, until: float, method: str, name: str | None = None, **options: Any) -> Any:
        """Make a request of S3, for the object `name` if it is given."""
        bucket, key = self._place()
        if name is not None:
            options["Key"] = f"{key}{name}"
        try:
            return self._call(until, "call_s3", method, Bucket=bucket, stall_s=PART_STALL_S, **options)
        except Exception as error:
            if _code(error) in _FULL:
                raise ShardUnavailableError(
                    f"{self.url_of(name or '')} could not be written: the object store is full ({error}). Delete older "
                    "checkpoints, set keep_last, or raise the quota"
                ) from None
            if _code(error) == "NoSuchBucket":
                raise ShardUnavailableError(
                    f"{self.url}: there is no bucket {bucket!r}. Create it, or check the address and storage_options"
                ) from None
            if isinstance(error, PermissionError):
                raise ShardUnavailableError(
                    f"{self.url_of(name or '')}: the object store denies {method} ({_code(error) or error}). Renew the "
                    "keys (AWS_ACCESS_KEY_ID, a role, or storage_options), or let them list, read, write and delete "
                    "there"
                ) from None
            if _refuses(error) and not isinstance(error, (FileNotFoundError, FileExistsError)):
                raise ShardUnavailableError(
                    f"{self.url_of(name or '')}: the object store refuses {method}: {error}. Check the address and "
                    "storage_options"
                ) from None
            raise

    def _place(self) -> tuple[str, str]:
        """Return the bucket's name, and what the keys of all objects begin with."""
        bucket, _, path = self.address.partition("://")[2].partition("/")
        path = path.strip("/")
        return bucket, f"{path}/" if path else ""

    def _key(self, name: str) -> str:
        return self._place()[1] + name

    def _name_of(self, key: str) -> str:
        return key.removeprefix(self._place()[1])


def _refuses(error: BaseException) -> bool:
    """Return True if the store will answer the same request in the same way again."""
    status = _response(error).get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    passing = status in (408, 425, 429) or _code(error) in (*_PASSING, *_EXISTS, *_UNKNOWN)
    return 300 <= status < 500 and not passing


def _code(error: BaseException) -> str:
    """Return S3's code of an error; "" if it has none."""
    return str(_response(error).get("Error", {}).get("Code", ""))


def _response(error: BaseException) -> dict[str, Any]:
    """Return the answer that led to an error. s3fs raises Python's errors, caused by botocore's."""
    for each in (error, error.__cause__):
        response = getattr(each, "response", None)
        if isinstance(response, dict):
            return response
    return {}
