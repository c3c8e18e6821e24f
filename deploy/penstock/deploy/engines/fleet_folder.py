"""Folder of a fleet on the machine where it was started: record, token, logs. Its file `lock` is locked while a
supervisor runs, and names it (Identity), so that a signal never reaches a process that got the same id."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import stat
from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO

from pydantic import ValidationError

from penstock.deploy.console.command_token import make_token
from penstock.deploy.console.exit_codes import USAGE, CommandError
from penstock.deploy.engines.engine import Fleet, Scaling
from penstock.runtime.files.atomic_files import write_whole
from penstock.runtime.process.announcements import Announcement, announce, withdraw
from penstock.runtime.process.identity import Identity

_log = logging.getLogger("penstock.deploy.engines")


class FleetFolder:
    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().absolute()
        self.state_dir = self.path / "coordinator"
        self.logs = self.path / "logs"
        self.token = self.path / "token"
        self.authority = self.path / "authority.pem"
        self.credentials = self.path / "credentials" / "*.pem"
        """Files of the fleet's own authority, by role."""
        self._record = self.path / "fleet.json"
        self._scaling = self.path / "scaling.json"

    def make(self) -> None:
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._refuse_others()
            self.logs.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise CommandError(
                f"the fleet's folder {self.path} cannot be created: {error.strerror}. Choose another by --dir", USAGE
            ) from error

    def _refuse_others(self) -> None:
        """Refuse a folder that other users can change: it names processes to signal and commands to start."""
        status = self.path.stat()
        if status.st_uid != os.geteuid():
            raise CommandError(
                f"the folder {self.path} must belong to this user, got user id {status.st_uid}. Choose another by "
                "--dir",
                USAGE,
            )
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise CommandError(
                f"the folder {self.path} must not be writable by other users, got mode "
                f"{stat.S_IMODE(status.st_mode):04o}. Run chmod 700 {self.path}",
                USAGE,
            )

    # ---- the lock

    def lock(self) -> int | None:
        """Take the folder's lock and return its file descriptor; None if a supervisor holds it."""
        fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        return fd

    def hold(self, lock: int, identity: Identity) -> None:
        """Record the process that holds the lock, to which `penstock down` sends signals."""
        data = json.dumps(asdict(identity)).encode()
        try:
            os.pwrite(lock, data, 0)
            os.ftruncate(lock, len(data))
        except OSError as error:
            raise _unwritable(self.path / "lock", error) from error

    def holder(self) -> Identity | None:
        """Return the process that `hold` recorded last, which may have ended."""
        try:
            self._refuse_others()
            return Identity(**json.loads((self.path / "lock").read_text()))
        except (OSError, ValueError, TypeError):  # there is no record yet, or it is just being written
            return None

    @property
    def supervised(self) -> bool:
        if not (self.path / "lock").exists():
            return False
        fd = self.lock()
        if fd is None:
            return True
        os.close(fd)
        return False

    # ---- content

    def save(self, fleet: Fleet) -> None:
        """Write the record, and announce the coordinator once its address is known. Raises CommandError."""
        try:
            write_whole(self._record, f"{fleet.model_dump_json(indent=2)}\n".encode(), mode=0o600)
        except OSError as error:
            raise _unwritable(self._record, error) from error
        if fleet.coordinator:
            try:
                announce(
                    Announcement(
                        what="fleet",
                        name=fleet.name,
                        address=fleet.coordinator,
                        token_file=fleet.token_file,
                        folder=fleet.dir,
                        tls=fleet.tls,
                        owner=fleet.supervisor,
                    )
                )
            except OSError as error:
                _log.debug("the coordinator is not announced to other commands: %s", error)

    def ask(self, scaling: Scaling) -> None:
        """Write the new size of the fleet for its supervisor. Raises CommandError."""
        try:
            write_whole(self._scaling, scaling.model_dump_json().encode(), mode=0o600)
        except OSError as error:
            raise _unwritable(self._scaling, error) from error

    def asked(self) -> Scaling:
        """Return the new size that `ask` wrote. Raises OSError, ValidationError."""
        return Scaling.model_validate_json(self._scaling.read_bytes())

    def fleet(self) -> Fleet | None:
        try:
            self._refuse_others()
            return Fleet.model_validate_json(self._record.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as error:
            why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error.strerror
            raise CommandError(
                f"{self._record} cannot be read ({why}). It may be of another release: move it away if no fleet runs",
                USAGE,
            ) from error

    def forget(self) -> None:
        """Delete the record of the fleet, whose daemons have all ended."""
        self._record.unlink(missing_ok=True)
        withdraw(str(self.path))

    def token_file(self, given: Path | None) -> Path:
        """Return the file with the token: `given`; else PENSTOCK_TOKEN_FILE, if PENSTOCK_TOKEN is not set; else the
        folder's own, into which PENSTOCK_TOKEN or a new token for each role is written."""
        text = os.environ.get("PENSTOCK_TOKEN")
        named = given or (None if text else os.environ.get("PENSTOCK_TOKEN_FILE"))
        if named:
            return Path(named).expanduser().absolute()
        if text:
            self.save_token(text)
        else:
            make_token(self.token, by_role=True)
        return self.token

    def save_token(self, text: str) -> None:
        """Write a token to the folder's own file. Raises CommandError if a fleet with another token runs."""
        if self.token.exists():
            if self.token.read_text().split() == text.split():
                return
            if self.fleet() is not None:
                raise CommandError(
                    f"a fleet with another token already runs in {self.path}. End it by `penstock down`", USAGE
                )
            self.token.unlink()
        fd = os.open(self.token, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w") as out:
            out.write(text.strip() + "\n")


def open_log(path: Path) -> BinaryIO:
    """Open a file for appending; a new one is readable by its owner alone."""
    return open(path, "ab", opener=lambda name, flags: os.open(name, flags, 0o600))


def _unwritable(path: Path, error: OSError) -> CommandError:
    return CommandError(
        f"{path} cannot be written: {error.strerror}. Free disk space, or let this user write there", USAGE
    )
