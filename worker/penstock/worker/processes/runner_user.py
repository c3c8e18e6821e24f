"""Another user for the processes that run user code, so that they cannot read what is the worker's own.

Only root may do that: a worker in a container, say, or one that systemd starts. Its interpreters stay root's until they
have forked a runner, which gives up root for good before it knows of any user code.
"""

from __future__ import annotations

import ctypes
import json
import os
import pwd
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from penstock.proto.errors import InvalidArgumentError

__all__ = ["RunnerUser", "find_user"]

_PR_SET_DUMPABLE = 4
PROBE_S = 60.0
"""Seconds that an interpreter may take to start as that user."""


@dataclass(frozen=True)
class RunnerUser:
    """A user that is not root, as the system's database has it."""

    name: str
    uid: int
    gid: int
    groups: Sequence[int]
    home: str

    def encode(self) -> str:
        """Return it as text for the arguments of a process."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> RunnerUser:
        """Return the user of such a text."""
        return cls(**json.loads(text))

    def own(self, path: str) -> None:
        """Give the user this folder of ours."""
        os.chown(path, self.uid, self.gid)

    def become(self) -> None:
        """Make this process, and all that it will start, the user's. There is no way back."""
        os.setgroups(list(self.groups))
        os.setresgid(self.gid, self.gid, self.gid)
        os.setresuid(self.uid, self.uid, self.uid)
        # The kernel hides the memory of a process that changed its user; from its own debuggers and profilers, too.
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
        os.environ |= {"USER": self.name, "LOGNAME": self.name, "HOME": self.home}


def find_user(wanted: str) -> RunnerUser:
    """Return the user of this name or number.

    Raises InvalidArgumentError if there is none, if it is root, if this process may not change its user, or if that
    user cannot read what Python is imported from.
    """
    try:
        found = pwd.getpwuid(int(wanted)) if wanted.isdecimal() else pwd.getpwnam(wanted)
    except KeyError:
        why = f"runner_user must be a user of this machine, got {wanted!r}: see `getent passwd`"
        raise InvalidArgumentError(why) from None
    if found.pw_uid == 0:
        raise InvalidArgumentError("runner_user must be another user than root: runners are root's without it")
    if os.geteuid() != 0:
        raise InvalidArgumentError(
            f"runner_user must be left out of a worker that is not root's: as user {os.geteuid()} it cannot become "
            f"{found.pw_name}; start it as {found.pw_name}, or as root"
        )
    groups = os.getgrouplist(found.pw_name, found.pw_gid)
    user = RunnerUser(found.pw_name, found.pw_uid, found.pw_gid, groups, found.pw_dir)
    if why := _cannot_import(user):
        raise InvalidArgumentError(
            f"runner_user must be able to use the Python of this worker, {sys.executable}, got {user.name}: {why}; "
            "install Python and its packages where other users can read them, not below /root"
        )
    return user


def _cannot_import(user: RunnerUser) -> str:
    """Return why the user cannot import what we are made of; "" if that works."""
    command = [sys.executable, "-P", "-c", "import penstock.proto"]
    try:
        done = subprocess.run(
            command,
            user=user.uid,
            group=user.gid,
            extra_groups=list(user.groups),
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PROBE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["it ended without a word"])[-1]
