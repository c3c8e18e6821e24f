"""Files of offsets (penstock.data.formats.records.offset_file) as the tests need them."""

from __future__ import annotations

from pathlib import Path

from penstock.data.formats.records.offset_file import ENDING


def forget_fingerprints(folder: Path) -> None:
    """Take the fingerprints out of a folder's files of offsets, which then fit any file of the same size: as those of a
    remote archive that was not read. What the reader checks besides then shows."""
    for path in folder.rglob(f"*{ENDING}"):
        data = path.read_bytes()
        path.write_bytes(data[:24] + bytes(8) + data[32:])
