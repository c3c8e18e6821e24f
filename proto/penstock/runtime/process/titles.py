"""Names of processes, for `ps`, `top`, `pgrep` and py-spy.

Every process has a short name (`comm`, 15 bytes). A forked child also has a title in place of the fork server's command
line, such as "penstock-runner lm/0 box 0 slot 1", written over the arguments in its own memory, but never beyond them,
so that the environment stays readable (setproctitle writes over it). A started process keeps its command line. (Tests
check that no secret is there.)"""

from __future__ import annotations

import ctypes
from pathlib import Path

_PR_SET_NAME = 15
COMM_BYTES = 15
_ARG_START = 48
"""Number of the field in /proc/self/stat, from 1, that holds the address of the arguments. Their end follows."""


def name_process(name: str) -> None:
    """Set the short name of this process, and of threads that it starts later. Call this in the main thread. It must
    have no blank: Slurm's proctrack/linuxproc could not find the process, and so not kill it."""
    assert " " not in name
    ctypes.CDLL(None).prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()[:COMM_BYTES]), 0, 0, 0)


def title_process(title: str) -> None:
    """Set what `ps` shows as command line of this process, cut to the length of the present one."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = (int(fields[number - 3]) for number in (_ARG_START, _ARG_START + 1))
    except (OSError, ValueError, IndexError):
        return
    size = end - start
    if start <= 0 or size < 2:
        return
    # The last byte stays NUL: by another one the kernel takes the environment for a part of the title.
    text = title.encode(errors="replace")[: size - 1].decode(errors="ignore").encode()
    ctypes.memmove(start, text.ljust(size, b"\0"), size)
