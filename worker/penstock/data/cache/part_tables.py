"""Tables of contents of files whose parts are fetched one by one. The table of a file says where each part lies: it is
a footer, a header, or a list of offsets. It is fetched and read once, and then serves for many parts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from penstock.data.cache.shard_cache import ShardCache
from penstock.data.formats.format_table import FORMATS
from penstock.data.formats.shards import Shard
from penstock.proto.errors import DatasetError, ShardCorruptError

__all__ = ["PartTables"]

MOST = 64
"""Largest number of tables of one dataset that stay in memory."""


class PartTables:
    """Tables (footers, headers or offsets) of a dataset's files whose parts are fetched one by one. Any thread may call
    its methods. A pickled copy starts empty."""

    def __init__(self) -> None:
        # There is no lock, which a forked child would inherit: two threads that fetch the same table do no harm.
        self._known: dict[tuple[int, str], Any] = {}

    def __reduce__(self) -> tuple[Callable[[], PartTables], tuple[()]]:
        return PartTables, ()

    def of(self, stream: int, cache: ShardCache, file: Shard, source: str) -> Any:
        """Return the table of a file: its footer, header or offsets, which say where its parts lie.

        stream: number of the dataset's stream. source: address of the file, for errors. Raises as `ShardCache.hold`
        does, and ShardCorruptError if the table cannot be read or does not match the index.
        """
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
                        f"{source}: the cached copy of the file's table (its footer, header or offsets), {path}, "
                        f"cannot be read: {error}. Remove the copy to fetch the table again; if that does not help, "
                        "index the file again"
                    ) from error
            self._known[key] = table
            if len(self._known) > MOST:
                with contextlib.suppress(KeyError, RuntimeError):  # another thread removed it first
                    del self._known[next(iter(self._known))]
        return table
