"""ETags or times of remote files, which an index made at the remote has, so that a file that was written again since is
noticed when it is fetched. A text begins with a digest of the file's address: elsewhere, the same file has others."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import xxhash

from penstock.data.formats.contents import CHANGED
from penstock.data.formats.shards import Shard, StoredFile
from penstock.data.remote.folders import RemoteFolder
from penstock.proto.errors import DatasetError, PenstockError

REQUESTS = 16
"""Files that are asked for at the same time."""
ANSWER_S = 10.0
"""Longest wait in seconds for the version of a file that was fetched."""


def with_versions(shards: Sequence[Shard], remote: RemoteFolder, timeout_s: float) -> list[Shard]:
    """Return the shards with the version of each one's first file, if the remote reports it."""

    def seen(shard: Shard) -> Shard:
        first, *others = shard.files
        raw = replace(first.raw, version=_version(remote, first.raw.name, timeout_s))
        return replace(shard, files=(replace(first, raw=raw), *others))

    with ThreadPoolExecutor(REQUESTS) as threads:
        return list(threads.map(seen, shards))


def is_unchanged(remote: RemoteFolder, stored: StoredFile, timeout_s: float) -> bool:
    """Return True if a fetched file, or that of which a range was fetched, has the version that it was indexed with;
    False if it is not known. Raises DatasetError for another version."""
    name = stored.source or stored.name
    if not stored.version.startswith(_address(remote, name)):
        return False
    now = _version(remote, name, min(timeout_s, ANSWER_S))
    if now not in ("", stored.version):
        raise DatasetError(f"{remote.url_of(name)} was written again since it was indexed. {CHANGED}")
    return bool(now)


def _version(remote: RemoteFolder, name: str, timeout_s: float) -> str:
    try:
        version = remote.version(name, deadline_s=timeout_s, of_content=True)
    except PenstockError:
        raise
    except Exception:  # a server that tells nothing
        version = None
    return f"{_address(remote, name)}{version}" if version else ""


def _address(remote: RemoteFolder, name: str) -> str:
    return f"{xxhash.xxh3_64_hexdigest(remote.url_of(name).encode())} "
