"""Separate user for user code (setting `runner_user`), which then cannot read the worker's files and memory. Only a
worker that runs as root may change the user. Fork servers run as root; each child drops privileges before its
assignment."""

from __future__ import annotations

import ctypes
import json
import os
import pwd
import resource
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from penstock.proto.errors import InvalidArgumentError

_PR_SET_DUMPABLE = 4
_CAPABILITIES_VERSION = 0x20080522
_NEEDED = {"CAP_CHOWN": 0, "CAP_DAC_OVERRIDE": 1, "CAP_KILL": 5, "CAP_SETGID": 6, "CAP_SETUID": 7}
"""Needed to change the user, kill the user's processes, and make and remove the user's folders; with their bits."""
_CAP_SYS_PTRACE = 1 << 19
"""Bit of the capability to see how much memory another user's process shares."""
_NO_USER = (1 << 32) - 1
"""Number that the kernel takes for "leave the user unchanged"."""
PROBE_S = 60.0


@dataclass(frozen=True)
class RunnerUser:
    """User other than root. One that is not in the user database gets a group of the same number."""

    name: str
    uid: int
    gid: int
    groups: Sequence[int]
    home: str
    processes: int = 0
    """Limit on this user's processes and threads on the whole machine; 0 = as it is."""

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> RunnerUser:
        return cls(**json.loads(text))

    def own(self, path: str) -> None:
        os.chown(path, self.uid, self.gid)

    def become(self) -> None:
        """Change the user of this process, and of those that it starts, for good. Raises OSError."""
        if self.processes:
            hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
            most = self.processes if hard == resource.RLIM_INFINITY else min(self.processes, hard)
            resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
        os.setgroups(list(self.groups))
        os.setresgid(self.gid, self.gid, self.gid)
        os.setresuid(self.uid, self.uid, self.uid)
        libc = ctypes.CDLL(None, use_errno=True)
        # A change of user drops root's capabilities only if no securebits keep them, so they are dropped explicitly.
        if libc.capset((ctypes.c_uint32 * 2)(_CAPABILITIES_VERSION, 0), (ctypes.c_uint32 * 6)()) != 0:
            why = "the runner could not drop root's capabilities. Start the worker as that user, without runner_user"
            raise OSError(ctypes.get_errno(), why)
        # The kernel makes a process that changed its user undumpable, which also locks out the user's debuggers and
        # profilers.
        libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
        os.environ |= {"USER": self.name, "LOGNAME": self.name, "HOME": self.home}


def find_user(wanted: str, processes: int = 0) -> RunnerUser:
    """Return the user named or numbered `wanted`. Raises InvalidArgumentError if there is none of that name, it is
    root, this process may not become it or kill its processes, or it cannot read Python's files."""
    user = replace(_looked_up(wanted), processes=processes)
    if user.uid == 0:
        raise InvalidArgumentError("runner_user must be a user other than root: without it user code runs as root")
    if os.geteuid() != 0:
        raise InvalidArgumentError(
            f"runner_user={user.name} needs a worker that runs as root, but this worker runs as user {os.geteuid()}. "
            f"Start the worker as root, or as {user.name} without runner_user"
        )
    if missing := [name for name, bit in _NEEDED.items() if not _capabilities() & 1 << bit]:
        raise InvalidArgumentError(
            f"runner_user needs capabilities that this worker lacks: {', '.join(missing)} (docker run --cap-add)"
        )
    _try_to_import(user)
    return user


def sees_shared_memory() -> bool:
    return bool(_capabilities() & _CAP_SYS_PTRACE)


def _looked_up(wanted: str) -> RunnerUser:
    try:
        entry = pwd.getpwuid(int(wanted)) if wanted.isdecimal() else pwd.getpwnam(wanted)
    except KeyError:
        if wanted.isdecimal() and int(wanted) < _NO_USER:
            number = int(wanted)
            return RunnerUser(wanted, number, number, [number], "/")
        why = f"runner_user must be a user of this machine, got {wanted!r}. Run `getent passwd` to list all users"
        raise InvalidArgumentError(why) from None
    groups = os.getgrouplist(entry.pw_name, entry.pw_gid)
    return RunnerUser(entry.pw_name, entry.pw_uid, entry.pw_gid, groups, entry.pw_dir)


def _capabilities() -> int:
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("CapEff:")).split()[1], 16)


def _try_to_import(user: RunnerUser) -> None:
    """Raise InvalidArgumentError, with what Python or the system said, unless the user can import Penstock."""
    become: dict[str, Any] = {"user": user.uid, "group": user.gid, "extra_groups": [*user.groups], "cwd": "/"}
    command, pipe = [sys.executable, "-P", "-c", "import penstock.proto"], subprocess.PIPE
    try:
        done = subprocess.run(command, stdin=pipe, stderr=pipe, text=True, timeout=PROBE_S, check=False, **become)
        why = done.stderr or "it said nothing" if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        why = str(error)
    if why:
        raise InvalidArgumentError(
            f"{user.name} must be able to use this worker's Python: {why.strip().splitlines()[-1]}. Install Python "
            "where all can read it, not below /root. In a rootless container choose a user of /proc/self/uid_map"
        )
