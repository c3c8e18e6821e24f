"""The checkpoint writer: a process that writes shared memory to files and commits them as a checkpoint.

Each rank has one, without torch, gRPC or CUDA: it starts in 0.1 s, takes 12 to 14 MiB, shares no interpreter lock with
the loop, and lives as long as its checkpointer. writer_process.py starts it by its file's path, because `python -m`
would import penstock.client, and with it torch; its arguments are the descriptor of their socket and the training
process's id. Requests are JSON after their length, over a Unix socket, and may carry
the memfd to write from; replies are lines of JSON.

**Files** are written past the page cache where possible (O_DIRECT): for 1 GiB that took 0.5 to 0.75 s in all instead of
0.7 to 5.5 s.

**Commit.** Every rank's writer writes its files into one temporary folder, makes them durable, and then writes a report
there. Rank 0's writer waits for all reports, compares sizes with the plan, adds the indexes and the manifest, and
renames the folder. The others wait for that, or for the file with the causes of a failure. So the writers agree through
the shared folder: a collective operation would need the threads of the training loops.

**fsync.** A save of one rank makes one for the content of each file, and four more:
- the temporary folder: the names of all files in it, before the folder gets its name;
- the checkpoints' folder: that name, before the save is reported, and before what it replaces is deleted;
- the content of `latest`, so that the name never leads to half of it;
- the checkpoints' folder again: the name `latest`, and those of surplus checkpoints, which are renamed before their
  contents are deleted.
Each other rank syncs the temporary folder too, before its report. `DurablePath` syncs the folder's parents once.

**End.** When the training process has ended, the writer finishes or abandons the save in flight, as the save asks. A
save has a deadline. If a machine failed, another rank's writer may be gone while a restarted job waits for the folder,
so a writer without a training process abandons a save once a rank that it waits for shows no sign of life."""

from __future__ import annotations

import errno
import gc
import json
import mmap
import os
import shutil
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import xxhash

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
    Manifest,
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
from penstock.proto.state.checkpoint_index import IndexPickle
from penstock.runtime.files.atomic_files import sync_folder, write_whole
from penstock.runtime.files.direct_files import write_file
from penstock.runtime.files.held_folders import HeldFolder
from penstock.runtime.files.inner_paths import refuse_strange_links
from penstock.runtime.files.part_checksums import PartHasher
from penstock.runtime.files.plain_files import open_plain, read_plain
from penstock.runtime.process.titles import name_process
from penstock.runtime.process.watch import wait_for_parent_end

PROGRESS_S = 0.2
SIGN_S = 1.0
"""Seconds between a writer's signs of life (changes of a file), once rank 0's writer requests them."""
SILENCE_S = 5.0
"""Seconds of silence of a rank, after which a writer without a training process abandons a save (of rank 0: twice)."""
PROBE_S = 0.5
"""Seconds between two tests of a waiting writer, whether it can write into the checkpoints' folder."""
LENGTH = 8
NICENESS = 10
"""The training loop and its input have priority on a busy processor."""


class WriteFailed(Exception):
    def __init__(self, causes: dict[int, str]) -> None:
        super().__init__("; ".join(f"rank {rank}: {cause}" for rank, cause in sorted(causes.items())))
        self.causes = causes


class SaveJob:
    """One rank's part of a save. `request`: as writer_process.py sends it."""

    def __init__(
        self,
        request: dict[str, Any],
        image: memoryview,
        send_reply: Callable[[dict[str, Any]], None],
        orphaned: Callable[[], bool] = lambda: False,
        path: DurablePath | None = None,
    ) -> None:
        self.request = request
        self.image = image
        self.save: str = request["save"]
        self.rank: int = request["rank"]
        self.ranks: int = request["ranks"]
        self.folder = Path(request["folder"])
        self.temporary = self.folder / temporary_name(request["step"], self.save)
        """Another user may put a link in its place, see `_inside`."""
        self.final = self.folder / step_name(request["step"])
        self._path = path or DurablePath()
        self._held: HeldFolder | None = None
        self.deadline: float = time.monotonic() + request["timeout_s"]
        self.written = 0
        self.cancelled = False
        self._begun = False
        self._orphaned = orphaned
        """Returns True once the training process has ended."""
        self._signs: dict[int, tuple[int, float]] = {}
        """Last sign of life of each rank's writer, and when it was first seen."""
        self._signed_at = 0.0
        self._send_reply = send_reply
        self._reported_at = time.monotonic()

    def run(self) -> None:
        try:
            self._run()
        finally:
            if self._held is not None:
                self._held.close()

    @property
    def _inside(self) -> HeldFolder:
        if self._held is None:
            self._held = HeldFolder(self.temporary)
        return self._held

    def _run(self) -> None:
        if self.rank:
            self._report()
            self._await_verdict()
            return
        try:
            # a link may lead anywhere, and surplus checkpoints are deleted through it
            refuse_strange_links(self.folder)
            os.makedirs(self.folder, exist_ok=True)
            self._path.sync(self.folder)
            with locked(self.folder, self._left(), heartbeats=True):
                self._check_final()
                put_back(self.folder)
                if left := leftovers(self.folder, besides=[self.save, *self.request["in_flight"]]):
                    sync_folder(self.folder)  # makes the renamed names durable before their contents are deleted
                    for path in left:
                        with claimed(path) as free:
                            if free:
                                _remove(path)
                self._commit(self._report())
        except (OSError, PenstockError) as error:
            self._give_up({0: self._explain(error, self.folder)})
        except WriteFailed as failed:
            self._give_up(failed.causes)

    def _check_final(self) -> None:
        """Raise WriteFailed if the save would replace something that is not a Penstock checkpoint."""
        if self.final.exists() and not (self.final / MANIFEST).exists() and any(self.final.iterdir()):
            raise WriteFailed({0: f"{self.final} exists and is not a Penstock checkpoint: move it to another folder"})

    # ---- this rank's files

    def _report(self) -> dict[str, Any]:
        """Write this rank's files and return its report: the files, or an error. Ranks above 0 also write it."""
        report: dict[str, Any] = {"save": self.save, "files": [], "error": self.request["error"]}
        try:
            if self.rank:
                self._await_folder()
            else:
                os.makedirs(self.temporary, exist_ok=True)
            folder = self._inside.path
            if not report["error"]:
                report["files"] = [file.row() for file in self._write(folder)]
        except OSError as error:
            report["error"] = self._explain(error, self.temporary, sum(size for _, _, size, _ in self.request["files"]))
        if self.rank:
            try:
                sync_folder(self._inside.path)
                # a message, of which nothing needs to be left after a power failure
                write_whole(self._inside.path / report_name(self.rank), json.dumps(report).encode(), sync=False)
            except OSError as error:
                # If the report cannot be written, rank 0 waits for it until the deadline, because no other channel
                # reaches rank 0.
                if self._held is None or not self._given_up():
                    raise WriteFailed({self.rank: report["error"] or self._explain(error, self.temporary)}) from error
        return report

    def _write(self, folder: Path) -> list[CheckpointFile]:
        files = [(name, self.image[start:], size, parts) for name, start, size, parts in self.request["files"]]
        if not files:
            return []
        with ThreadPoolExecutor(self.request["threads"]) as pool:
            tasks = [pool.submit(self._write_one, folder, *file) for file in files]
            try:
                while wait(tasks, PROGRESS_S, FIRST_EXCEPTION).not_done:
                    self._progress()
                    if any(task.done() and task.exception() for task in tasks):
                        break
                return [task.result() for task in tasks]
            finally:
                self.cancelled = True

    def _write_one(self, folder: Path, name: str, region: memoryview, size: int, parts: list[int]) -> CheckpointFile:
        hasher, before = PartHasher(parts), 0

        def passing(data: memoryview) -> None:
            nonlocal before
            if self.cancelled:
                raise InterruptedError(errno.EINTR, "the save was aborted")
            self.written += before
            hasher.update(data)
            before = len(data)

        write_file(folder / name, region, size, durable=self.request["fsync"], passing=passing)
        self.written += before
        return CheckpointFile(name, size, *hasher.digests())

    # ---- rank 0: all ranks' files become a checkpoint

    def _commit(self, own: dict[str, Any]) -> None:
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
        before = checkpoints(self.folder, sizes=self.request["keep_last"] is not None)
        sequence = min(1 + max((one.manifest.sequence for one in before if one.manifest), default=0), MOST)
        manifest = Manifest(self.request["step"], self.save, sequence, self.ranks, tuple(files))
        inside = self._inside.path
        for rank in range(1, self.ranks):
            os.unlink(inside / report_name(rank))
        for name, data in ((INDEX, index), (MANIFEST, manifest.encode()), (METADATA, metadata)):
            write_whole(inside / name, data, sync="content")
        sync_folder(inside)
        replaced = self.folder / old_name(self.request["step"], self.save)
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
            for name in set(os.listdir(inside)) - {MANIFEST, *(file.name for file in files)}:
                os.unlink(inside / name)  # reports of ranks whose writers were lost after they had written their part
        with suppress(OSError):
            write_whole(self.folder / LATEST, f"{self.final.name}\n".encode(), sync="content")
        with claimed(replaced) as free:
            if free:
                shutil.rmtree(replaced, ignore_errors=True)
        older = [one.step for one in before if not one.damage and one.path != self.final]
        self._delete(surplus([self.request["step"], *older], self.request["keep_last"], self.request["keep_every"]))

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

    def _gather(self) -> dict[int, dict[str, Any]]:
        """Wait for the other ranks' reports; once one has an error, return those that came."""
        reports: dict[int, dict[str, Any]] = {}

        def all_there() -> bool:
            for rank in range(1, self.ranks):
                if rank not in reports and (report := self._read(self.temporary / report_name(rank))) is not None:
                    reports[rank] = report
            if len(reports) == self.ranks - 1 or any(report["error"] for report in reports.values()):
                return True
            if self._orphaned():
                self._expect_signs([rank for rank in range(1, self.ranks) if rank not in reports])
            return False

        if not self._wait_until(all_there):
            late = [rank for rank in range(1, self.ranks) if rank not in reports]
            why = f"its writer had not written its files after timeout_s={self.request['timeout_s']:g} s"
            raise WriteFailed(dict.fromkeys(late, why))
        return reports

    def _expect_signs(self, late: list[int]) -> None:
        now = time.monotonic()
        if not self._signs:
            sign_of_life(self._inside.path / ASKED)
        for rank in late:
            sign = last_sign(self.temporary / sign_name(rank))
            if rank not in self._signs or self._signs[rank][0] != sign:
                self._signs[rank] = sign, now
        if lost := [rank for rank in late if now - self._signs[rank][1] > SILENCE_S]:
            raise WriteFailed(dict.fromkeys(lost, _silent(SILENCE_S)))

    def _give_up(self, causes: dict[int, str]) -> None:
        """Tell the other ranks the causes in a file, delete the written data, and raise WriteFailed."""
        failed = WriteFailed(causes)
        with suppress(OSError):
            if self.ranks > 1:
                os.makedirs(self.temporary, exist_ok=True)
                inside = self._inside.path
                write_whole(inside / FAILED, json.dumps({"save": self.save, "causes": causes}).encode())
                for name in set(os.listdir(inside)) - {FAILED}:
                    (inside / name).unlink(missing_ok=True)  # another rank may be about to rename it
            else:
                shutil.rmtree(self.temporary, ignore_errors=True)
        raise failed

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

        if not self._wait_until(there):
            why = f"its writer had not begun the save after timeout_s={self.request['timeout_s']:g}: see rank 0's log"
            raise WriteFailed({0: why})

    def _given_up(self) -> bool:
        """True if rank 0's writer has abandoned the save and emptied the temporary folder."""
        return self._begun and ((self.temporary / FAILED).exists() or not self.temporary.exists())

    def _await_verdict(self) -> None:
        causes: dict[int, str] = {}

        def known() -> bool:
            gone = not self.temporary.exists()  # checked before the manifest, which exists after a commit
            manifest = self._read(self.final / MANIFEST)
            if manifest is not None and manifest.get("checkpoint", {}).get("save") == self.save:
                return True
            verdict = self._read(self.temporary / FAILED)
            if verdict is not None:
                causes.update({int(rank): why for rank, why in verdict["causes"].items()})
            elif gone:
                causes[0] = "its writer has aborted the save: see rank 0's log"
            return bool(causes)

        if not self._wait_until(known):
            causes[0] = f"its writer had not committed after timeout_s={self.request['timeout_s']:g}: see rank 0's log"
        if causes:
            raise WriteFailed(causes)

    def _explain(self, error: BaseException, where: Path, nbytes: int = 0) -> str:
        if not isinstance(error, OSError) or isinstance(error, PenstockError):
            return str(error)
        text = f"{error.filename or where}: {error.strerror or error}"
        text = text if self._held is None else self._held.named(text)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            return f"{text}: check this user's rights there, and the filesystem"
        with suppress(OSError):
            free = os.statvfs(where if where.exists() else where.parent)
            text += f" ({nbytes:,} bytes to write, {free.f_bavail * free.f_frsize:,} free)"
        return f"{text}: delete older checkpoints, or set keep_last"

    # ---- waiting

    def _wait_until(self, true: Callable[[], bool]) -> bool:
        """Call `true` until it returns True. Return False at the save's deadline."""
        pause = 0.005
        while not true():
            if self._left() <= 0:
                return False
            if self.rank and self._orphaned():
                self._expect_first_rank()
            time.sleep(min(pause, max(self._left(), 0)))
            pause = min(pause * 1.5, 0.5)
            self._progress()
        return True

    def _left(self) -> float:
        return self.deadline - time.monotonic()

    def _expect_first_rank(self) -> None:
        """Raise WriteFailed if rank 0's writer does not change the folder's lock file for 2 * SILENCE_S."""
        sign, now = last_sign(self.folder / LOCK), time.monotonic()
        if self._signs.setdefault(0, (sign, now))[0] != sign:
            self._signs[0] = sign, now
        elif now - self._signs[0][1] > 2 * SILENCE_S:
            raise WriteFailed({0: _silent(2 * SILENCE_S)})

    def _progress(self) -> None:
        now = time.monotonic()
        if self.rank and now - self._signed_at >= SIGN_S:
            self._signed_at = now
            if (self.temporary / ASKED).exists():
                with suppress(OSError):
                    sign_of_life(self._inside.path / sign_name(self.rank))
        if now - self._reported_at >= PROGRESS_S:
            self._reported_at = now
            self._send_reply({"save": self.save, "kind": "progress", "written": self.written})

    def _read(self, path: Path) -> dict[str, Any] | None:
        """Return the contents of another writer's file for this save; None if it does not exist yet."""
        try:
            value = json.loads(read_plain(path, LARGEST_RECORD))
        except (OSError, ValueError, RecursionError):
            return None
        return value if isinstance(value, dict) and self.save in (value.get("save"), _saved(value)) else None


def _silent(seconds: float) -> str:
    return f"its writer showed no sign of life for {seconds:g} s after the training had ended: check its machine"


def _saved(value: dict[str, Any]) -> Any:
    inner = value.get("checkpoint")
    return inner.get("save") if isinstance(inner, dict) else None


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


class Parent:
    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self.images: dict[int, memoryview] = {}
        """By their numbers in the training process."""
        self.gone = threading.Event()

    def receive(self) -> dict[str, Any] | None:
        """Return the next request; None if the training process has ended, or has closed its checkpointer."""
        try:
            head, handles, _, _ = socket.recv_fds(self._sock, LENGTH, 1)
            head += self._read(LENGTH - len(head))
            request: dict[str, Any] = json.loads(self._read(int.from_bytes(head)))
            self.images = {number: image for number, image in self.images.items() if number in request["images"]}
            for handle in handles:
                self.images[request["image"]] = memoryview(mmap.mmap(handle, 0, prot=mmap.PROT_READ))
                os.close(handle)
            return request
        except (OSError, EOFError):
            return None

    def _read(self, nbytes: int) -> bytes:
        data = bytearray()
        while len(data) < nbytes:
            piece = self._sock.recv(min(nbytes - len(data), 1 << 20))
            if not piece:
                raise EOFError
            data += piece
        return bytes(data)

    def end(self) -> None:
        """Let `receive` return None after the requests so far, also if forks of the training process live on."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RD)

    def send_reply(self, reply: dict[str, Any]) -> None:
        with self._lock, suppress(OSError):  # the parent may have ended; the save continues
            self._sock.sendall(json.dumps(reply).encode() + b"\n")


def exit_after_parent(parent: Parent, watched: list[SaveJob], parent_watch: int) -> None:
    """Wait in a thread for the training process's end; then let `serve` end after its save, or end at once if the save
    is to be abandoned (`finish` is False), or at its deadline."""
    wait_for_parent_end(parent_watch)
    parent.gone.set()
    parent.end()
    while True:
        if watched and not (watched[0].request["finish"] and time.monotonic() < watched[0].deadline):
            os._exit(0)
        time.sleep(0.05)


def serve(parent: Parent, parent_watch: int) -> None:
    watched: list[SaveJob] = []
    path = DurablePath()
    threading.Thread(target=exit_after_parent, args=(parent, watched, parent_watch), daemon=True).start()
    parent.send_reply({"kind": "ready"})
    while (request := parent.receive()) is not None:
        if os.getppid() != parent_watch and not request["finish"]:
            return
        image = parent.images.get(request["image"], memoryview(b""))
        save = SaveJob(request, image, parent.send_reply, parent.gone.is_set, path)
        watched[:] = [save]
        try:
            save.run()
            reply: dict[str, Any] = {"kind": "done"}
        except WriteFailed as failed:
            reply = {"kind": "failed", "causes": failed.causes}
        except Exception as error:  # a bug makes this save fail, but the writer continues
            reply = {"kind": "failed", "causes": {save.rank: f"{type(error).__name__}: {error}"}}
        watched.clear()
        parent.send_reply({"save": save.save, **reply})
        gc.collect()


def main() -> None:
    name_process("penstock writer")
    gc.disable()  # a collection would stop all threads: `serve` makes one after each save,
    gc.freeze()  # of what the save has left only, in 0.1 ms
    with suppress(OSError):
        os.nice(NICENESS)
    with suppress(OSError):  # if memory runs out, losing a save is better than losing the training
        Path("/proc/self/oom_score_adj").write_text("500")
    serve(Parent(socket.socket(fileno=int(sys.argv[1]))), int(sys.argv[2]))


if __name__ == "__main__":
    main()
