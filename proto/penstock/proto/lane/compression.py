"""Compression of batches on the TCP lane by lz4 or zstd, from sender to receiver, if the consumer requests it.

The format is in lane.proto: a table of compressed lengths, then the compressed pieces, which have PIECE bytes each
before compression. Pieces have four advantages over one long stream: memory is bounded by a piece on both sides, all
lengths are checked against the batch before decompression, a piece is still in the processor's cache when it is copied
into its ring entry, and decompression runs while the rest is being received. The ratio is the same: pieces of 256 KiB
compress as well as 8 MiB.

Some data are sent uncompressed: batches smaller than SMALLEST, and batches and pieces that do not shrink to ENOUGH of
their size. If a batch does not shrink enough, the sender skips the next batch: it sends the batch uncompressed, without
a try. After each further failure the sender skips twice as many batches: 2, 4, up to MOST_SKIPPED. Once a batch shrinks
enough, the number of batches to skip is 1 again.

A piece is copied before it is compressed, because user code can write into the ring at any time, and compressors may
write outside their memory if their input changes meanwhile. The copy runs at 20 GB/s, the compressor below 1 GB/s.

Both packages are optional (the extra `compression`), and imported only when requested. Both release the interpreter
lock while they work.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

from penstock.proto.errors import InvalidArgumentError, ProtocolError, malformed
from penstock.proto.v1 import lane_pb2

__all__ = ["NAMES", "PIECE", "Codec", "Packer", "Unpacker", "check_claim", "first_of", "load", "require"]

Buffer = bytes | bytearray | memoryview

PIECE = 256 << 10
"""Bytes of each piece before compression. The number is part of the protocol."""
SMALLEST = 2 << 10
"""Smallest size in bytes of a batch that is compressed. From this size on, compression saves more time on a network of
1 Gbit/s than it costs. Costs and savings, measured with token ids (benchmarks/compression.md; costs are those of the
slower of sender and receiver): 1 KiB by lz4 costs 3.7 us and saves 3.3 us, by zstd 7.4 and 5.5 us; 2 KiB by lz4 costs
4.5 us and saves 6.9 us, by zstd 9.6 and 11.3 us."""
ENOUGH = 7 / 8
"""Largest share of its original size that a compressed batch or piece may have. Noisy float32 images decided the value:
zstd saves 12 % of them at 1.2 GB/s, which pays only on networks below 1 Gbit/s, and little there."""
MOST_SKIPPED = 64
"""Largest number of batches that are sent uncompressed between two tries to compress one."""
ZSTD_LEVEL = 1
"""Compression level of zstd. For token ids level 1 is the best of three: 605 MB/s and a compression ratio of 4.0,
against 438 MB/s and 3.5 for level 2, 386 MB/s and 3.3 for level 3. Level 5 makes quantised images a quarter smaller, at
a third of the speed. Level -1 is a tenth faster for token ids of which a few are frequent, with a quarter less
compression (benchmarks/compression.md)."""

NAMES: dict[str, int] = {"lz4": lane_pb2.LZ4, "zstd": lane_pb2.ZSTD}


@dataclass(frozen=True)
class Codec:
    """Codec (lz4 or zstd) of single pieces of a batch."""

    name: str
    number: int
    compress: Callable[[Buffer], bytes]
    decompress: Callable[[Buffer, int], bytes]
    """Called with the compressed bytes and the number of bytes that they must make, and allocates no more. Raises
    ProtocolError without a remedy if the piece is damaged; the receiver adds the remedy."""


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
                raise ProtocolError(
                    f"a compressed piece of a batch must make {size} bytes, but its zstd frame says {claimed}"
                )
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
    """Return the first codec that this process can load."""
    return next((codec for codec in map(load, numbers) if codec is not None), None)


@cache
def require(name: str) -> int:
    """Return the number of the codec "lz4" or "zstd". Raises InvalidArgumentError for another name, and if its package
    is not installed."""
    number = NAMES.get(name)
    if number is None:
        raise InvalidArgumentError(
            f"compression must be one of {', '.join(map(repr, NAMES))} or None, got {name!r}: pass one of these"
        )
    if load(number) is None:
        raise InvalidArgumentError(
            f"compression={name!r} needs a package that is not installed here: run pip install 'penstock[compression]' "
            "here and on the workers, or leave compression out"
        )
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
        raise malformed(
            f"a batch of {size} bytes must have {_table(size) + 1} to {size - 1} bytes when compressed, got {wire}"
        )


class Unpacker:
    """Decompressor of one lane's batches, used by the receiver (on the training host).

    For each batch call `begin`, and receive into the buffer that it returns until the buffer is full. Then call `step`,
    and do the same with the buffer that it returns, until `step` returns None.
    """

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
        """Start a batch that is to fill all of `entry`, with `wire` compressed bytes. Return the first buffer to
        receive into."""
        table = _table(len(entry))
        self._entry = entry
        self._index = -1
        self._table = self._buffer[:table] if table <= PIECE else memoryview(bytearray(table))
        self.left = wire - table
        return self._table

    def step(self) -> memoryview | None:
        """Process the full buffer. Return the next buffer to receive into; None if the batch is complete. Raises
        ProtocolError if the pieces do not make exactly the batch."""
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
        """Drop a batch of which only a part has arrived."""
        self._entry = self._buffer[:0]

    def _read_table(self) -> None:
        size = len(self._entry)
        lengths = struct.unpack(f"<{len(self._table) // 4}I", self._table)
        self._table = self._buffer[:0]
        if not all(lengths) or sum(lengths) != self.left:
            raise ProtocolError(
                f"the pieces of a compressed batch must have {self.left} bytes together, got {sum(lengths)} bytes"
            )
        last = size - (len(lengths) - 1) * PIECE
        if lengths[-1] > last or (len(lengths) > 1 and max(lengths[:-1]) > PIECE):
            raise ProtocolError("a piece of a compressed batch must not be larger than before compression")
        self._lengths = lengths


def _table(size: int) -> int:
    """Size in bytes of the table of lengths that precedes the compressed pieces of a batch."""
    return 4 * ((size + PIECE - 1) // PIECE)
