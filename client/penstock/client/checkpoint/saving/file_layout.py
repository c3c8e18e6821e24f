"""Which file each thing that a rank saves goes into: pure arithmetic over names and sizes.

Tensors by size, the largest first, each into the file that has least so far: so files end up of one length, and threads
that write one each are done together. (Largest first into the emptiest is at most 4/3 of the best possible: R. L.
Graham, "Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math. 17, 1969.) Objects in turn, for they are
small.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Bucket", "Item", "assign"]

SUFFIX = ".distcp"


class Item(NamedTuple):
    """Something to be saved."""

    name: str
    nbytes: int | None
    """Of a tensor's part that is saved here; None for an object, whose size nobody plans with."""


@dataclass(frozen=True)
class Bucket:
    """A file."""

    name: str
    items: tuple[int, ...]
    """Places in the list of items: tensors, the largest first, and then objects."""


def assign(items: Sequence[Item], prefix: str, buckets: int, hint: str | None = None) -> list[Bucket]:
    """The files for `items`; none is empty.

    Args:
        prefix: the file names' beginning, which differs from rank to rank: "__0_".
        buckets: files at most, for each side of the hint.
        hint: what has a name that begins with this goes into files of its own.
    """
    matching = [place for place, item in enumerate(items) if hint and item.name.startswith(hint)]
    others = sorted(set(range(len(items))) - set(matching))
    own = re.sub(r"[^A-Za-z0-9_-]", "_", hint or "")[:100]  # names of files have an end
    return _split(items, others, prefix, buckets) + _split(items, matching, f"{own}{prefix}", buckets)


def _split(items: Sequence[Item], places: Sequence[int], prefix: str, buckets: int) -> list[Bucket]:
    contents: list[list[int]] = [[] for _ in range(buckets)]
    tensors = [(nbytes, place) for place in places if (nbytes := items[place].nbytes) is not None]
    emptiest = [(0, number) for number in range(buckets)]
    for nbytes, place in sorted(tensors, key=lambda one: (-one[0], one[1])):
        load, number = heapq.heappop(emptiest)
        contents[number].append(place)
        heapq.heappush(emptiest, (load + nbytes, number))
    objects = [place for place in places if items[place].nbytes is None]
    for turn, place in enumerate(objects):
        contents[turn % buckets].append(place)
    filled = [content for content in contents if content]
    return [Bucket(f"{prefix}{number}{SUFFIX}", tuple(content)) for number, content in enumerate(filled)]
