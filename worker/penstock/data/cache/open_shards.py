"""Open shards of a dataset, which all threads share. The second-chance algorithm chooses which to close when too many
are open: the oldest that was not used since it was last considered. So the look-up for each sample only sets a flag,
without a lock. To close is to drop a reference: a thread that still reads the shard has its own."""

from __future__ import annotations

import contextlib
import os
import resource
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Container
from typing import Any

from penstock.data.cache.shard_cache import HeldShard, ShardCache
from penstock.data.formats.format_table import FORMATS
from penstock.data.formats.shards import Shard, ShardReader
from penstock.proto.errors import DatasetError, ShardCorruptError

MIN_OPEN = 64
"""Number of shards that may always be open, if the limit of file descriptors allows. A dataset raises it as needed."""

MOST_TABLES = 64
"""Most tables of one dataset that stay in memory."""


class _Open:
    __slots__ = ("held", "reader", "used")

    def __init__(self, held: HeldShard, reader: ShardReader) -> None:
        self.held, self.reader, self.used = held, reader, True


class OpenShards:
    """Open shards by the numbers of opened pieces (opened_units.py). A forked child starts with none."""

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
        """Return a shard's reader; open it with `opened` if needed, while other threads can look up shards."""
        found = self._open.get(number)
        if found is None:
            found = self._add(number, _Open(*opened(number)))
        found.used = True
        return found.reader

    def peek(self, number: int) -> ShardReader | None:
        """Return a shard's reader if it is open. This does not count as a use."""
        found = self._open.get(number)
        return found.reader if found else None

    def _add(self, number: int, new: _Open) -> _Open:
        with self._lock:
            found = self._open.setdefault(number, new)
            surplus = [] if found is new else [new]  # another thread opened the shard first
            while len(self._open) > min(self.most, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4):
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
        """Close all other shards, so that the cache may evict them."""
        with self._lock:
            dropped = [self._open.pop(number) for number in tuple(self._open) if number not in numbers]
        for shard in dropped:
            shard.held.release()

    def clear(self) -> None:
        with self._lock:
            shards, self._open = self._open, OrderedDict()
        for shard in shards.values():
            shard.held.release()


_all: weakref.WeakSet[OpenShards] = weakref.WeakSet()


def _forked() -> None:
    for shards in list(_all):
        shards._reset()


os.register_at_fork(after_in_child=_forked)


class PartTables:
    """Tables of the files whose parts are fetched one by one, for any thread. A pickled copy starts empty."""

    def __init__(self) -> None:
        # There is no lock, which a forked child would inherit: two threads that fetch the same table do no harm.
        self._known: dict[tuple[int, str], Any] = {}

    def __reduce__(self) -> tuple[Callable[[], PartTables], tuple[()]]:
        return PartTables, ()

    def of(self, stream: int, cache: ShardCache, file: Shard, source: str) -> Any:
        """Return the file's footer, header or offsets, which say where its parts lie. `source`: for errors. Raises as
        `ShardCache.hold`, and ShardCorruptError for a table that cannot be read or does not match the index."""
        key = stream, file.name
        table = self._known.get(key)
        if table is None:
            by_part = FORMATS[file.format].by_part
            assert by_part is not None
            with cache.hold(by_part.table(file)) as held:
                path = held.paths[0]
                try:
                    table = by_part.read(file, path)
                except ShardCorruptError as error:
                    raise ShardCorruptError(f"{source}: {error.message}") from error
                except DatasetError:
                    raise
                except Exception as error:
                    raise ShardCorruptError(
                        f"{source}: its cached table {path} cannot be read: {error}. Remove it to have it fetched again"
                    ) from error
            self._known[key] = table
            if len(self._known) > MOST_TABLES:
                with contextlib.suppress(KeyError, RuntimeError):  # another thread removed it first
                    del self._known[next(iter(self._known))]
        return table
