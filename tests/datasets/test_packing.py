"""Compressions and hashes: round trips, what is broken, and bombs."""

from __future__ import annotations

import contextlib
import hashlib
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash

from penstock.data.cache.file_hashes import digest_of
from penstock.data.formats.compressed_files import COMPRESSIONS, extension_of, pack, unpack
from penstock.proto.errors import DatasetError, InvalidArgumentError, ShardCorruptError

DATA = bytes(range(256)) * 40 + b"water" * 500
NAMES = [*COMPRESSIONS, "br:0", "bz2:1", "gz:0", "zstd:1", "zstd:22"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("data", [b"", b"x", DATA], ids=["nothing", "byte", "much"])
def test_what_was_packed_comes_out(name: str, data: bytes) -> None:
    packed = pack(data, name)
    assert unpack(packed, name, limit=len(data)) == data
    assert unpack(packed, name, limit=len(data) + 1000) == data
    assert pack(data, name) == packed
    assert extension_of(name) == name.partition(":")[0]


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_one_byte_more_than_the_limit_is_refused(name: str) -> None:
    with pytest.raises(ShardCorruptError, match=f"more than the {len(DATA) - 1} bytes"):
        unpack(pack(DATA, name), name, limit=len(DATA) - 1)


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_a_bomb_is_refused_before_it_is_large(name: str) -> None:
    bomb = pack(bytes(64 << 20), name.replace("br", "br:1"))
    tracemalloc.start()
    try:
        with pytest.raises(ShardCorruptError, match="more than the 1000 bytes"):
            unpack(bomb, name, limit=1000)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_every_truncation_is_found(name: str) -> None:
    packed = pack(DATA, name)
    for end in range(0, len(packed), 7):
        with contextlib.suppress(ShardCorruptError):
            assert len(unpack(packed[:end], name, limit=len(DATA))) < len(DATA)


@pytest.mark.parametrize("name", ["br", "gz", "bz2", "snappy", "zstd"])
def test_what_is_something_else_is_found(name: str) -> None:
    with pytest.raises(ShardCorruptError, match=f"the {name} data are damaged"):
        unpack(b"\xff" * 100, name, limit=1 << 20)


@pytest.mark.parametrize("name", ["", "lz4", "zstd:0", "zstd:23", "zstd:", "gz:x", "snappy:1", "br:²", "zstd:3:4"])
def test_a_name_that_means_nothing_is_refused(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match="compression"):
        pack(b"", name)
    with pytest.raises(InvalidArgumentError, match="compression"):
        unpack(b"", name, limit=0)


def test_missing_library_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cramjam", None)
    with pytest.raises(DatasetError, match=r"package cramjam. Run pip install 'penstock\[streaming\]'"):
        unpack(b"", "zstd", limit=0)


HASHLIB = dict.fromkeys(("sha1", "sha256", "md5", "blake2b", "sha3_512"), hashlib.new)
XXHASH = {name: lambda name, data: getattr(xxhash, name)(data) for name in ("xxh32", "xxh64", "xxh128", "xxh3_64")}


@pytest.mark.parametrize(("name", "made"), [*HASHLIB.items(), *XXHASH.items()])
def test_hashes_of_bytes_and_files(name: str, made: Callable[[str, bytes], Any], tmp_path: Path) -> None:
    data, file = DATA * 100, tmp_path / "file"
    file.write_bytes(data)
    assert digest_of(file, name) == digest_of(memoryview(data), name) == made(name, data).hexdigest()


@pytest.mark.parametrize("name", ["", "shake_128", "new", "sha1024"])
def test_an_unknown_hash_lists_the_known(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"the hash algorithm must be one of.*sha256.*xxh64"):
        digest_of(b"", name)
