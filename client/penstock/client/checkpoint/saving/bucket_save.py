"""A rank's part of a save into a bucket (checkpoint_catalog.py), with a copy on the local disk if the user wants one.

Each writer uploads its files from the shared memory, without a folder that all ranks see: reports and the verdict are
small objects beside the files. Rank 0's writer commits by one conditional request. Objects and
parts of uploads that stopped saves have left are deleted by rank 0's writer at the beginning of each save.

**The local copy** only makes a restore faster: the bucket's list says which checkpoints exist. Each rank keeps its
files of the newest checkpoint and of saves in flight."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from penstock.client.checkpoint.bucket_lists import LISTS, newest_catalog, opened_bucket
from penstock.client.checkpoint.saving.save_job import Commit, SaveJob, WriteFailed
from penstock.proto.errors import PenstockError
from penstock.proto.state.checkpoint_catalog import BEGUN, Catalog, catalog_number, folder_name, save_of
from penstock.proto.state.checkpoint_files import (
    ASKED,
    FAILED,
    INDEX,
    MANIFEST,
    METADATA,
    CheckpointFile,
    report_name,
    sign_name,
)
from penstock.runtime.files.direct_files import write_file
from penstock.runtime.files.part_checksums import PartHasher

HASHED = 16 << 20
"""Bytes that are hashed between two looks at whether the save was aborted."""
KEPT_LISTS = 2
"""Lists that stay: the newest, and the one before for who is about to read it."""
CLAIMS = 20
"""Attempts to take over a bucket: another job may be saving there."""
LATER_S = 10.0
"""Seconds for requests that the save does not depend on."""


class OwnedBucket:
    """A bucket, as one writer knows it from save to save."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.bucket = opened_bucket(request["folder"], request["storage_options"])
        self.local = Path(request["local"]) if request["local"] else None
        self._owner: str = request["owner"]
        self._is_tried = False
        """True once the store has refused to write over a list."""

    def claimed(self, deadline_s: float) -> Catalog:
        """Return the newest list, which names this writer as the owner. Raises WriteFailed if a later job owns it,
        DatasetError if the store cannot keep it from that."""
        for _ in range(CLAIMS):
            newest = newest_catalog(self.bucket, deadline_s=deadline_s)
            if newest.owner != self._owner:
                if self._owner in newest.former:
                    break
                newest = newest.claimed(self._owner)
                if not self._create(newest, deadline_s):
                    continue
            if not self._is_tried:
                self.bucket.check_conditions(newest.name, newest.encode(), deadline_s=deadline_s)
                self._is_tried = True
            return newest
        raise WriteFailed({0: self._lost})

    def commit(self, catalog: Catalog, deadline_s: float) -> None:
        """Write the next list, which makes a save complete. Raises WriteFailed if a later job owns the bucket."""
        if self._create(catalog, deadline_s):
            newest = newest_catalog(self.bucket, deadline_s=deadline_s)
            if catalog.checkpoints[0] in newest.checkpoints:
                return
        raise WriteFailed({0: self._lost})

    def _create(self, catalog: Catalog, deadline_s: float) -> bool:
        return self.bucket.create(catalog.name, catalog.encode(), deadline_s=deadline_s)

    @property
    def _lost(self) -> str:
        return f"a job that began later saves into {self.bucket.url}. Give each job a folder of its own"


class BucketSave(SaveJob):
    sign_s = 5.0
    silence_s = 30.0

    def __init__(
        self,
        request: dict[str, Any],
        image: memoryview,
        send_reply: Callable[[dict[str, Any]], None],
        orphaned: Callable[[], bool],
        owned: OwnedBucket,
    ) -> None:
        super().__init__(request, image, send_reply, orphaned)
        self._owned = owned
        self._bucket = owned.bucket
        self._folder = folder_name(self.step, self.save)
        self._local = owned.local / self._folder if owned.local else None

    def close(self) -> None:
        """The bucket stays open for the next save."""

    @contextmanager
    def leading(self) -> Iterator[None]:
        self._owned.claimed(self.left())
        objects = self._bucket.listed("step-", deadline_s=self.left())
        uploads = self._bucket.uploads(deadline_s=self.left())
        # Read again, after what may be deleted was listed: a later job begins to write only once it owns the list.
        catalog = self._owned.claimed(self.left())
        running = {None, self.save, *self.request["in_flight"]}
        kept = running | {one.save for one in catalog.checkpoints}
        left = [name for name in objects if save_of(name) not in (running if _is_message(name) else kept)]
        self._bucket.remove_all(left, deadline_s=self.left())
        # An upload of a complete checkpoint was begun twice, because the first answer was lost.
        self._bucket.end_uploads(
            ((name, of) for name, of in uploads if save_of(name) not in running), deadline_s=self.left()
        )
        yield

    # ---- this rank's files

    def begin(self) -> None:
        """Rank 0 lets the others begin once it owns the list: before, an earlier job may delete what they write."""
        if self.rank == 0:
            self._tell(BEGUN, {"save": self.save}, self.left())
        elif not self.wait_until(self._has_begun):
            why = f"its writer had not begun the save after timeout_s={self.request['timeout_s']:g}: see rank 0's log"
            raise WriteFailed({0: why})
        if self._local is None:
            return
        try:
            self._clear_local()
            self._local.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self._stop_local(error)

    def _has_begun(self) -> bool:
        if causes := self._failure():
            raise WriteFailed(causes)
        return self._heard(BEGUN) is not None

    def write_file(self, name: str, region: memoryview, size: int, parts: list[int]) -> CheckpointFile:
        hasher = PartHasher(parts)

        def passed(nbytes: int) -> None:
            self.check_cancelled()
            self.written += nbytes

        for begin in range(0, size, HASHED):
            self.check_cancelled()
            hasher.update(region[begin : min(begin + HASHED, size)])
        self._write_local(name, region, size)
        self._bucket.put(self._name(name), region[:size], deadline_s=self.left(), passed=passed)
        return CheckpointFile(name, size, *hasher.digests())

    def _write_local(self, name: str, region: memoryview, size: int) -> None:
        local = self._local
        if local is None:
            return
        try:
            write_file(local / name, region, size, durable=False, passing=lambda data: self.check_cancelled())
        except InterruptedError:
            raise
        except OSError as error:
            self._stop_local(error)

    def _stop_local(self, error: OSError) -> None:
        """Save without the local copy, which is not needed for a restore."""
        if self._local is not None:
            shutil.rmtree(self._local, ignore_errors=True)
        self._local = None
        self.warning = (
            f"step {self.step} has no copy on the local disk: {error.filename or self._owned.local}: {error.strerror}. "
            "Free space there, or give another local="
        )

    def _clear_local(self) -> None:
        """Delete all copies but those of the newest checkpoint and of saves in flight."""
        assert self._owned.local is not None
        if not self._owned.local.is_dir():
            return
        newest = newest_catalog(self._bucket, deadline_s=self.left()).checkpoints[:1]
        kept = {self.save, *self.request["in_flight"], *(one.save for one in newest)}
        for name in os.listdir(self._owned.local):
            if save_of(name) not in (None, *kept):
                shutil.rmtree(self._owned.local / name, ignore_errors=True)

    def send_report(self, report: dict[str, Any]) -> None:
        self._tell(report_name(self.rank), report, self.left())

    def report_of(self, rank: int) -> dict[str, Any] | None:
        return self._heard(report_name(rank))

    # ---- rank 0

    def commit(self, commit: Commit) -> None:
        catalog = self._owned.claimed(self.left())
        after = catalog.with_save(self.step, self.save, self.request["keep_last"], self.request["keep_every"])
        manifest = self.manifest(commit, after.number)
        for name, data in ((INDEX, commit.index), (METADATA, commit.metadata), (MANIFEST, manifest)):
            self._put(name, data, self.left())
        sizes = self._bucket.listed(f"{self._folder}/", deadline_s=self.left())
        if wrong := [file.name for file in commit.files if sizes.get(self._name(file.name)) != file.nbytes]:
            raise WriteFailed({0: f"{', '.join(wrong)}: the object store does not have what was written: check it"})
        self._owned.commit(after, self.left())
        with suppress(PenstockError):
            lists = self._bucket.listed(LISTS, deadline_s=LATER_S)
            gone = [name for name in lists if 0 <= catalog_number(name) <= after.number - KEPT_LISTS]
            for one in set(catalog.checkpoints) - set(after.checkpoints):
                gone += self._bucket.listed(f"{one.folder}/", deadline_s=LATER_S)
            messages = (name(rank) for rank in range(self.ranks) for name in (report_name, sign_name))
            gone += map(self._name, (BEGUN, ASKED, *messages))
            self._bucket.remove_all(gone, deadline_s=LATER_S)

    def give_up(self, causes: dict[int, str]) -> None:
        """The next save deletes what was written. Not this one: the request that commits may have arrived."""
        self._tell(FAILED, {"save": self.save, "causes": causes}, LATER_S)

    # ---- the other ranks

    def verdict(self) -> dict[int, str] | None:
        causes = self._failure()
        catalog = newest_catalog(self._bucket, deadline_s=self.left())
        if any(one.save == self.save for one in catalog.checkpoints):
            return {}  # also if rank 0's writer was lost after its commit
        return causes or None

    def _failure(self) -> dict[int, str]:
        failed = self._heard(FAILED)
        return {int(rank): why for rank, why in failed["causes"].items()} if failed else {}

    def explain(self, error: BaseException) -> str:
        return str(error)

    # ---- signs of life: contents of small objects

    def ask(self) -> None:
        self._put(ASKED, b"{}", self.left())

    def sign_if_asked(self) -> None:
        with suppress(PenstockError):
            if self._bucket.content(self._name(ASKED), deadline_s=LATER_S) is not None:
                self._tell(sign_name(self.rank), {"save": self.save, "sign": time.time_ns()}, LATER_S)

    def sign_of(self, rank: int) -> Any:
        return (self._heard(sign_name(rank)) or {}).get("sign")

    # ---- messages

    def _name(self, name: str) -> str:
        return f"{self._folder}/{name}"

    def _put(self, name: str, data: bytes, deadline_s: float) -> None:
        self._bucket.put(self._name(name), data, deadline_s=deadline_s, passed=lambda nbytes: None)

    def _tell(self, name: str, message: dict[str, Any], deadline_s: float) -> None:
        self._put(name, json.dumps(message).encode(), deadline_s)

    def _heard(self, name: str) -> dict[str, Any] | None:
        data = self._bucket.content(self._name(name), deadline_s=self.left())
        try:
            value = json.loads(data or b"null")
        except (ValueError, RecursionError):
            return None
        return value if isinstance(value, dict) and value.get("save") == self.save else None


def _is_message(name: str) -> bool:
    file = name.rpartition("/")[2]
    return file in (BEGUN, ASKED, FAILED) or file.startswith("rank-")


def tell_bucket(request: dict[str, Any], name: str, message: bytes) -> None:
    """Write a message to the other ranks' writers of a save, for a writer that has ended."""
    bucket = opened_bucket(request["folder"], request["storage_options"])
    try:
        name = f"{folder_name(request['step'], request['save'])}/{name}"
        bucket.put(name, message, deadline_s=LATER_S, passed=lambda nbytes: None)
    finally:
        bucket.close()
