"""Assignment of a rank's items (tensors, parts of tensors, objects) to files: pure arithmetic over names and sizes.

Tensors are assigned in order of size, the largest first, each to the file with the fewest bytes so far. So files have
nearly equal lengths, and the threads, each of which writes one file, finish together. (The longest is at most 4/3 of
the best possible: R. L. Graham, "Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math. 17, 1969.) Objects go
into the files in turn, because they are small.
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
    """Item, the unit of saving: a tensor, a part of a tensor, or an object."""

    name: str
    nbytes: int | None
    """Number of bytes of the tensor or its part; None for an object, whose size does not decide its file."""


@dataclass(frozen=True)
class Bucket:
    """File of a rank, and the items in it."""

    name: str
    items: tuple[int, ...]
    """Indexes of the file's items in the list given to `assign`: tensors, the largest first, then objects."""


def assign(items: Sequence[Item], prefix: str, buckets: int, hint: str | None = None) -> list[Bucket]:
    """Return the files for `items`. No file is empty.

    Args:
        prefix: beginning of the file names, which differs from rank to rank: "__0_".
        buckets: largest number of files for items whose names begin with `hint`, and also for all other items.
        hint: prefix of names. Items whose names begin with this prefix go into separate files; None: all items share
            the files.
    """
    matching = [index for index, item in enumerate(items) if hint and item.name.startswith(hint)]
    others = sorted(set(range(len(items))) - set(matching))
    own = re.sub(r"[^A-Za-z0-9_-]", "_", hint or "")[:100]  # the length of file names is limited
    return _split(items, others, prefix, buckets) + _split(items, matching, f"{own}{prefix}", buckets)


def _split(items: Sequence[Item], indexes: Sequence[int], prefix: str, buckets: int) -> list[Bucket]:
    contents: list[list[int]] = [[] for _ in range(buckets)]
    tensors = [(nbytes, index) for index in indexes if (nbytes := items[index].nbytes) is not None]
    emptiest = [(0, number) for number in range(buckets)]
    for nbytes, index in sorted(tensors, key=lambda one: (-one[0], one[1])):
        load, number = heapq.heappop(emptiest)
        contents[number].append(index)
        heapq.heappush(emptiest, (load + nbytes, number))
    objects = [index for index in indexes if items[index].nbytes is None]
    for turn, index in enumerate(objects):
        contents[turn % buckets].append(index)
    filled = [content for content in contents if content]
    return [Bucket(f"{prefix}{number}{SUFFIX}", tuple(content)) for number, content in enumerate(filled)]
