"""A rank's part of a save, in its writer process: write files, and agree with the other ranks' writers on the end.

Every rank's writer writes its files, and then a report. Rank 0's writer waits for all reports, compares sizes with the
plan, adds the indexes and the manifest, and commits. The others wait for that, or for the causes of a failure. So the
writers agree through the place where they write (folder_save.py, bucket_save.py): a collective operation would need the
threads of the training loops.

A save has a deadline. If a machine failed, another rank's writer may be gone while a restarted job waits, so a writer
without a training process abandons a save once a rank that it waits for shows no sign of life."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import xxhash

from penstock.proto.errors import PenstockError
from penstock.proto.state.checkpoint_files import INDEX, METADATA, CheckpointFile, Manifest
from penstock.proto.state.checkpoint_index import IndexPickle

PROGRESS_S = 0.2


class WriteFailed(Exception):
    def __init__(self, causes: dict[int, str]) -> None:
        super().__init__("; ".join(f"rank {rank}: {cause}" for rank, cause in sorted(causes.items())))
        self.causes = causes


@dataclass(frozen=True)
class Commit:
    """What rank 0 adds to the files of all ranks."""

    files: tuple[CheckpointFile, ...]
    """Of all ranks, and the indexes."""
    index: bytes
    metadata: bytes


class SaveJob(ABC):
    """`request`: as writer_process.py sends it."""

    sign_s: ClassVar[float]
    """Seconds between a writer's signs of life, once another requests them."""
    silence_s: ClassVar[float]
    """Seconds of silence of a rank, after which a writer without a training process abandons a save (of rank 0:
    twice)."""

    def __init__(
        self,
        request: dict[str, Any],
        image: memoryview,
        send_reply: Callable[[dict[str, Any]], None],
        orphaned: Callable[[], bool] = lambda: False,
    ) -> None:
        self.request = request
        self.image = image
        self.save: str = request["save"]
        self.step: int = request["step"]
        self.rank: int = request["rank"]
        self.ranks: int = request["ranks"]
        self.deadline: float = time.monotonic() + request["timeout_s"]
        self.written = 0
        self.warning = ""
        """What did not make the save fail, and the user should know."""
        self.cancelled = False
        self._orphaned = orphaned
        """Returns True once the training process has ended."""
        self._signs: dict[int, tuple[Any, float]] = {}
        """Last sign of life of each rank's writer, and when it was first seen."""
        self._signed_at = 0.0
        self._send_reply = send_reply
        self._reported_at = time.monotonic()

    def run(self) -> None:
        """Raises WriteFailed."""
        try:
            if self.rank:
                self._report()
                self._await_verdict()
                return
            try:
                with self.leading():
                    self.commit(self._gathered(self._report()))
            except (OSError, PenstockError) as error:
                self._fail({0: self.explain(error)})
            except WriteFailed as failed:
                self._fail(failed.causes)
        finally:
            self.close()

    # ---- what depends on the place

    @abstractmethod
    def leading(self) -> AbstractContextManager[None]:
        """Around rank 0's part: keep other jobs out, and delete what stopped saves have left."""

    @abstractmethod
    def begin(self) -> None:
        """Make this rank ready to write files."""

    @abstractmethod
    def write_file(self, name: str, region: memoryview, size: int, parts: list[int]) -> CheckpointFile:
        """Write a file, from a region that may be longer, and count `written`. Call `check_cancelled` now and then."""

    @abstractmethod
    def send_report(self, report: dict[str, Any]) -> None:
        """Give rank 0's writer this rank's report: the files, or an error."""

    @abstractmethod
    def report_of(self, rank: int) -> dict[str, Any] | None: ...

    @abstractmethod
    def commit(self, commit: Commit) -> None:
        """Make the checkpoint complete, and delete surplus ones. Later errors do not make the save fail."""

    @abstractmethod
    def give_up(self, causes: dict[int, str]) -> None:
        """Tell the other ranks' writers that the save failed, and delete what was written."""

    @abstractmethod
    def verdict(self) -> dict[int, str] | None:
        """Return how rank 0's writer ended the save: causes of a failure by rank, {} for a commit; None: not yet."""

    @abstractmethod
    def explain(self, error: BaseException) -> str:
        """Return the error's text with a remedy."""

    @abstractmethod
    def ask(self) -> None:
        """Ask the other writers for signs of life."""

    @abstractmethod
    def sign_if_asked(self) -> None: ...

    @abstractmethod
    def sign_of(self, rank: int) -> Any:
        """Return what changes with each sign of life of a rank's writer."""

    @abstractmethod
    def close(self) -> None: ...

    # ---- files of this rank

    def check_cancelled(self) -> None:
        if self.cancelled:
            raise InterruptedError("the save was aborted")

    def _report(self) -> dict[str, Any]:
        """Write this rank's files and return its report: the files, or an error. Ranks above 0 also send it."""
        report: dict[str, Any] = {"save": self.save, "files": [], "error": self.request["error"]}
        try:
            self.begin()
            if not report["error"]:
                report["files"] = [file.row() for file in self._write()]
        except (OSError, PenstockError) as error:
            report["error"] = self.explain(error)
        if self.rank:
            try:
                self.send_report(report)
            except (OSError, PenstockError) as error:
                # If the report cannot be sent, rank 0 waits for it until the deadline, because no other channel
                # reaches rank 0.
                raise WriteFailed({self.rank: report["error"] or self.explain(error)}) from error
        return report

    def _write(self) -> list[CheckpointFile]:
        files = [(name, self.image[start:], size, parts) for name, start, size, parts in self.request["files"]]
        if not files:
            return []
        with ThreadPoolExecutor(self.request["threads"]) as pool:
            tasks = [pool.submit(self.write_file, *file) for file in files]
            try:
                while wait(tasks, PROGRESS_S, FIRST_EXCEPTION).not_done:
                    self._progress()
                    if any(task.done() and task.exception() for task in tasks):
                        break
                return [task.result() for task in tasks]
            finally:
                self.cancelled = True

    # ---- rank 0: all ranks' files become a checkpoint

    def _gathered(self, own: dict[str, Any]) -> Commit:
        """Wait for the other ranks' reports, and compare them with the plan. Raises WriteFailed."""
        if own["error"]:
            raise WriteFailed({0: own["error"]})
        plan: dict[str, list[list[Any]]] = self.request["commit"]["plan"]
        reports = {0: own, **self._gather()}
        causes = {rank: report["error"] for rank, report in reports.items() if report["error"]}
        for rank, report in sorted(reports.items()):
            if rank not in causes and [file[:2] for file in report["files"]] != plan[str(rank)]:
                wrote = [file[:2] for file in report["files"]]
                causes[rank] = f"its files must be {plan[str(rank)]}, got {wrote}: install one release of Penstock"
        if causes:
            raise WriteFailed(causes)
        start, size = self.request["commit"]["index"]
        index, metadata = IndexPickle.files(bytes(self.image[start : start + size]))
        files = [CheckpointFile.from_row(*file) for rank in range(self.ranks) for file in reports[rank]["files"]]
        for name, data in ((INDEX, index), (METADATA, metadata)):
            files.append(CheckpointFile(name, len(data), xxhash.xxh3_128_hexdigest(data)))
        return Commit(tuple(files), index, metadata)

    def manifest(self, commit: Commit, sequence: int) -> bytes:
        return Manifest(self.step, self.save, sequence, self.ranks, commit.files).encode()

    def _gather(self) -> dict[int, dict[str, Any]]:
        """Wait for the other ranks' reports; once one has an error, return those that came."""
        reports: dict[int, dict[str, Any]] = {}

        def all_there() -> bool:
            for rank in range(1, self.ranks):
                if rank not in reports and (report := self.report_of(rank)) is not None:
                    reports[rank] = report
            if len(reports) == self.ranks - 1 or any(report["error"] for report in reports.values()):
                return True
            if self._orphaned():
                self._expect_signs([rank for rank in range(1, self.ranks) if rank not in reports], self.silence_s)
            return False

        if not self.wait_until(all_there):
            late = [rank for rank in range(1, self.ranks) if rank not in reports]
            why = f"its writer had not written its files after timeout_s={self.request['timeout_s']:g} s"
            raise WriteFailed(dict.fromkeys(late, why))
        return reports

    def _fail(self, causes: dict[int, str]) -> None:
        """Raises WriteFailed, after the other ranks were told the causes."""
        failed = WriteFailed(causes)
        with suppress(OSError, PenstockError):
            self.give_up(causes)
        raise failed

    # ---- the other ranks

    def _await_verdict(self) -> None:
        causes: dict[int, str] | None = None

        def known() -> bool:
            nonlocal causes
            causes = self.verdict()
            return causes is not None

        if not self.wait_until(known):
            causes = {
                0: f"its writer had not committed after timeout_s={self.request['timeout_s']:g}: see rank 0's log"
            }
        if causes:
            raise WriteFailed(causes)

    # ---- waiting

    def wait_until(self, true: Callable[[], bool]) -> bool:
        """Call `true` until it returns True. Return False at the save's deadline."""
        pause = 0.005
        while not true():
            if self.left() <= 0:
                return False
            if self.rank and self._orphaned():
                self._expect_signs([0], 2 * self.silence_s)
            time.sleep(min(pause, max(self.left(), 0)))
            pause = min(pause * 1.5, 0.5)
            self._progress()
        return True

    def left(self) -> float:
        return self.deadline - time.monotonic()

    def _expect_signs(self, late: list[int], silence_s: float) -> None:
        """Raise WriteFailed if one of these ranks' writers has given no sign of life for `silence_s`."""
        now = time.monotonic()
        if not self._signs:
            self.ask()
        for rank in late:
            sign = self.sign_of(rank)
            if rank not in self._signs or self._signs[rank][0] != sign:
                self._signs[rank] = sign, now
        if lost := [rank for rank in late if now - self._signs[rank][1] > silence_s]:
            raise WriteFailed(dict.fromkeys(lost, _silent(silence_s)))

    def _progress(self) -> None:
        now = time.monotonic()
        if now - self._signed_at >= self.sign_s:
            self._signed_at = now
            self.sign_if_asked()
        if now - self._reported_at >= PROGRESS_S:
            self._reported_at = now
            self._send_reply({"save": self.save, "kind": "progress", "written": self.written})


def _silent(seconds: float) -> str:
    return f"its writer showed no sign of life for {seconds:g} s after the training had ended: check its machine"
