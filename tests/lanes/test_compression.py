"""Packing and unpacking one payload: to the bit, within its declared length, and not where it does not pay."""

from __future__ import annotations

import itertools
import random
import struct
import sys
import tracemalloc
from collections.abc import Callable

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from lz4 import block
from tests.lanes.conftest import unpacked

from penstock.proto.errors import InvalidArgumentError, ProtocolError
from penstock.proto.lane.compression import (
    ENOUGH,
    MOST_SKIPPED,
    NAMES,
    PIECE,
    SMALLEST,
    Codec,
    Packer,
    Unpacker,
    check_claim,
    load,
    require,
)
from penstock.proto.v1 import lane_pb2

CODECS = sorted(NAMES.values())


def codec_of(number: int) -> Codec:
    codec = load(number)
    assert codec is not None
    return codec


def tokens(size: int, seed: int = 0) -> bytes:
    data = bytearray(size)
    data[::8] = random.Random(seed).randbytes((size + 7) // 8)
    return bytes(data)


def packed(number: int, data: bytes) -> bytes | None:
    found = Packer(codec_of(number)).pack(memoryview(data))
    if found is None:
        return None
    wire, buffers = found
    joined = b"".join(buffers)
    assert len(joined) == wire <= ENOUGH * len(data)
    check_claim(wire, len(data))
    return joined


# ---- there and back


@pytest.mark.parametrize("number", CODECS)
@pytest.mark.parametrize("size", [SMALLEST, 4097, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, 8 << 20])
def test_there_and_back(number: int, size: int) -> None:
    data = tokens(size)
    wire = packed(number, data)
    assert wire is not None
    assert unpacked(number, wire, size) == data


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(CODECS),
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 200_000)), max_size=6),
    st.integers(0, 1 << 32),
)
def test_any_mixture_comes_back(number: int, parts: list[tuple[int, int]], seed: int) -> None:
    rng = random.Random(seed)
    make: list[Callable[[int], bytes]] = [
        rng.randbytes,
        bytes,
        lambda size: tokens(size, seed),
        lambda size: rng.randbytes(size // 9 + 1) * 9,
    ]
    data = b"".join(make[kind](size) for kind, size in parts)
    wire = packed(number, data)
    if wire is not None:
        assert unpacked(number, wire, len(data)) == data


@pytest.mark.parametrize("number", CODECS)
def test_incompressible_piece_is_sent_in_place(number: int) -> None:
    data = memoryview(tokens(PIECE) + random.Random(1).randbytes(PIECE) + tokens(3 * PIECE))
    found = Packer(codec_of(number)).pack(data)
    assert found is not None
    table, _, raw, *_ = found[1]
    assert isinstance(raw, memoryview)
    assert raw == data[PIECE : 2 * PIECE]
    assert struct.unpack_from("<5I", table)[1] == PIECE
    assert unpacked(number, b"".join(found[1]), len(data)) == data


# ---- what does not pay


@pytest.mark.parametrize("number", CODECS)
def test_small_batches_are_never_tried(number: int) -> None:
    packer = Packer(codec_of(number))
    assert packer.pack(memoryview(bytes(SMALLEST - 1))) is None
    assert packer.pack(memoryview(b"")) is None
    assert packer.pack(memoryview(bytes(SMALLEST))) is not None, "and they say nothing about larger ones"


def test_incompressible_stream_is_tried_rarely() -> None:
    tried: list[int] = []
    real = codec_of(lane_pb2.LZ4)

    def compress(piece: bytes | bytearray | memoryview) -> bytes:
        tried.append(batches)
        return real.compress(piece)

    batches = 0
    packer = Packer(Codec("lz4", lane_pb2.LZ4, compress, real.decompress))
    noise = memoryview(random.Random(0).randbytes(SMALLEST))
    for batches in range(400):  # noqa: B007  # read by compress
        assert packer.pack(noise) is None
    gaps = [after - before - 1 for before, after in itertools.pairwise(tried)]
    assert tried[0] == 0
    assert gaps == [1, 2, 4, 8, 16, 32, 64, 64, 64, 64, 64]
    # What shrinks is found out at the next try, and all of it is compressed from there on.
    sizes = [packer.pack(memoryview(bytes(SMALLEST))) for _ in range(2 * MOST_SKIPPED)]
    first = next(index for index, size in enumerate(sizes) if size is not None)
    assert first <= MOST_SKIPPED
    assert None not in sizes[first:]
    tried.clear()
    for batches in range(3):  # noqa: B007
        packer.pack(noise)
    assert tried == [0, 2], "one that shrank has started it over"


# ---- what cannot be


@pytest.mark.parametrize(("wire", "size"), [(0, 5000), (4, 5000), (5000, 5000), (5001, 5000), (1 << 63, 5000), (1, 0)])
def test_a_length_that_cannot_be(wire: int, size: int) -> None:
    with pytest.raises(ProtocolError, match="when compressed"):
        check_claim(wire, size)


def table(*lengths: int) -> bytes:
    return struct.pack(f"<{len(lengths)}I", *lengths)


LONG_WINDOW = bytes.fromhex("28b52ffd 80 88") + struct.pack("<I", PIECE) + b"\x40\x1f\x00"
"""A zstd frame that asks for a window of 128 MiB."""


@pytest.mark.parametrize(
    ("number", "size", "data", "says"),
    [
        (lane_pb2.LZ4, 5000, table(99) + b"x" * 100, "must have 100 bytes together, got 99"),
        (lane_pb2.LZ4, 5000, table(1 << 31) + b"x" * 100, "must have 100 bytes together"),
        (lane_pb2.LZ4, 2 * PIECE, table(0, 100) + b"x" * 100, "must have 100 bytes together"),
        (lane_pb2.LZ4, PIECE + 10, table(50, 11) + b"x" * 61, "must not be larger than before compression"),
        (
            lane_pb2.LZ4,
            PIECE + 5000,
            table(PIECE + 1, 1) + b"x" * (PIECE + 2),
            "must not be larger than before compression",
        ),
        (lane_pb2.LZ4, 5000, table(100) + b"\xff" * 100, "lz4 cannot decompress"),
        (lane_pb2.ZSTD, 5000, table(100) + b"\xff" * 100, "zstd cannot decompress"),
        (lane_pb2.ZSTD, PIECE, table(len(LONG_WINDOW)) + LONG_WINDOW, "zstd cannot decompress .*memory"),
        (lane_pb2.ZSTD, 5000, table(4) + b"\x28\xb5\x2f\xfd", "zstd cannot decompress"),
    ],
)
def test_a_payload_that_cannot_be(number: int, size: int, data: bytes, says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        unpacked(number, data, size)


@pytest.mark.parametrize("number", CODECS)
@pytest.mark.parametrize("real", [0, 1, 4999, 5001, 200_000, 50_000_000])
def test_bombs_and_their_opposite(number: int, real: int) -> None:
    """A piece that becomes more or less than the batch, whatever it says of itself, costs no memory but the batch's."""
    content = bytes(real)
    bare = zstandard.ZstdCompressor(write_content_size=False).compress(content)
    lies = bytes.fromhex("28b52ffd a0") + struct.pack("<I", 5000) + bare[6:]
    frames = [zstandard.ZstdCompressor().compress(content), bare, lies]
    frames += [frames[0] + zstandard.ZstdCompressor().compress(bytes(5000)), zstandard.compress(bytes(5000)) * 2]
    made = frames if number == lane_pb2.ZSTD else [block.compress(content, store_size=False)]
    unpacker = Unpacker(codec_of(number))
    for piece in made:
        slot = memoryview(bytearray(5000))
        target = unpacker.begin(slot, 4 + len(piece))
        target[:] = table(len(piece))
        if len(piece) > 5000:
            with pytest.raises(ProtocolError):
                unpacker.step()
            continue
        filled = unpacker.step()
        assert filled is not None
        filled[:] = piece
        tracemalloc.start()
        try:
            with pytest.raises(ProtocolError):
                unpacker.step()
            assert tracemalloc.get_traced_memory()[1] < 50_000
        finally:
            tracemalloc.stop()


# ---- packages


@pytest.mark.parametrize(("name", "package"), [("lz4", "lz4"), ("zstd", "zstandard")])
def test_missing_package_is_named_with_remedy(monkeypatch: pytest.MonkeyPatch, name: str, package: str) -> None:
    require.cache_clear()
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InvalidArgumentError, match=r"pip install 'penstock\[compression\]'"):
        require(name)
    monkeypatch.undo()
    assert require(name) == NAMES[name], "it was not remembered as missing"


def test_unknown_name_is_refused_with_choices() -> None:
    with pytest.raises(InvalidArgumentError, match="must be one of 'lz4', 'zstd' or None, got 'gzip'"):
        require("gzip")
