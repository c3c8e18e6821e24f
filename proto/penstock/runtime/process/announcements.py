"""Announcements: small files by which commands find the coordinators that this user runs on this machine.

Embedded appliances and fleets of `penstock up` announce their address, so that `penstock status` needs no setting; and
the path of a file with a token, never the token itself. The files are in $XDG_RUNTIME_DIR/penstock, else in
/tmp/penstock-run-UID; both are read, because a job may lack the variable. Others can write to /tmp, so the folder must
be no link, belong to this user and be closed to others.

When its process (id, start time and boot) has ended, a file is ignored and removed. A fleet on other machines has none:
its address must accept connections, and `penstock down` removes the file."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import stat
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from penstock.runtime.files.atomic_files import write_whole
from penstock.runtime.files.held_folders import HeldFolder
from penstock.runtime.files.plain_files import read_plain
from penstock.runtime.process.identity import Identity

MAX_FILE = 64 << 10
CONNECT_S = 0.5
SUFFIX = ".json"


@dataclass(frozen=True)
class Announcement:
    what: str
    """"embedded" (in a training job), or "fleet" (of `penstock up`)."""
    name: str
    address: str
    token_file: str
    """Path of a file with a token of the role admin."""
    folder: str
    """Folder of the embedded coordinator or of the fleet, by which `announce` and `withdraw` find an announcement."""
    tls: Mapping[str, str] = field(default_factory=dict)
    """Settings by which a caller may send its token: tls_ca, tls_name, insecure."""
    owner: Identity | None = None
    """Process whose end also ends the coordinator; None for a coordinator on another machine."""

    @property
    def is_live(self) -> bool:
        if self.owner is None:
            return accepts(self.address)
        process = self.owner.open()
        if process is None:
            return False
        process.close()
        return True

    def __str__(self) -> str:
        process = f", process {self.owner.pid}" if self.owner is not None else ""
        return f"{self.what} {self.name}{process}: {self.address}"


def announce(announcement: Announcement) -> None:
    problem: OSError | None = None
    for path in _folders():
        try:
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o700)
            with _held(path) as folder:
                where, data = folder.path / _name(announcement.folder), json.dumps(asdict(announcement)).encode()
                write_whole(where, data, mode=0o600, sync=False)  # after a crash of the machine nothing of it runs
            return
        except OSError as error:
            problem = problem or error
    if problem is not None:
        raise problem


def withdraw(folder: str) -> None:
    for held in _existing():
        _remove(held, _name(folder))


def announced() -> list[Announcement]:
    """Return the announcements of coordinators that run, sorted by name. Remove those of processes that have ended."""
    import msgspec  # here: a training process only announces

    live: dict[str, Announcement] = {}
    for folder in _existing():
        for name in sorted(os.listdir(folder.path)):
            if name.startswith(".") or not name.endswith(SUFFIX):
                continue
            try:
                announcement = msgspec.json.decode(read_plain(folder.path / name, MAX_FILE), type=Announcement)
            except (OSError, ValueError, RecursionError):
                continue  # just removed, or written by another release
            if announcement.is_live:
                live[announcement.folder] = announcement
            elif announcement.owner is not None:
                _remove(folder, name)
    return sorted(live.values(), key=lambda announcement: (announcement.name, announcement.address))


def _folders() -> list[Path]:
    """The first one that can be used gets new announcements."""
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    own = [Path(base) / "penstock"] if os.path.isabs(base) else []
    return [*own, Path("/tmp") / f"penstock-run-{os.geteuid()}"]


@contextlib.contextmanager
def _held(path: Path) -> Iterator[HeldFolder]:
    """Raises OSError if others could have written to it."""
    with HeldFolder(path) as folder:
        found = os.stat(folder.path)
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise PermissionError(
                f"{path} must belong to this user and have mode 0700: remove it, or set XDG_RUNTIME_DIR to another"
            )
        yield folder


def _existing() -> Iterator[HeldFolder]:
    for path in _folders():
        with contextlib.suppress(OSError), _held(path) as folder:
            yield folder


def _remove(folder: HeldFolder, name: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(folder.path / name)


def _name(folder: str) -> str:
    return hashlib.sha256(folder.encode(errors="surrogateescape")).hexdigest()[:16] + SUFFIX


def accepts(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except (OSError, ValueError, UnicodeError):
        return False
    return True
