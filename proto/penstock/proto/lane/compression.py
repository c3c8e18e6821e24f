"""Compression of batches on the TCP lane by lz4 or zstd, from sender to receiver, if the consumer requests it.

The format is in lane.proto: a table of compressed lengths, then the compressed pieces of PIECE bytes each. With pieces,
memory is bounded, lengths are checked before decompression, a piece is still in the cache when it is copied into the
ring, and decompression runs while the rest arrives. 256 KiB compress as well as 8 MiB.

Batches below SMALLEST, and batches and pieces that do not shrink to ENOUGH, are sent uncompressed. After each failure
in a row the sender skips twice as many batches without a try, up to MOST_SKIPPED.

A piece is copied before it is compressed (at 20 GB/s), because user code can write into the ring at any time, and
compressors may write outside their memory if their input changes meanwhile.

Both packages are optional (the extra `compression`), imported only when requested, and release the interpreter lock."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

from penstock.proto.errors import InvalidArgumentError, ProtocolError, malformed
from penstock.proto.v1 import lane_pb2

Buffer = bytes | bytearray | memoryview

PIECE = 256 << 10
"""Bytes of each piece before compression. The number is part of the protocol."""
SMALLEST = 2 << 10
"""Smallest batch in bytes that is compressed, where it saves more time at 1 Gbit/s than it costs (measured with token
ids, benchmarks/compression.md): 2 KiB by lz4 cost 4.5 us and save 6.9, by zstd 9.6 and 11.3; 1 KiB by zstd 7.4, 5.5."""
ENOUGH = 7 / 8
"""Largest share of its original size that a compressed batch or piece may have. Noisy float32 images decided the value:
zstd saves 12 % of them at 1.2 GB/s, which pays only on networks below 1 Gbit/s, and little there."""
MOST_SKIPPED = 64
"""Largest number of batches that are sent uncompressed between two tries to compress one."""
ZSTD_LEVEL = 1
"""Level of zstd. For token ids 1 is the best of three: 605 MB/s at a ratio of 4.0; level 2 438 MB/s at 3.5, level 3 386
MB/s at 3.3. Level 5 makes quantised images a quarter smaller, at a third of the speed (benchmarks/compression.md)."""

NAMES: dict[str, int] = {"lz4": lane_pb2.LZ4, "zstd": lane_pb2.ZSTD}


@dataclass(frozen=True)
class Codec:
    name: str
    number: int
    compress: Callable[[Buffer], bytes]
    decompress: Callable[[Buffer, int], bytes]
    """Called with the compressed bytes and the number of bytes that they must make, and allocates no more. Raises
    ProtocolError without a remedy; the receiver adds it."""


def _lz4() -> Codec:
    from lz4 import block

    def compress(piece: Buffer) -> bytes:
        # Faster modes gain nothing: pieces that do not compress are fast already.
        return bytes(block.compress(piece, store_size=False))

    def decompress(packed: Buffer, size: int) -> bytes:
        try:
            return bytes(block.decompress(packed, uncompressed_size=size))
        except block.LZ4BlockError as error:
            raise ProtocolError(f"lz4 cannot decompress a piece of a batch into {size} bytes: {error}") from error

    return Codec("lz4", lane_pb2.LZ4, compress, decompress)


def _zstd() -> Codec:
    import zstandard

    compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL)
    decompressor = zstandard.ZstdDecompressor(max_window_size=PIECE)

    def decompress(packed: Buffer, size: int) -> bytes:
        try:
            # -1 for a frame without its length. A frame with a wrong length fails below.
            claimed = zstandard.frame_content_size(packed)
            if claimed != size:
                raise ProtocolError(f"a compressed piece must make {size} bytes, but its zstd frame says {claimed}")
            return decompressor.decompress(packed, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise ProtocolError(f"zstd cannot decompress a piece of a batch into {size} bytes: {error}") from error

    return Codec("zstd", lane_pb2.ZSTD, compressor.compress, decompress)


_MAKERS = {lane_pb2.LZ4: _lz4, lane_pb2.ZSTD: _zstd}


def load(number: int) -> Codec | None:
    """Return a codec for one lane in one thread. None if the number is unknown, or its package is not installed."""
    maker = _MAKERS.get(number)  # type: ignore[call-overload]  # a peer may name any number
    try:
        return None if maker is None else maker()
    except ImportError:
        return None


def first_of(numbers: Iterable[int]) -> Codec | None:
    return next((codec for codec in map(load, numbers) if codec is not None), None)


@cache
def require(name: str) -> int:
    """Raises InvalidArgumentError for another name than "lz4" and "zstd", and if its package is not installed."""
    number = NAMES.get(name)
    if number is None:
        raise InvalidArgumentError(f"compression must be one of {', '.join(map(repr, NAMES))} or None, got {name!r}")
    if load(number) is None:
        raise InvalidArgumentError(f"compression={name!r} needs pip install 'penstock[compression]', also on workers")
    return number


class Packer:
    """Compressor of one lane's batches, used by the sender (on the worker's host)."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self._scratch = memoryview(bytearray(PIECE))
        self._skip = 0  # batches to send uncompressed before the next try
        self._next_skip = 1  # the same, after the next failed try

    def pack(self, payload: memoryview) -> tuple[int, list[bytes | memoryview]] | None:
        """Return the number of bytes to send for a batch and the buffers with them; None to send it uncompressed."""
        size = len(payload)
        if size < SMALLEST:
            return None
        if self._skip:
            self._skip -= 1
            return None
        compress, scratch = self.codec.compress, self._scratch
        pieces: list[bytes | memoryview] = []
        for start in range(0, size, PIECE):
            piece = payload[start : start + PIECE]
            copied = scratch[: len(piece)]
            copied[:] = piece
            packed = compress(copied)
            pieces.append(packed if len(packed) <= ENOUGH * len(piece) else piece)
        table = struct.pack(f"<{len(pieces)}I", *map(len, pieces))
        wire = len(table) + sum(map(len, pieces))
        if wire > ENOUGH * size:
            self._skip = self._next_skip
            self._next_skip = min(2 * self._next_skip, MOST_SKIPPED)
            return None
        self._next_skip = 1
        return wire, [table, *pieces]


def check_claim(wire: int, size: int) -> None:
    """Raise ProtocolError if a batch of `size` bytes cannot have `wire` bytes when compressed, as the sender says."""
    if not _table(size) < wire < size:
        raise malformed(f"a batch of {size} bytes cannot have {wire} bytes when compressed")


class Unpacker:
    """Decompressor of one lane's batches, used by the receiver. For each batch call `begin`, fill the buffer that it
    returns, then call `step` and fill that buffer, until `step` returns None."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.left = 0
        """Compressed bytes of the batch that come after the buffer that is being filled."""
        self._buffer = memoryview(bytearray(PIECE))  # reused for all pieces
        self._entry = self._buffer[:0]
        self._lengths: tuple[int, ...] = ()
        self._table = self._buffer[:0]
        self._index = -1  # index of the piece that is being filled; -1 is the table

    def begin(self, entry: memoryview, wire: int) -> memoryview:
        """Start a batch that fills `entry`, with `wire` compressed bytes. Return the first buffer to receive into."""
        table = _table(len(entry))
        self._entry = entry
        self._index = -1
        self._table = self._buffer[:table] if table <= PIECE else memoryview(bytearray(table))
        self.left = wire - table
        return self._table

    def step(self) -> memoryview | None:
        """Process the full buffer. Return the next; None if the batch is complete. Raises ProtocolError."""
        index, entry = self._index, self._entry
        if index < 0:
            self._read_table()
        else:
            piece = entry[index * PIECE : (index + 1) * PIECE]
            length = self._lengths[index]
            if length < len(piece):
                made = self.codec.decompress(self._buffer[:length], len(piece))
                if len(made) != len(piece):
                    raise ProtocolError(f"a compressed piece of a batch must make {len(piece)} bytes, got {len(made)}")
                piece[:] = made
        self._index = index = index + 1
        if index == len(self._lengths):
            self._entry = self._buffer[:0]  # do not keep the ring's memory
            return None
        length = self._lengths[index]
        self.left -= length
        piece = entry[index * PIECE : (index + 1) * PIECE]
        return piece if length == len(piece) else self._buffer[:length]

    def drop(self) -> None:
        self._entry = self._buffer[:0]

    def _read_table(self) -> None:
        size = len(self._entry)
        lengths = struct.unpack(f"<{len(self._table) // 4}I", self._table)
        self._table = self._buffer[:0]
        if not all(lengths) or sum(lengths) != self.left:
            raise ProtocolError(f"the pieces of a batch must have {self.left} bytes together, got {sum(lengths)}")
        last = size - (len(lengths) - 1) * PIECE
        if lengths[-1] > last or (len(lengths) > 1 and max(lengths[:-1]) > PIECE):
            raise ProtocolError("a piece of a compressed batch must not be larger than before compression")
        self._lengths = lengths


def _table(size: int) -> int:
    return 4 * ((size + PIECE - 1) // PIECE)
