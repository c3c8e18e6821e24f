"""Open shards of a dataset, which all threads share. The least recently used shards are closed when too many are open.

The second-chance algorithm chooses the shard to close: the oldest one that was not used since the algorithm last
considered it. A look-up happens for each sample; it only sets a flag and takes no lock.

To close a shard here means to drop this module's reference to it. A thread that reads the shard has its own reference,
so the file is closed after that thread has finished.
"""

from __future__ import annotations

import os
import resource
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Container

from penstock.data.cache.shard_cache import HeldShard
from penstock.data.formats.shards import ShardReader

__all__ = ["MIN_OPEN", "OpenShards"]

MIN_OPEN = 64
"""Smallest number of shards that may be open before shards are closed, if the limit of file descriptors allows this
number. A dataset raises it to the number of shards that it needs soon."""


class _Open:
    __slots__ = ("held", "reader", "used")

    def __init__(self, held: HeldShard, reader: ShardReader) -> None:
        self.held, self.reader, self.used = held, reader, True


class OpenShards:
    """Open shards of a dataset, by the numbers of their opened pieces (opened_units.py). Any thread may call its
    methods. A forked child starts with none."""

    def __init__(self) -> None:
        self.most = MIN_OPEN
        self._reset()
        _all.add(self)

    def _reset(self) -> None:
        # Reentrant: garbage collection of a dataset, which closes its shards, may run in the thread that holds this
        # lock.
        self._lock = threading.RLock()
        self._open: OrderedDict[int, _Open] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def get(self, number: int, opened: Callable[[int], tuple[HeldShard, ShardReader]]) -> ShardReader:
        """Return the reader of a shard; open the shard with `opened`, given its number, if it is not open. Other
        threads can look up shards meanwhile."""
        found = self._open.get(number)
        if found is None:
            found = self._add(number, _Open(*opened(number)))
        found.used = True
        return found.reader

    def peek(self, number: int) -> ShardReader | None:
        """Return the reader of a shard if it is open; None otherwise. The call does not count as a use of the shard."""
        found = self._open.get(number)
        return found.reader if found else None

    def _add(self, number: int, new: _Open) -> _Open:
        with self._lock:
            found = self._open.setdefault(number, new)
            surplus = [] if found is new else [new]  # another thread opened the shard first
            while len(self._open) > min(self.most, _descriptors() // 4):
                oldest, shard = self._open.popitem(last=False)
                if shard.used:
                    shard.used = False
                    self._open[oldest] = shard
                else:
                    surplus.append(shard)
        for shard in surplus:
            shard.held.release()
        return found

    def keep(self, numbers: Container[int]) -> None:
        """Close all shards except those of these numbers, so that the cache may evict the closed ones."""
        with self._lock:
            dropped = [self._open.pop(number) for number in tuple(self._open) if number not in numbers]
        for shard in dropped:
            shard.held.release()

    def clear(self) -> None:
        with self._lock:
            shards, self._open = self._open, OrderedDict()
        for shard in shards.values():
            shard.held.release()


def _descriptors() -> int:
    """Return the largest number of file descriptors that this process may have open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


_all: weakref.WeakSet[OpenShards] = weakref.WeakSet()


def _forked() -> None:
    for shards in list(_all):
        shards._reset()


os.register_at_fork(after_in_child=_forked)
