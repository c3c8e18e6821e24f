"""Folders held by an open descriptor, so that operations stay inside even if another user renames them and puts a link
in their place: by name they would then write or delete files where the link leads."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Self


class HeldFolder:
    """Raises OSError if the name leads to a link or a file."""

    def __init__(self, name: Path) -> None:
        self.name = name
        try:
            self._fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except NotADirectoryError:
            raise OSError(errno.ENOTDIR, "the path must be a folder, got a link or a file", str(name)) from None
        self.path = Path(f"/proc/self/fd/{self._fd}")
        """Path through the descriptor, for functions that take paths. It stays valid if the folder is renamed."""

    def is_at(self, name: Path) -> bool:
        try:
            found = os.lstat(name)
        except OSError:
            return False
        return os.path.samestat(found, os.fstat(self._fd))

    def named(self, text: str) -> str:
        """Replace the path through the descriptor by the folder's name, in a text for people."""
        return text.replace(str(self.path), str(self.name))

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
