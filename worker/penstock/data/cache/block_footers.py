"""Footers of files whose blocks (row groups) are fetched one by one. A footer is fetched and parsed once for all blocks
that are read at about the same time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from penstock.data.cache.shard_cache import ShardCache
from penstock.data.formats.parquet.parquet_ranges import FileRange, Footer, footer_shard
from penstock.data.formats.parquet.parquet_shards import ranges_of
from penstock.data.formats.shards import Shard
from penstock.proto.errors import DatasetError, ShardCorruptError

__all__ = ["BlockFooters"]

MOST = 64
"""Largest number of footers that stay in memory."""


class BlockFooters:
    """Parsed footers of a dataset's files, by file. Safe for threads; empty in a copy."""

    def __init__(self) -> None:
        # There is no lock, which a forked child would inherit: two threads that fetch the same footer do no harm.
        self._known: dict[tuple[int, str], Footer] = {}

    def __reduce__(self) -> tuple[Callable[[], BlockFooters], tuple[()]]:
        return BlockFooters, ()

    def place(self, stream: int, cache: ShardCache, file: Shard, block: int, source: str) -> FileRange:
        """Return the position of a block in its file. `stream`: number of the stream; `source`: address of the file,
        for errors. Raises as `ShardCache.hold` does, and ShardCorruptError if the footer does not match the index."""
        key = stream, file.name
        footer = self._known.get(key)
        if footer is None:
            with cache.hold(footer_shard(file)) as held:
                path = held.paths[0]
                tail = path.read_bytes()
            try:
                footer = Footer.parse(tail)
                found = ranges_of(footer.groups, file.ranges[-1])
                if found != file.ranges or file.blocks != tuple(group.rows for group in footer.groups):
                    raise ValueError("its row groups differ from those in the dataset's index")
            except DatasetError:
                raise
            except Exception as error:
                raise ShardCorruptError(
                    f"{source}: the copy of the file's footer, {path}, cannot be read: {error}. Remove the copy to "
                    "fetch the footer again; if that does not help, index the file again"
                ) from error
            self._known[key] = footer
            if len(self._known) > MOST:
                with contextlib.suppress(KeyError, RuntimeError):  # another thread removed it first
                    del self._known[next(iter(self._known))]
        return FileRange(footer, block, file.ranges[2 * block], file.size)
