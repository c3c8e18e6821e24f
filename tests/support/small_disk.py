"""A disk that is soon full."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

__all__ = ["fill", "small_disk_at"]


@contextmanager
def small_disk_at(disk: Path, size: int) -> Iterator[Path]:
    """A filesystem of its own of so many bytes at a new folder; skips the test where none may be mounted."""
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "penstock-test", str(disk)]
    mounted = subprocess.run(command, capture_output=True)
    if mounted.returncode:
        pytest.skip(f"a filesystem of its own needs mount(2): {mounted.stderr.decode().strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


def fill(disk: Path, left: int = 0) -> Path:
    """Fill the disk completely, or up to so many bytes; the file that fills it."""
    ballast = disk / f"ballast {left}"
    with open(ballast, "wb", buffering=0) as file:
        try:
            while left < (free := os.statvfs(disk)).f_bavail * free.f_frsize:
                file.write(bytes(4096))
        except OSError:
            pass
    return ballast
