"""Compressions and hashes: round trips, what is broken, and bombs."""

from __future__ import annotations

import bz2
import hashlib
import sys
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash
import zstandard

from penstock.data.cache.file_hashes import digest_of
from penstock.data.formats import compressed_files
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
    with pytest.raises(ShardCorruptError, match=f"at most {len(DATA) - 1} bytes"):
        unpack(pack(DATA, name), name, limit=len(DATA) - 1)


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_a_bomb_is_refused_before_it_is_large(name: str) -> None:
    bomb = pack(bytes(64 << 20), name.replace("br", "br:1"))
    tracemalloc.start()
    try:
        with pytest.raises(ShardCorruptError, match="at most 1000 bytes"):
            unpack(bomb, name, limit=1000)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_bomb_of_unknown_length_is_refused() -> None:
    bomb = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(64 << 20))
    with pytest.raises(ShardCorruptError, match="at most 1000 bytes"):
        unpack(bomb, "zstd", limit=1000)


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_every_truncation_is_found(name: str) -> None:
    packed = pack(DATA, name)
    for end in range(0, len(packed), 7):
        with pytest.raises(ShardCorruptError, match=name):
            unpack(packed[:end], name, limit=len(DATA))


@pytest.mark.parametrize("name", ["br", "gz", "bz2", "snappy", "zstd"])
def test_what_is_something_else_is_found(name: str) -> None:
    with pytest.raises(ShardCorruptError, match=f"the {name} data are damaged"):
        unpack(b"\xff" * 100, name, limit=1 << 20)


def test_zstd_without_length_is_whole_or_refused() -> None:
    packed = zstandard.ZstdCompressor(write_content_size=False).compress(DATA)
    assert unpack(packed, "zstd", limit=len(DATA)) == DATA
    for damaged in (packed[:-1], packed + b"x", packed + bytes(5000)):
        with pytest.raises(ShardCorruptError, match="zstd"):
            unpack(damaged, "zstd", limit=len(DATA))


@pytest.mark.parametrize("name", ["gz", "bz2"])
def test_several_members_are_one_file(name: str) -> None:
    packed = pack(b"one ", name) + pack(b"two", name)
    assert unpack(packed, name, limit=7) == b"one two"
    with pytest.raises(ShardCorruptError, match="at most 6 bytes"):
        unpack(packed, name, limit=6)


@pytest.mark.parametrize("make", [lambda: zlib.decompressobj(31), bz2.BZ2Decompressor])
def test_empty_members_cost_what_they_weigh(make: Callable[[], Any]) -> None:
    """Copy few bytes for each empty member. The rest of the data after a member is copied, and once each member copied
    all the others."""
    copied = 0

    class Counted:
        def __init__(self) -> None:
            self.inner = make()

        @property
        def eof(self) -> bool:
            return bool(self.inner.eof)

        @property
        def unused_data(self) -> bytes:
            nonlocal copied
            copied += len(self.inner.unused_data)
            return bytes(self.inner.unused_data)

        def decompress(self, data: bytes | memoryview, max_length: int, /) -> bytes:
            return bytes(self.inner.decompress(data, max_length))

    family = "gz" if make is not bz2.BZ2Decompressor else "bz2"
    one = pack(b"", family)
    assert (
        compressed_files._members(family, Counted, one * 3000 + bytes(5) + pack(b"end", family) + bytes(2000), 3)
        == b"end"
    )
    assert copied <= 3002 * compressed_files.FIRST_PIECE


@pytest.mark.parametrize("name", ["", "lz4", "zstd:0", "zstd:23", "zstd:", "gz:x", "snappy:1", "br:²", "zstd:3:4"])
def test_a_name_that_means_nothing_is_refused(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match="compression"):
        pack(b"", name)
    with pytest.raises(InvalidArgumentError, match="compression"):
        unpack(b"", name, limit=0)


@pytest.mark.parametrize(("name", "package"), [("zstd", "zstandard"), ("br", "brotli"), ("snappy", "cramjam")])
def test_missing_library_names_the_remedy(name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DatasetError, match=rf"package {package}. Run pip install 'penstock\[streaming\]'"):
        unpack(pack(b"", "gz"), name, limit=0)


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
