"""Small tar archives."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path

__all__ = ["Members", "archive"]

Members = Iterable[tuple[str, bytes]]
"""Names and contents of files."""


def archive(path: Path, members: Members, form: int = tarfile.USTAR_FORMAT) -> None:
    """Write an archive of files, in their order. `form`: format of tarfile."""
    with tarfile.open(path, "w", format=form) as written:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            written.addfile(member, io.BytesIO(data))
