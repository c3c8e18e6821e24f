"""A rank's part of a save into a folder that all ranks see.

Every rank's writer writes its files into one temporary folder, makes them durable, and then writes its report there.
Rank 0's writer renames the folder once it is complete.

**Files** are written past the page cache where possible (O_DIRECT): for 1 GiB that took 0.5 to 0.75 s in all instead of
0.7 to 5.5 s.

**fsync.** A save of one rank makes one for the content of each file, and four more:
- the temporary folder: the names of all files in it, before the folder gets its name;
- the checkpoints' folder: that name, before the save is reported, and before what it replaces is deleted;
- the content of `latest`, so that the name never leads to half of it;
- the checkpoints' folder again: the name `latest`, and those of surplus checkpoints, which are renamed before their
  contents are deleted.
Each other rank syncs the temporary folder too, before its report. `DurablePath` syncs the folder's parents once."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from penstock.client.checkpoint.saving.save_job import Commit, SaveJob, WriteFailed
from penstock.proto.errors import PenstockError
from penstock.proto.state.checkpoint_files import (
    ASKED,
    FAILED,
    INDEX,
    LARGEST_RECORD,
    LATEST,
    LOCK,
    MANIFEST,
    METADATA,
    MOST,
    CheckpointFile,
    Identity,
    checkpoints,
    claimed,
    identity,
    last_sign,
    leftovers,
    locked,
    old_name,
    put_back,
    report_name,
    sign_name,
    sign_of_life,
    step_name,
    surplus,
    temporary_name,
)
from penstock.runtime.files.atomic_files import sync_folder, write_whole
from penstock.runtime.files.direct_files import write_file
from penstock.runtime.files.held_folders import HeldFolder
from penstock.runtime.files.inner_paths import refuse_strange_links
from penstock.runtime.files.part_checksums import PartHasher
from penstock.runtime.files.plain_files import open_plain, read_plain

PROBE_S = 0.5
"""Seconds between two tests of a waiting writer, whether it can write into the checkpoints' folder."""


class FolderSave(SaveJob):
    sign_s = 1.0
    silence_s = 5.0

    def __init__(
        self,
        request: dict[str, Any],
        image: memoryview,
        send_reply: Callable[[dict[str, Any]], None],
        orphaned: Callable[[], bool] = lambda: False,
        path: DurablePath | None = None,
    ) -> None:
        super().__init__(request, image, send_reply, orphaned)
        self.folder = Path(request["folder"])
        self.temporary = self.folder / temporary_name(self.step, self.save)
        """Another user may put a link in its place, see `_inside`."""
        self.final = self.folder / step_name(self.step)
        self._path = path or DurablePath()
        self._held: HeldFolder | None = None
        self._begun = False

    def close(self) -> None:
        if self._held is not None:
            self._held.close()

    @property
    def _inside(self) -> HeldFolder:
        if self._held is None:
            self._held = HeldFolder(self.temporary)
        return self._held

    @contextmanager
    def leading(self) -> Iterator[None]:
        # a link may lead anywhere, and surplus checkpoints are deleted through it
        refuse_strange_links(self.folder)
        os.makedirs(self.folder, exist_ok=True)
        self._path.sync(self.folder)
        with locked(self.folder, self.left(), heartbeats=True):
            self._check_final()
            put_back(self.folder)
            if left := leftovers(self.folder, besides=[self.save, *self.request["in_flight"]]):
                sync_folder(self.folder)  # makes the renamed names durable before their contents are deleted
                for path in left:
                    with claimed(path) as free:
                        if free:
                            _remove(path)
            yield

    def _check_final(self) -> None:
        """Raise WriteFailed if the save would replace something that is not a Penstock checkpoint."""
        if self.final.exists() and not (self.final / MANIFEST).exists() and any(self.final.iterdir()):
            raise WriteFailed({0: f"{self.final} exists and is not a Penstock checkpoint: move it to another folder"})

    # ---- this rank's files

    def begin(self) -> None:
        if self.rank:
            self._await_folder()
        else:
            os.makedirs(self.temporary, exist_ok=True)
        self._held = self._inside  # opened before the threads of `write_file`

    def write_file(self, name: str, region: memoryview, size: int, parts: list[int]) -> CheckpointFile:
        hasher, before = PartHasher(parts), 0

        def passing(data: memoryview) -> None:
            nonlocal before
            self.check_cancelled()
            self.written += before
            hasher.update(data)
            before = len(data)

        write_file(self._inside.path / name, region, size, durable=self.request["fsync"], passing=passing)
        self.written += before
        return CheckpointFile(name, size, *hasher.digests())

    def send_report(self, report: dict[str, Any]) -> None:
        try:
            sync_folder(self._inside.path)
            # a message, of which nothing needs to be left after a power failure
            write_whole(self._inside.path / report_name(self.rank), json.dumps(report).encode(), sync=False)
        except OSError:
            if self._held is None or not self._given_up():
                raise

    def report_of(self, rank: int) -> dict[str, Any] | None:
        return self._read(self.temporary / report_name(rank))

    # ---- rank 0

    def commit(self, commit: Commit) -> None:
        before = checkpoints(self.folder, sizes=self.request["keep_last"] is not None)
        sequence = min(1 + max((one.manifest.sequence for one in before if one.manifest), default=0), MOST)
        inside = self._inside.path
        for rank in range(1, self.ranks):
            os.unlink(inside / report_name(rank))
        manifest = self.manifest(commit, sequence)
        for name, data in ((INDEX, commit.index), (MANIFEST, manifest), (METADATA, commit.metadata)):
            write_whole(inside / name, data, sync="content")
        sync_folder(inside)
        replaced = self.folder / old_name(self.step, self.save)
        with suppress(FileNotFoundError):
            os.rename(self.final, replaced)
        os.rename(self.temporary, self.final)
        if not self._inside.is_at(self.final):
            raise WriteFailed(
                {0: f"{self.temporary} was replaced by another process during the save: use a folder for each job"}
            )
        sync_folder(self.folder)
        # The checkpoint is complete: later errors do not make the save fail.
        self._path.holds(self.final / MANIFEST)
        with suppress(OSError):
            for name in set(os.listdir(inside)) - {MANIFEST, *(file.name for file in commit.files)}:
                os.unlink(inside / name)  # reports of ranks whose writers were lost after they had written their part
        with suppress(OSError):
            write_whole(self.folder / LATEST, f"{self.final.name}\n".encode(), sync="content")
        with claimed(replaced) as free:
            if free:
                shutil.rmtree(replaced, ignore_errors=True)
        older = [one.step for one in before if not one.damage and one.path != self.final]
        self._delete(surplus([self.step, *older], self.request["keep_last"], self.request["keep_every"]))

    def _delete(self, steps: list[int]) -> None:
        """Delete checkpoints, each first renamed durably, so that no half one stays. One being read stays for later.
        The name `latest` becomes durable with these names."""
        with suppress(OSError), ExitStack() as claims:
            free = [step for step in steps if claims.enter_context(claimed(self.folder / step_name(step)))]
            surplus = [(self.folder / step_name(step), self.folder / temporary_name(step, self.save)) for step in free]
            for path, aside in surplus:
                os.rename(path, aside)
            sync_folder(self.folder)
            for _, aside in surplus:
                shutil.rmtree(aside, ignore_errors=True)

    def give_up(self, causes: dict[int, str]) -> None:
        if self.ranks > 1:
            os.makedirs(self.temporary, exist_ok=True)
            inside = self._inside.path
            write_whole(inside / FAILED, json.dumps({"save": self.save, "causes": causes}).encode())
            for name in set(os.listdir(inside)) - {FAILED}:
                (inside / name).unlink(missing_ok=True)  # another rank may be about to rename it
        else:
            shutil.rmtree(self.temporary, ignore_errors=True)

    # ---- the other ranks

    def _await_folder(self) -> None:
        """Wait for rank 0's temporary folder. Raises OSError if this rank cannot write beside it: rank 0 may be
        unable to make it for the same reason."""
        probed_at = time.monotonic()

        def there() -> bool:
            nonlocal probed_at
            if self.temporary.exists():
                self._begun = True
                return True
            if time.monotonic() - probed_at > PROBE_S:
                probe = self.folder / f".probe-{self.save}-{self.rank}"
                os.close(open_plain(probe, os.O_WRONLY | os.O_CREAT))
                probe.unlink(missing_ok=True)  # rank 0 may have deleted it as a leftover
                probed_at = time.monotonic()
            return False

        if not self.wait_until(there):
            why = f"its writer had not begun the save after timeout_s={self.request['timeout_s']:g}: see rank 0's log"
            raise WriteFailed({0: why})

    def _given_up(self) -> bool:
        """True if rank 0's writer has abandoned the save and emptied the temporary folder."""
        return self._begun and ((self.temporary / FAILED).exists() or not self.temporary.exists())

    def verdict(self) -> dict[int, str] | None:
        gone = not self.temporary.exists()  # checked before the manifest, which exists after a commit
        manifest = self._read(self.final / MANIFEST)
        if manifest is not None and manifest.get("checkpoint", {}).get("save") == self.save:
            return {}
        failed = self._read(self.temporary / FAILED)
        if failed is not None:
            return {int(rank): why for rank, why in failed["causes"].items()}
        return {0: "its writer has aborted the save: see rank 0's log"} if gone else None

    def explain(self, error: BaseException) -> str:
        if not isinstance(error, OSError) or isinstance(error, PenstockError):
            return str(error)
        where = self.temporary if self._held is not None or self.rank else self.folder
        text = f"{error.filename or where}: {error.strerror or error}"
        text = text if self._held is None else self._held.named(text)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            return f"{text}: check this user's rights there, and the filesystem"
        with suppress(OSError):
            nbytes = sum(size for _, _, size, _ in self.request["files"])
            free = os.statvfs(where if where.exists() else where.parent)
            text += f" ({nbytes:,} bytes to write, {free.f_bavail * free.f_frsize:,} free)"
        return f"{text}: delete older checkpoints, or set keep_last"

    # ---- signs of life: times of files

    def ask(self) -> None:
        if self.rank == 0:  # which itself gives signs all the time, with the folder's lock
            sign_of_life(self._inside.path / ASKED)

    def sign_if_asked(self) -> None:
        if self.rank and (self.temporary / ASKED).exists():
            with suppress(OSError):
                sign_of_life(self._inside.path / sign_name(self.rank))

    def sign_of(self, rank: int) -> int:
        return last_sign(self.temporary / sign_name(rank) if rank else self.folder / LOCK)

    def _read(self, path: Path) -> dict[str, Any] | None:
        """Return the contents of another writer's file for this save; None if it does not exist yet."""
        try:
            value = json.loads(read_plain(path, LARGEST_RECORD))
        except (OSError, ValueError, RecursionError):
            return None
        return value if isinstance(value, dict) and self.save in (value.get("save"), _saved(value)) else None


def _saved(value: dict[str, Any]) -> Any:
    inner = value.get("checkpoint")
    return inner.get("save") if isinstance(inner, dict) else None


def tell_folder(request: dict[str, Any], name: str, message: bytes) -> None:
    """Write a message to the other ranks' writers of a save, for a writer that has ended."""
    temporary = Path(request["folder"]) / temporary_name(request["step"], request["save"])
    temporary.mkdir(parents=True, exist_ok=True)
    with HeldFolder(temporary) as inside:
        write_whole(inside.path / name, message)
        if not inside.is_at(temporary):  # committed meanwhile: a checkpoint has no reports
            os.unlink(inside.path / name)


class DurablePath:
    """Makes the names of the checkpoints' folder and its parents durable, because their maker may have stopped before.

    Not again while all are the same folders and the last checkpoint is still there, so that none was made anew: one
    that is made anew may have the inode of the deleted one, but not that checkpoint."""

    def __init__(self) -> None:
        self._known: dict[Path, Identity] = {}

    def sync(self, folder: Path) -> None:
        if self._known and folder in self._known and self._known == _identities(self._known):
            return
        while not os.path.ismount(folder) and folder != folder.parent:
            folder = folder.parent
            with suppress(PermissionError):  # this user cannot read the folder, so this process did not make it
                sync_folder(folder)

    def holds(self, manifest: Path) -> None:
        """Note that a checkpoint with this manifest is in the folder."""
        self._known = _identities([manifest, *manifest.parents[1:]])


def _identities(paths: Iterable[Path]) -> dict[Path, Identity]:
    found: dict[Path, Identity] = {}
    with suppress(OSError):
        for path in paths:
            status = os.stat(path)
            # without a folder's times, which change with each name in it
            found[path] = identity(status)[: 2 if stat.S_ISDIR(status.st_mode) else None]
    return found


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()
