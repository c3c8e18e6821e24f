"""What an index knows of a file's content, besides its size, so that another file under its name is noticed:

    footer:DIGEST      of Parquet's footer, which has sizes, offsets and statistics of all columns
    whole:DIGEST       of all bytes, where indexing reads them anyway (JSON lines, CSV)
    pieces:DIGEST      of some pieces from the beginning to the end, for other formats

It is part of a dataset's fingerprint. A footer and pieces are compared when a file is opened; for a whole file, its
file of offsets has a digest of pieces (records/offset_file.py), and `penstock data verify` reads all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import xxhash

from penstock.data.formats.descriptors import Descriptor
from penstock.data.formats.shards import Shard
from penstock.proto.errors import ShardCorruptError
from penstock.runtime.files.plain_files import open_plain

PROBES, PROBE_BYTES = 8, 4096
"""Number and size of the pieces in a digest, which takes about 10 us."""
CHANGED = (
    "Put the indexed file back; or index the folder again, and drop the saved states, which would go on in other data"
)
"""Remedy for a file that is not the one that was indexed."""


def new_whole() -> Any:
    """Return an object with `update`, to be given all bytes of a file, for `whole`."""
    return xxhash.xxh3_128()


def whole(digest: Any) -> str:
    return f"whole:{digest.hexdigest()}"


def of_footer(tail: bytes) -> str:
    return f"footer:{xxhash.xxh3_128_hexdigest(tail)}"


def of_pieces(file: Descriptor, size: int) -> str:
    """Raises OSError."""
    return f"pieces:{pieces_digest(file, size):016x}"


def pieces_digest(file: Descriptor, size: int) -> int:
    """Return the xxh3 checksum of pieces at equal distances, from the file's beginning to its end. Raises OSError."""
    last = max(0, size - PROBE_BYTES)
    digest = xxhash.xxh3_64()
    for place in sorted({last * number // (PROBES - 1) for number in range(PROBES)}):
        digest.update(file.read(PROBE_BYTES, place))
    return digest.intdigest() or 1


def content_now(shard: Shard, path: Path) -> str:
    """Return the digest of a file whose shard has that of `whole`, which reads it; "" for others."""
    if not shard.content.startswith("whole:"):
        return ""
    digest = new_whole()
    with open(path, "rb", opener=open_plain) as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return whole(digest)


def check_content(shard: Shard, found: str, where: object) -> None:
    """Raise ShardCorruptError unless a file has the content that was indexed, or another kind of digest of it. `found`:
    digest of the file, `where`: its path for errors."""
    if shard.content.partition(":")[0] == found.partition(":")[0] and shard.content != found:
        raise ShardCorruptError(f"{where} must be the file that was indexed, got another one. {CHANGED}")
