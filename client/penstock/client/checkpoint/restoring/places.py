"""Where checkpoints are: a folder that all ranks see, or a bucket. What a restore asks of either."""

from __future__ import annotations

import os
import re
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from penstock.client.checkpoint.bucket_lists import newest_catalog, opened_bucket
from penstock.client.checkpoint.restoring.sources import BucketSource, FolderSource, Source
from penstock.proto.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    DatasetError,
    DeadlineError,
    InvalidArgumentError,
    PenstockError,
)
from penstock.proto.state.checkpoint_catalog import BEGUN, ListedCheckpoint, folder_name, is_bucket
from penstock.proto.state.checkpoint_files import (
    ASKED,
    FAILED,
    MANIFEST,
    Manifest,
    checkpoints,
    locked,
    put_back,
    sign_name,
    step_name,
)
from penstock.proto.state.torch_checkpoints import check_newer, opened, torch_checkpoints, torch_step
from penstock.proto.tracebacks import warn_user

POLL_S = 0.5
ASK_S = 10.0
SIGN_SILENCE_S = 12.0
"""Seconds without a sign of life from a save in a bucket until a restore ignores it. Rank 0's writer gives one at least
every 5 s."""
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")
_MARKS = f"/{BEGUN}", f"/{FAILED}"
SILENCE_S = 8.0
"""Seconds without a sign of life from another process's save, whose machine may be gone, until a restore ignores it."""


class PinnedCheckpoint(NamedTuple):
    step: int
    address: str
    """Path or URL of the checkpoint."""
    save: str


class Place(ABC):
    address: str
    """Path or URL, for messages."""
    timeout_s: float

    @abstractmethod
    def settle(self) -> None:
        """Wait until no save runs here, if that can be known."""

    @abstractmethod
    def choose(self, step: int | None) -> PinnedCheckpoint | None:
        """Return the checkpoint of a step, or the one that was saved last; None if there is none at all. Raises
        CheckpointNotFoundError, CheckpointCorruptError."""

    @abstractmethod
    def open(self, address: str) -> AbstractContextManager[tuple[Source, Manifest]]:
        """Open a checkpoint. Raises CheckpointNotFoundError if it is not there any more, CheckpointCorruptError."""

    @abstractmethod
    def latest(self) -> int | None: ...

    @abstractmethod
    def good_steps(self, besides: str) -> list[int]:
        """Return the steps of the undamaged checkpoints besides the one with an address, the newest first."""

    @abstractmethod
    def clear(self) -> None:
        """Delete everything here, as far as that is possible: for a place that was made for a trial."""

    @abstractmethod
    def address_of(self, step: int, save: str) -> str: ...

    def damaged(self, address: str, wrong: str) -> CheckpointCorruptError:
        try:
            good = self.good_steps(address)
        except PenstockError:
            good = []
        offer = f"The newest undamaged one is step={good[0]}" if good else "The folder has no undamaged one"
        return CheckpointCorruptError(f"the checkpoint {address} is damaged: {wrong}. {offer}")


def place_at(
    where: str | os.PathLike[str],
    timeout_s: float,
    *,
    local: str | os.PathLike[str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Place:
    """Raises InvalidArgumentError for a URL of another kind; CheckpointError if a package is missing."""
    text = os.fspath(where)
    if is_bucket(text):
        return BucketPlace(text, timeout_s, None if local is None else Path(local), storage_options)
    if _URL.match(text):  # also one that a Path has shortened
        raise InvalidArgumentError(
            f"checkpoints must be in a folder, or in a bucket named by a text, no Path: s3://BUCKET/RUN; got {text!r}"
        )
    return FolderPlace(Path(text).absolute(), timeout_s)


class FolderPlace(Place):
    def __init__(self, folder: Path, timeout_s: float = 0.0) -> None:
        self.folder, self.address, self.timeout_s = folder, str(folder), timeout_s

    def settle(self) -> None:
        """If a save stopped while it replaced a checkpoint, put the old one back."""
        try:
            with locked(self.folder, self.timeout_s, silence_s=SILENCE_S):
                put_back(self.folder)
        except DeadlineError:
            pass  # the other save will not end, but complete checkpoints can be read
        except PenstockError:
            raise
        except OSError:
            pass  # the folder does not exist yet, or can only be read

    def choose(self, step: int | None) -> PinnedCheckpoint | None:
        found = checkpoints(self.folder)
        if step is None:
            check_newer(self.folder, found[0] if found else None)
            if not found:
                return None
            newest = found[0]
        else:
            matching = [one for one in (*found, torch_step(self.folder, step)) if one is not None and one.step == step]
            if not matching:
                torchs = (f"{path} of torch's dcp.save" for path in torch_checkpoints(self.folder))
                raise _not_there(self.address, step, (*(str(one.step) for one in found), *torchs))
            newest = matching[0]
        if newest.damage:
            raise self.damaged(str(newest.path), newest.damage)
        assert newest.manifest is not None
        return PinnedCheckpoint(newest.step, str(newest.path), newest.manifest.save)

    @contextmanager
    def open(self, address: str) -> Iterator[tuple[Source, Manifest]]:
        with opened(Path(address)) as (handle, manifest):
            yield FolderSource(handle), manifest

    def latest(self) -> int | None:
        found = checkpoints(self.folder)
        check_newer(self.folder, found[0] if found else None)
        for one in found:
            if not one.damage:
                return one.step
            warn_user(f"the checkpoint {one.path} is damaged: {one.damage}. latest() ignores this checkpoint")
        return None

    def good_steps(self, besides: str) -> list[int]:
        return [one.step for one in checkpoints(self.folder) if str(one.path) != besides and not one.damage]

    def clear(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def address_of(self, step: int, save: str) -> str:
        return str(self.folder / step_name(step))


class BucketPlace(Place):
    def __init__(
        self, url: str, timeout_s: float, local: Path | None, storage_options: Mapping[str, Any] | None
    ) -> None:
        if not urlsplit(url).netloc or any(part in (".", "..") for part in url.split("/")):
            raise InvalidArgumentError(f"a folder in a bucket must be named s3://BUCKET/RUN, got {url!r}")
        self._bucket = opened_bucket(url.rstrip("/"), storage_options)
        self.address, self.timeout_s, self._local = self._bucket.url, timeout_s, local

    def settle(self) -> None:
        """A save in flight answers when it is asked for signs of life: the writers of a job that has ended, say."""
        until = time.monotonic() + self.timeout_s
        heard: dict[str, tuple[bytes | None, float]] = {name: (None, time.monotonic()) for name in self._in_flight()}
        with suppress(DatasetError):  # who may only read asks in vain
            for name in heard:
                self._bucket.put(f"{name}/{ASKED}", b"{}", deadline_s=ASK_S, passed=lambda nbytes: None)
        while heard and (now := time.monotonic()) < until:
            time.sleep(POLL_S)
            objects = self._in_flight()
            heard = {name: last for name, last in heard.items() if name in objects}
            for name, (sign, since) in list(heard.items()):
                with self._errors():
                    found = self._bucket.content(f"{name}/{sign_name(0)}", deadline_s=self.timeout_s)
                if found != sign:
                    heard[name] = found, now
                elif now - since > SIGN_SILENCE_S:
                    del heard[name]

    def _in_flight(self) -> set[str]:
        """Return the folders of saves that have begun, and neither failed nor become checkpoints."""
        with self._errors():
            objects = self._bucket.listed("step-", deadline_s=self.timeout_s)
        begun, failed = ({name.removesuffix(end) for name in objects if name.endswith(end)} for end in _MARKS)
        return begun - failed - {one.folder for one in self.listed()}

    def choose(self, step: int | None) -> PinnedCheckpoint | None:
        found = self.listed()
        if step is None:
            return self._chosen(found[0]) if found else None
        for one in found:
            if one.step == step:
                return self._chosen(one)
        raise _not_there(self.address, step, (str(one.step) for one in found))

    @contextmanager
    def open(self, address: str) -> Iterator[tuple[Source, Manifest]]:
        name = address.rpartition("/")[2]
        try:
            with self._errors():
                data = self._bucket.content(f"{name}/{MANIFEST}", deadline_s=self.timeout_s)
            if data is None:
                raise CheckpointCorruptError(f"{MANIFEST} is missing")
            manifest = Manifest.decode(data, f"{address}/{MANIFEST}")
            local = self._local / name if self._local else None
            yield BucketSource(self._bucket, name, local, self.timeout_s), manifest
        except CheckpointCorruptError as error:
            if all(one.folder != name for one in self.listed()):
                raise CheckpointNotFoundError(f"{address} was deleted meanwhile: use a newer checkpoint") from error
            raise

    def latest(self) -> int | None:
        found = self.listed()
        return found[0].step if found else None

    def good_steps(self, besides: str) -> list[int]:
        return [one.step for one in self.listed() if self._chosen(one).address != besides]

    def clear(self) -> None:
        with suppress(DatasetError):
            self._bucket.remove_all(self._bucket.listed(deadline_s=self.timeout_s), deadline_s=self.timeout_s)

    def address_of(self, step: int, save: str) -> str:
        return f"{self.address}/{folder_name(step, save)}"

    def listed(self) -> tuple[ListedCheckpoint, ...]:
        """Return all checkpoints, the newest first."""
        with self._errors():
            return newest_catalog(self._bucket, deadline_s=self.timeout_s).checkpoints

    def _chosen(self, one: ListedCheckpoint) -> PinnedCheckpoint:
        return PinnedCheckpoint(one.step, self.address_of(one.step, one.save), one.save)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except DatasetError as error:
            raise CheckpointError(error.message) from error


def _not_there(address: str, step: int, steps: Iterator[str] | tuple[str, ...]) -> CheckpointNotFoundError:
    return CheckpointNotFoundError(
        f"{address} has no checkpoint of step {step}; it has steps: {', '.join(steps) or 'none'}"
    )
