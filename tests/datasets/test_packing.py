"""Compressions and hashes: round trips, what is broken, and bombs."""

from __future__ import annotations

import hashlib
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import xxhash

from penstock.data.cache.file_hashes import digest_of
from penstock.data.formats.compressed_files import COMPRESSIONS, extension_of, pack, unpack
from penstock.proto.errors import InvalidArgumentError, ShardCorruptError

DATA = bytes(range(256)) * 40 + b"water" * 500


@pytest.mark.parametrize("name", [*COMPRESSIONS, "br:0", "zstd:22"])
@pytest.mark.parametrize("data", [b"", DATA], ids=["nothing", "much"])
def test_what_was_packed_comes_out(name: str, data: bytes) -> None:
    packed = pack(data, name)
    assert unpack(packed, name, limit=len(data)) == data
    assert unpack(packed, name, limit=len(data) + 1000) == data
    assert pack(data, name) == packed
    assert extension_of(name) == name.partition(":")[0]


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_a_bomb_is_refused_before_it_is_large(name: str) -> None:
    with pytest.raises(ShardCorruptError, match=f"more than the {len(DATA) - 1} bytes"):
        unpack(pack(DATA, name), name, limit=len(DATA) - 1)
    bomb = pack(bytes(16 << 20), name.replace("br", "br:1"))
    tracemalloc.start()
    try:
        with pytest.raises(ShardCorruptError, match="more than the 1000 bytes"):
            unpack(bomb, name, limit=1000)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["br", "gz", "bz2", "snappy", "zstd"])
def test_what_is_something_else_is_found(name: str) -> None:
    with pytest.raises(ShardCorruptError, match=f"the {name} data are damaged"):
        unpack(b"\xff" * 100, name, limit=1 << 20)


@pytest.mark.parametrize("name", ["lz4", "zstd:0", "zstd:23", "gz:x", "snappy:1"])
def test_a_name_that_means_nothing_is_refused(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match="compression"):
        pack(b"", name)
    with pytest.raises(InvalidArgumentError, match="compression"):
        unpack(b"", name, limit=0)


def test_hashes_of_bytes_and_files(tmp_path: Path) -> None:
    data, file = DATA * 100, tmp_path / "file"
    file.write_bytes(data)
    hashes: dict[str, Any] = {"sha1": hashlib.sha1, "sha3_512": hashlib.sha3_512, "xxh64": xxhash.xxh64}
    for name, made in hashes.items():
        assert digest_of(file, name) == digest_of(memoryview(data), name) == made(data).hexdigest()
