"""Checkpoints on disk: names of files, the manifest, locks, and the search for the newest undamaged checkpoint.

    FOLDER/
        step-100/               a complete checkpoint: the folder gets this name once all its files are on the disk
            index.json          the index: which value is where (checkpoint_index.py)
            .metadata           torch.distributed.checkpoint's own index, for torch's reader
            __0_0.distcp ...    files of torch.distributed.checkpoint: one for each rank and bucket
            penstock.json       the manifest: size and checksum of each file, and the number of the save
        step-125.tmp-4f2a9c01/  a save in flight, or one that stopped before its end; never read
        step-100.old-77e01b9d/  a checkpoint that another save of the same step is replacing
        latest                  the name of the newest checkpoint, for people and scripts

The rename to `step-N` is a save's last action, so such folders are complete; the manifest detects later damage. Saves
are numbered (`Manifest.sequence`), because a training that goes back to step 50 and saves step 75 must resume from it,
and not from the earlier step 100. A reader pins a checkpoint by a shared lock on its manifest (`pinned`), and a
deletion skips pinned ones (`claimed`). Locks end with their process.

This module is imported by a process that has neither torch nor gRPC (client/checkpoint/saving/writer.py)."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from penstock.proto.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError, DeadlineError
from penstock.runtime.files.plain_files import open_plain, read_plain

FORMAT = 1
MANIFEST = "penstock.json"
INDEX = "index.json"
METADATA = ".metadata"
LATEST = "latest"
FAILED = "failed.json"
"""File that rank 0 writes into a save's temporary folder if the save fails: {"save": id, "causes": {rank: reason}}."""
ASKED = "alive.ask"
"""File by which rank 0 asks the other ranks for signs of life, after its training process has ended."""
LOCK = ".lock"
FIELDS = ("name", "bytes", "xxh3", "parts")
LARGEST_RECORD = 256 << 20
"""Largest size of a manifest or of a rank's report in bytes: enough for some 8 million parts."""
LONGEST_NAME = 100
MOST = 1 << 62
CHUNK = 16 << 20
BEAT_S = 1.0
"""Seconds between two signs of life of the process that holds a folder's lock."""
POLL_S = 0.05
TRIES = 3
SETTLED_NS = 100_000_000
"""Age in ns from which a file's time tells of every later change: before Linux 6.13 it ticks every 4 to 10 ms."""
_STEP = re.compile(r"step-(0|[1-9][0-9]{0,18})")
_ASIDE = re.compile(r"(step-(?:0|[1-9][0-9]{0,18}))\.(tmp|old)-[0-9a-f]+")
_FILE = re.compile(r"\.?\w[\w.-]*", re.ASCII)
_PARTS = re.compile(r"|[0-9]{1,19}:[0-9a-f]{16}( [0-9]{1,19}:[0-9a-f]{16})*")
_STOPPED = re.compile(r"\.latest\.[0-9a-f]+|\.probe-[0-9a-f]+-[0-9]+")
"""Files that a process leaves if it stops while it writes LATEST or tests whether the folder is writable."""


def step_name(step: int) -> str:
    return f"step-{step}"


def step_of(name: str) -> int | None:
    """Return N of the name "step-N"; None for another name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def is_aside(name: str) -> bool:
    """Return True for the name of a folder that a save in flight, or a stopped one, has made or moved aside."""
    return _ASIDE.fullmatch(name) is not None


def temporary_name(step: int, save: str) -> str:
    """Name of the folder into which a save writes. `save`: id of the save, hexadecimal."""
    return f"step-{step}.tmp-{save}"


def report_name(rank: int) -> str:
    """Name of the file in a temporary folder in which a rank reports: JSON with "save", and "files" or "error"."""
    return f"rank-{rank}.json"


def sign_name(rank: int) -> str:
    """Name of the file in a temporary folder by which a rank gives signs of life."""
    return f"rank-{rank}.alive"


def old_name(step: int, save: str) -> str:
    """Name of a checkpoint while another save of its step, with the id `save`, replaces it."""
    return f"step-{step}.old-{save}"


Identity = tuple[int, ...]


@dataclass(frozen=True)
class CheckpointFile:
    name: str
    nbytes: int
    xxh3: str
    """128 bits, hexadecimal. "" if unknown: a file of torch's (torch_checkpoints.py)."""
    parts: str = ""
    """Checksums of sections of the file, to verify one without the others: BEGIN:XXH3 (offset in bytes, 64 bits in
    hexadecimal), separated by blanks. A section ends where the next begins. "" if unknown."""

    @property
    def spans(self) -> dict[int, tuple[int, str]]:
        """Sections of the file whose checksums are known: offset -> (offset of the end, checksum)."""
        fields = self.parts.replace(":", " ").split()
        begins = [*map(int, fields[::2])]
        ends = [*begins[1:], self.nbytes]
        return {begin: (end, digest) for begin, end, digest in zip(begins, ends, fields[1::2], strict=False)}

    def row(self) -> list[Any]:
        return [self.name, self.nbytes, self.xxh3, self.parts]

    @classmethod
    def from_row(cls, name: Any, nbytes: Any, xxh3: Any, parts: Any) -> CheckpointFile:
        """Raises ValueError for invalid values."""
        file = cls(str(name), int(nbytes), str(xxh3), str(parts))
        if not _FILE.fullmatch(file.name) or not 0 <= file.nbytes <= MOST:
            raise ValueError(f"a file must have a plain name and 0 to 2**62 bytes, got {file.name!r}, {file.nbytes:,}")
        begins = [*map(int, file.parts.replace(":", " ").split()[::2])] if _PARTS.fullmatch(file.parts) else [-1]
        if begins != sorted(begins) or (begins and not 0 <= begins[0] <= begins[-1] <= file.nbytes):
            raise ValueError(f"the sections of {file.name!r} must follow one another in it, got {file.parts!r:.100}")
        return file


@dataclass(frozen=True)
class Manifest:
    step: int
    save: str
    sequence: int
    """Number of this save among all saves into the same folder, from 1."""
    ranks: int
    files: tuple[CheckpointFile, ...]

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)

    def encode(self) -> bytes:
        """Return the manifest as readable JSON that contains a checksum of itself."""
        body = {
            "format": FORMAT,
            "step": self.step,
            "save": self.save,
            "sequence": self.sequence,
            "ranks": self.ranks,
            "files": [dict(zip(FIELDS, file.row(), strict=True)) for file in self.files],
        }
        return json.dumps({"checkpoint": body, "xxh3": _checksum(body)}, indent=1).encode() + b"\n"

    @classmethod
    def decode(cls, data: bytes, where: Path | str, *, parts: bool = True) -> Manifest:
        """`where`: its path, for messages; `parts` False: without the files' `parts`, whose check takes most of the
        time. Raises CheckpointCorruptError for damage or a newer format."""
        try:
            outer = json.loads(data)
            body: dict[str, Any] = outer["checkpoint"]
            if outer["xxh3"] != _checksum(body):
                raise ValueError("the checksum in the file differs from that of its content")
            if body["format"] > FORMAT:
                raise CheckpointCorruptError(
                    f"{where} is in format {body['format']} of a newer Penstock: upgrade it, or use another checkpoint"
                )
            rows = (
                [*(file[field] for field in FIELDS[:3]), file[FIELDS[3]] if parts else ""] for file in body["files"]
            )
            files = tuple(CheckpointFile.from_row(*row) for row in rows)
            step, sequence, ranks = (_number(field, body[field]) for field in ("step", "sequence", "ranks"))
            return cls(step, str(body["save"]), sequence, ranks, files)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise CheckpointCorruptError(f"{where} is damaged: {error}. Use another checkpoint") from error


@dataclass(frozen=True)
class FoundCheckpoint:
    step: int
    path: Path
    manifest: Manifest | None
    """None if it cannot be read. `checkpoints` leaves out the `parts` of its files."""
    damage: str
    """A manifest that cannot be read, or a file that is missing or has another size; "" if none was found."""


_listed: dict[Identity, Manifest] = {}
"""Manifests of the folder that `checkpoints` has listed last."""


def read_manifest(path: Path, *, parts: bool = True) -> Manifest:
    """`parts`: see Manifest.decode. Raises CheckpointNotFoundError if the folder or its manifest is missing;
    CheckpointCorruptError for damage."""
    where = path / MANIFEST
    try:
        return Manifest.decode(read_plain(where, LARGEST_RECORD), where, parts=parts)
    except FileNotFoundError:
        raise CheckpointNotFoundError(f"{path} has no file {MANIFEST}: name a folder step-N") from None
    except OSError as error:
        raise CheckpointCorruptError(f"{where} cannot be read: {error.strerror}. Use another checkpoint") from error


def damage(path: Path, manifest: Manifest, *, contents: bool = False) -> Iterator[str]:
    """Yield a text for each file that differs from what was written. `contents`: compare checksums, not only sizes."""
    for file in manifest.files:
        where = f"{path}/{file.name}"  # joining Paths would take most of the time
        try:
            nbytes = os.stat(where).st_size
            if nbytes != file.nbytes:
                yield f"{file.name} has {nbytes:,} bytes, but {file.nbytes:,} were written"
            elif contents and file.xxh3 and (found := _checksum_of(where)) != file.xxh3:
                yield f"{file.name} has checksum {found}, but {file.xxh3} was written"
        except FileNotFoundError:
            yield f"{file.name} is missing"
        except OSError as error:
            yield f"{file.name}: cannot be read: {error.strerror}"


def checkpoints(folder: Path, *, sizes: bool = True) -> list[FoundCheckpoint]:
    """Return the checkpoints of a folder, the newest first.

    One with a damaged manifest has an unknown age, and is listed directly after that of the file `latest`; first, if
    that is damaged too, so that a resume does not skip them silently. One whose replacement stopped half way has its
    temporary path until `put_back`. `sizes`: check that all files exist and have the right sizes.

    Manifests that the last call in this process has read are not read again if their files are unchanged."""
    global _listed
    found: list[FoundCheckpoint] = []
    listed: dict[Identity, Manifest] = {}
    for _ in range(TRIES):  # a save that ends meanwhile may rename the listed folders
        names = _names(folder)
        found = [*_found(folder, names, sizes, listed)]
        if set(names) == set(_names(folder)):
            break
    _listed = listed
    named = _latest(folder)
    last = next((one.manifest.sequence for one in found if one.path.name == named and one.manifest), None)

    def order(one: FoundCheckpoint) -> tuple[float, int]:
        if one.manifest is not None:
            return one.manifest.sequence, one.step
        return float("inf") if last is None else last - 0.5, one.step

    return sorted(found, key=order, reverse=True)


def _found(
    folder: Path, names: Iterable[str], sizes: bool, listed: dict[Identity, Manifest]
) -> Iterator[FoundCheckpoint]:
    names = list(names)
    for name, final in [*((name, name) for name in names), *_half_replaced(names)]:
        if (step := step_of(final)) is not None:
            path = folder / name
            try:
                manifest = _listed_manifest(path, listed)
                yield FoundCheckpoint(step, path, manifest, "; ".join(damage(path, manifest)) if sizes else "")
            except CheckpointNotFoundError:
                continue  # not a checkpoint of ours, although its name looks like one: see torch_checkpoints.py
            except CheckpointCorruptError as error:
                yield FoundCheckpoint(step, path, None, error.message)


def _listed_manifest(path: Path, listed: dict[Identity, Manifest]) -> Manifest:
    """Return a manifest without its files' `parts`, which take most of its memory, and note it in `listed`."""
    try:
        status = os.stat(f"{path}/{MANIFEST}")
    except OSError:
        return read_manifest(path)  # raises the error that says why
    key = identity(status)
    if (manifest := _listed.get(key)) is None:
        manifest = read_manifest(path, parts=False)
        if time.time_ns() - status.st_mtime_ns < SETTLED_NS:
            return manifest
    listed[key] = manifest
    return manifest


def identity(status: os.stat_result) -> Identity:
    """Return what changes if a file is replaced or written to."""
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size


def newest(folder: Path) -> FoundCheckpoint | None:
    return next((one for one in checkpoints(folder) if not one.damage), None)


def leftovers(folder: Path, *, besides: Iterable[str] = ()) -> list[Path]:
    """Return what stopped saves have left, to be deleted. `besides`: ids of saves in progress."""
    names = _names(folder)
    asides = {name for name in names if _ASIDE.fullmatch(name) or _STOPPED.fullmatch(name)}
    asides -= {name for name, _ in _half_replaced(names)}
    kept = tuple(f".tmp-{save}" for save in besides)
    return [folder / name for name in sorted(asides) if not name.endswith(kept)]


def put_back(folder: Path) -> None:
    """Rename checkpoints back whose replacement stopped before the new one was called step-N."""
    for name, final in _half_replaced(_names(folder)):
        os.rename(folder / name, folder / final)


def _half_replaced(names: Iterable[str]) -> list[tuple[str, str]]:
    """(present name, original name) of the checkpoints whose replacement stopped half way."""
    taken = set(names)
    matches = [match for match in map(_ASIDE.fullmatch, sorted(taken)) if match and match[2] == "old"]
    names_of = {match[1]: match[0] for match in matches if match[1] not in taken}
    return [(name, final) for final, name in names_of.items()]


def surplus(steps: Iterable[int], keep_last: int | None, keep_every: int | None) -> list[int]:
    """Return the steps of the checkpoints that are to be deleted. `steps`: the newest first."""
    if keep_last is None:
        return []
    return [step for step in list(steps)[keep_last:] if keep_every is None or step % keep_every]


@contextmanager
def pinned(path: Path) -> Iterator[int]:
    """Protect a checkpoint from deletion inside a block. Yield a descriptor of its folder, valid also if renamed.
    Raises CheckpointNotFoundError if it was or is being deleted, or cannot be read."""
    with ExitStack() as held:
        try:
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            held.callback(os.close, folder)
            manifest = open_plain(MANIFEST, folder=folder)
            held.callback(os.close, manifest)
        except OSError as error:
            raise CheckpointNotFoundError(f"{path} cannot be read: {error.strerror}") from error
        if not _free_for(manifest, fcntl.LOCK_SH):
            raise CheckpointNotFoundError(f"{path} is being deleted by another process: use a newer checkpoint")
        if not os.fstat(manifest).st_nlink:
            raise CheckpointNotFoundError(f"{path} was deleted by another process: use a newer checkpoint")
        yield folder


@contextmanager
def claimed(path: Path) -> Iterator[bool]:
    """Yield True if a checkpoint may be deleted: no process has pinned it, or can inside the block."""
    try:
        try:
            manifest = open_plain(path / MANIFEST, os.O_RDWR)
        except PermissionError:
            manifest = open_plain(path / MANIFEST)
    except OSError:
        yield True  # not a checkpoint (any more): nothing to protect
        return
    try:
        yield _free_for(manifest, fcntl.LOCK_EX)
    finally:
        os.close(manifest)


def _free_for(handle: int, kind: int) -> bool:
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # the file system has no locks
    return True


@contextmanager
def locked(
    folder: Path, timeout_s: float, *, silence_s: float | None = None, heartbeats: bool = False
) -> Iterator[None]:
    """Hold a folder's lock inside a block, so that only one save at a time writes into it. It ends with its process.

    Args:
        timeout_s: seconds to wait for the lock.
        silence_s: seconds without a sign of life after which waiting ends, because the holder's machine may be lost;
            None: no such limit.
        heartbeats: give signs of life while the lock is held.

    Raises DeadlineError, naming the holder, if the lock is not free in time; CheckpointError if something else has the
    name of the lock's file, such as a link; another OSError. On a file system without locks nothing is locked."""
    try:
        try:
            handle = open_plain(folder / LOCK, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EMLINK):
                raise
            # A file of another user, or with a second name, can be locked but must not be written.
            handle = open_plain(folder / LOCK)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):
            raise
        remedy = ": move it away" if error.errno == errno.ENXIO else ""  # the text of ELOOP has its own
        raise CheckpointError(f"{folder / LOCK} cannot be locked: {error.strerror}{remedy}") from error
    ended = threading.Event()
    try:
        _take(handle, folder, timeout_s, silence_s)
        with suppress(OSError):
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"process {os.getpid()} on {os.uname().nodename}\n".encode(), 0)
        if heartbeats:
            threading.Thread(target=_beat, args=(folder / LOCK, ended), name="penstock-beat", daemon=True).start()
        yield
    finally:
        ended.set()
        os.close(handle)


def _take(handle: int, folder: Path, timeout_s: float, silence_s: float | None) -> None:
    now = begun = time.monotonic()
    deadline, sign, heard = now + timeout_s, last_sign(folder / LOCK), now
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            now = time.monotonic()
            if (newer := last_sign(folder / LOCK)) != sign:
                sign, heard = newer, now
            silent = silence_s is not None and now - heard > silence_s
            if silent or now > deadline:
                holder = os.pread(handle, 200, 0).decode(errors="replace").strip() or "another process"
                waited = f"waited {now - begun:.1f} s for {holder}, which holds the lock of {folder}"
                if silent:
                    why = f"and gave no sign of life for {silence_s:g} s. If its machine is lost, retry later"
                    raise DeadlineError(f"{waited} {why}") from None
                raise DeadlineError(f"{waited}. Give each job a folder of its own") from None
            time.sleep(POLL_S)
        except OSError:  # the file system has no locks
            return


def sign_of_life(path: Path) -> None:
    """Update the time of a file, which `last_sign` reads on any machine that shares the folder."""
    with suppress(OSError):
        handle = open_plain(path, os.O_RDWR | os.O_CREAT)
        try:
            os.utime(handle)
        finally:
            os.close(handle)


def last_sign(path: Path) -> int:
    """Number that changes with each sign of life; 0 if unreadable. Compare for equality: machines' clocks differ."""
    try:
        handle = open_plain(path)  # opening makes a network file system read the time from its server
    except OSError:
        return 0
    try:
        return os.fstat(handle).st_mtime_ns
    finally:
        os.close(handle)


def _beat(path: Path, ended: threading.Event) -> None:
    while not ended.wait(BEAT_S):
        sign_of_life(path)


def _latest(folder: Path) -> str:
    try:
        return read_plain(folder / LATEST, LONGEST_NAME).decode().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _number(field: str, value: Any) -> int:
    number = int(value)
    if not 0 <= number <= MOST:
        raise ValueError(f"{field} must be from 0 to 2**62, got {str(value)[:40]}")
    return number


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be listed: {error.strerror}") from error


def _checksum(body: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True).encode())


def _checksum_of(path: str) -> str:
    hasher = xxhash.xxh3_128()
    with open(path, "rb", buffering=0, opener=open_plain) as file:
        while piece := file.read(CHUNK):
            hasher.update(piece)
    return hasher.hexdigest()
