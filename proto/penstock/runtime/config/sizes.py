"""Parsing of sizes with units, such as 4GiB."""

from __future__ import annotations

import re


def bytes_of(size: str) -> int:
    """Return the bytes of a text such as "4GiB"; 0 for "". Raises ValueError for another text."""
    if not size:
        return 0
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]i?)?B?", size)
    if found is None:
        raise ValueError(f"a size must be a number with a unit, such as 500MiB, 4GiB or 1.5GiB, got {size!r}")
    number, unit = found.groups()
    return int(float(number) * 1024 ** " KMGT".index((unit or " ")[0]))
