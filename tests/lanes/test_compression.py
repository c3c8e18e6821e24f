"""Packing and unpacking one payload: to the bit, within its declared length, and not where it does not pay."""

from __future__ import annotations

import itertools
import random
import struct

import pytest
import zstandard
from tests.lanes.conftest import unpacked

from penstock.proto.errors import ProtocolError
from penstock.proto.lane.compression import (
    ENOUGH,
    MOST_SKIPPED,
    NAMES,
    PIECE,
    SMALLEST,
    Codec,
    Packer,
    check_claim,
    load,
)
from penstock.proto.v1 import lane_pb2

CODECS = sorted(NAMES.values())


def codec_of(number: int) -> Codec:
    codec = load(number)
    assert codec is not None
    return codec


def tokens(size: int) -> bytes:
    data = bytearray(size)
    data[::8] = random.Random(0).randbytes((size + 7) // 8)
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
@pytest.mark.parametrize("size", [SMALLEST, PIECE, PIECE + 1, 8 << 20])
def test_there_and_back(number: int, size: int) -> None:
    data = tokens(size)
    wire = packed(number, data)
    assert wire is not None
    assert unpacked(number, wire, size) == data


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


LARGE = zstandard.compress(bytes(5_000_000))


def table(*lengths: int) -> bytes:
    return struct.pack(f"<{len(lengths)}I", *lengths)


@pytest.mark.parametrize(
    ("number", "size", "data", "says"),
    [
        (lane_pb2.LZ4, 5000, table(99) + b"x" * 100, "must have 100 bytes together, got 99"),
        (lane_pb2.LZ4, 2 * PIECE, table(0, 100) + b"x" * 100, "must have 100 bytes together"),
        (lane_pb2.LZ4, PIECE + 10, table(50, 11) + b"x" * 61, "must not be larger than before compression"),
        (lane_pb2.LZ4, 5000, table(100) + b"\xff" * 100, "lz4 cannot decompress"),
        (lane_pb2.ZSTD, 5000, table(100) + b"\xff" * 100, "zstd cannot decompress"),
        (lane_pb2.ZSTD, 5000, table(len(LARGE)) + LARGE, "its zstd frame says 5000000"),
    ],
)
def test_a_payload_that_cannot_be(number: int, size: int, data: bytes, says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        unpacked(number, data, size)
