"""Commands as a container's root has them: with few capabilities, and with a Python that all users can read."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

CONTAINER = (
    *("chown", "dac_override", "fsetid", "fowner", "mknod", "net_raw", "setgid", "setuid", "setfcap", "setpcap"),
    *("net_bind_service", "sys_chroot", "kill", "audit_write"),
)
"""Capabilities that container engines leave to root."""
_OPENED = """
set -e
closed=$1; kept=$(mktemp -d); shift
mount --bind "$closed" "$kept"
mount -t tmpfs -o mode=755 none "$closed"
while [ "$1" != -- ]; do mkdir -p "$1"; mount --bind "$kept${1#"$closed"}" "$1"; shift; done
umount "$kept"; rmdir "$kept"; shift
exec "$@"
"""
"""Script that hides everything below a folder except what is named, in a mount namespace of its own. Nothing changes
outside it."""


def opened() -> list[str]:
    """Return the prefix of a command for which other users must be able to read this Python, which may be below
    /root."""
    needed = {Path(sys.base_prefix).resolve(), Path(sys.prefix).resolve(), Path(__file__).resolve().parents[2]}
    closed = [
        folder for path in needed for folder in reversed(path.parents) if not folder.stat().st_mode & stat.S_IXOTH
    ]
    if not closed:
        return []
    outermost = closed[0]
    below = [str(path) for path in sorted(needed) if path.is_relative_to(outermost)]
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", _OPENED, "sh", str(outermost), *below, "--"]


def with_capabilities(*names: str) -> list[str]:
    """Return the prefix of a command that may have at most these capabilities, as root."""
    return ["setpriv", "--bounding-set", ",".join(["-all", *(f"+{name}" for name in names)]), "--inh-caps", "-all"]


def why_not(before: Sequence[str]) -> str:
    """Why there is no such command here; "" if there is."""
    if os.geteuid() != 0:
        return "only root can start runners as another user"
    if missing := [name for name in ("setpriv", "unshare") if shutil.which(name) is None]:
        return f"the command {missing[0]} (util-linux) is not here"
    done = subprocess.run([*before, "true"], capture_output=True, text=True, timeout=60, check=False)
    return "" if done.returncode == 0 else f"{before[0]} cannot be used here: {done.stderr.strip()}"
