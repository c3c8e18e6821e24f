"""Folders of shards for tests of what stores them: random bytes, with sizes and hashes as an index says them."""

from __future__ import annotations

import json
import random
from pathlib import Path

from penstock.data.cache.file_hashes import digest_of
from penstock.data.formats.compressed_files import extension_of, pack
from penstock.data.formats.shards import Shard, ShardFile, StoredFile

__all__ = ["make_shards", "raw_bytes", "size_of_files"]

HASH = "xxh64"


def raw_bytes(number: int, size: int) -> bytes:
    """Return the bytes of the raw file with a number; they compress to about half."""
    half = random.Random(number).randbytes(size // 2)
    return half + bytes(size - len(half))


def make_shards(
    folder: Path, count: int, size: int, *, compression: str = "", hashes: bool = True, first: int = 0
) -> list[Shard]:
    """Write an index and shards of one file of `size` bytes. Compressed ones lie there only packed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": []}))
    return [_shard(folder, number, size, compression, hashes) for number in range(first, first + count)]


def _shard(folder: Path, number: int, size: int, compression: str, hashes: bool) -> Shard:
    data = raw_bytes(number, size)
    name = f"shard.{number:05}.mds"
    raw = StoredFile(name, size, {HASH: digest_of(data, HASH)} if hashes else {})
    packed = None
    if compression:
        small = pack(data, compression)
        packed_name = f"{name}.{extension_of(compression)}"
        packed = StoredFile(packed_name, len(small), {HASH: digest_of(small, HASH)} if hashes else {})
        (folder / packed_name).write_bytes(small)
    else:
        (folder / name).write_bytes(data)
    return Shard("mds", 1, (ShardFile(raw, packed),), compression)


def size_of_files(folder: Path) -> int:
    """Bytes of all shards' files in a cache's folder, temporary ones too."""
    total = 0
    for path in (*folder.glob("shard.*"), *(folder / ".penstock" / "fetching").glob("*!*")):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            pass
    return total
