"""Payloads made smaller for the TCP lane: lz4 or zstd between the sender and the receiver, where the consumer asks for
it.

The form stands in lane.proto: pieces of PIECE bytes, their lengths on the wire in front. Pieces rather than one long
stream, because memory then is bounded by a piece on both sides whatever a peer claims, all lengths are checked against
the batch before anything is decompressed, a piece is still in the processor's cache when it is copied into its slot,
and unpacking goes on while the rest is on its way. It costs no ratio: pieces of 256 KiB shrink as well as 8 MiB.

What does not pay travels as it is: batches below SMALLEST, and batches, and pieces of them, that stay above ENOUGH of
their size. And a stream that does not shrink is not tried for ever. The rule: a batch that was tried in vain is
followed by 1 batch that is not tried, the next such by 2, then 4, up to MOST_SKIPPED; one that shrinks starts this
over.

A piece is copied before it is compressed. The ring is shared with a process that runs user code, and no compressor
promises to stay within its memory when its input changes under it. The copy runs at 20 GB/s, the compressor below 1.

Both packages are optional (the extra `compression`), so nothing is imported until it is asked for. Both release the
interpreter lock while they work.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

from penstock.proto.errors import InvalidArgumentError, ProtocolError
from penstock.proto.v1 import lane_pb2

__all__ = ["NAMES", "PIECE", "Codec", "Packer", "Unpacker", "check_claim", "first_of", "load", "require"]

Buffer = bytes | bytearray | memoryview

PIECE = 256 << 10
"""Bytes of a batch in one piece: part of the protocol."""
SMALLEST = 2 << 10
"""Bytes below which a batch is never compressed. Of 1 KiB of token ids lz4 takes 3.6 us on the slower side to save
3.3 us of a 1 Gbit/s network, zstd 7.4 for 5.5; of 2 KiB 4.5 for 6.9, and 9.6 for 11.3 (benchmarks/compression.md)."""
ENOUGH = 7 / 8
"""Share of its size that a batch, or a piece of one, must not exceed. Noisy float32 images are the case: zstd takes
12 % off them at 1.2 GB/s, which pays below 1 Gbit/s only, and there by little."""
MOST_SKIPPED = 64
"""Batches between two tries, at most: trying costs next to nothing then, and a change is noticed soon enough."""
ZSTD_LEVEL = 1
"""Levels 2 and 3 are slower and leave token ids larger, not smaller (438 and 386 MB/s with a ratio of 3.5 and 3.3,
against 605 MB/s with 4.0); level 5 takes a quarter more off quantised images, at a third of the speed; level -1 gives
up a quarter of the ratio on skewed ids, for a tenth in speed (benchmarks/compression.md)."""

NAMES: dict[str, int] = {"lz4": lane_pb2.LZ4, "zstd": lane_pb2.ZSTD}
"""What a user may ask for -> what the frames call it."""


@dataclass(frozen=True)
class Codec:
    """One way to compress a piece."""

    name: str
    number: int
    compress: Callable[[Buffer], bytes]
    decompress: Callable[[Buffer, int], bytes]
    """Of a piece and its length once decompressed; allocates no more than that. Raises ProtocolError."""


def _lz4() -> Codec:
    from lz4 import block

    def compress(piece: Buffer) -> bytes:
        # Faster modes were tried: they gain nothing on pieces that shrink, and those that do not take no time anyway.
        return bytes(block.compress(piece, store_size=False))

    def decompress(packed: Buffer, size: int) -> bytes:
        try:
            return bytes(block.decompress(packed, uncompressed_size=size))
        except block.LZ4BlockError as error:
            raise ProtocolError(f"a piece of {size} bytes that lz4 cannot read: {error}") from error

    return Codec("lz4", lane_pb2.LZ4, compress, decompress)


def _zstd() -> Codec:
    import zstandard

    compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL)
    decompressor = zstandard.ZstdDecompressor(max_window_size=PIECE)

    def decompress(packed: Buffer, size: int) -> bytes:
        try:
            # A frame without its length counts as -1, one that lies about it fails below.
            claimed = zstandard.frame_content_size(packed)
            if claimed != size:
                raise ProtocolError(f"a piece of {size} bytes whose zstd frame says {claimed}")
            return decompressor.decompress(packed, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise ProtocolError(f"a piece of {size} bytes that zstd cannot read: {error}") from error

    return Codec("zstd", lane_pb2.ZSTD, compressor.compress, decompress)


_MAKERS = {lane_pb2.LZ4: _lz4, lane_pb2.ZSTD: _zstd}


def load(number: int) -> Codec | None:
    """A codec for one lane: one thread's, not to be shared. None if it is unknown, or its package missing."""
    maker = _MAKERS.get(number)  # type: ignore[call-overload]  # of any number that a peer names
    try:
        return None if maker is None else maker()
    except ImportError:
        return None


def first_of(numbers: Iterable[int]) -> Codec | None:
    """The first of these that this process has."""
    return next((codec for codec in map(load, numbers) if codec is not None), None)


@cache
def require(name: str) -> int:
    """The number of a codec that this process shall have. Raises InvalidArgumentError that says how to get it."""
    number = NAMES.get(name)
    if number is None:
        raise InvalidArgumentError(f"compression={name!r}: it is one of {', '.join(map(repr, NAMES))}, or None")
    if load(number) is None:
        raise InvalidArgumentError(
            f"compression={name!r} needs a package that is not installed here: pip install penstock[compression], "
            "on the workers too; or leave compression out"
        )
    return number


class Packer:
    """The sending side of one lane."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self._scratch = memoryview(bytearray(PIECE))
        self._skip = 0  # batches that are not tried before the next one is
        self._next_skip = 1  # the same, after the next try in vain

    def pack(self, payload: memoryview) -> tuple[int, list[bytes | memoryview]] | None:
        """Bytes on the wire and what to send, or None if the payload travels as it is."""
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
    """Raises ProtocolError for a batch of `size` bytes that cannot be `wire` bytes long on its way."""
    if not _table(size) < wire < size:
        raise ProtocolError(f"a compressed batch of {size} bytes that claims {wire} on the wire")


class Unpacker:
    """The receiving side of one lane: says where the next bytes go, and turns them into the batch as they come.

    `begin` and then `step` return what to fill; fill it, call `step`, and so on until it returns None.
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.left = 0
        """Bytes of the payload behind those that are being filled."""
        self._buffer = memoryview(bytearray(PIECE))  # reused for all pieces
        self._slot = self._buffer[:0]
        self._lengths: tuple[int, ...] = ()
        self._table = self._buffer[:0]
        self._index = -1  # of the piece that is being filled; -1 is the table

    def begin(self, slot: memoryview, wire: int) -> memoryview:
        """A batch shall be unpacked into all of `slot`; its claim has been checked (`check_claim`)."""
        table = _table(len(slot))
        self._slot = slot
        self._index = -1
        self._table = self._buffer[:table] if table <= PIECE else memoryview(bytearray(table))
        self.left = wire - table
        return self._table

    def step(self) -> memoryview | None:
        """What was asked for last has been filled: what comes next; None: the batch is whole.

        Raises ProtocolError for what does not become exactly the batch.
        """
        index, slot = self._index, self._slot
        if index < 0:
            self._read_table()
        else:
            piece = slot[index * PIECE : (index + 1) * PIECE]
            length = self._lengths[index]
            if length < len(piece):
                made = self.codec.decompress(self._buffer[:length], len(piece))
                if len(made) != len(piece):
                    raise ProtocolError(f"a piece of {len(piece)} bytes that became {len(made)}")
                piece[:] = made
        self._index = index = index + 1
        if index == len(self._lengths):
            self._slot = self._buffer[:0]  # the ring's memory is not to be held by this
            return None
        length = self._lengths[index]
        self.left -= length
        piece = slot[index * PIECE : (index + 1) * PIECE]
        return piece if length == len(piece) else self._buffer[:length]

    def drop(self) -> None:
        """The rest of the batch will not be asked for."""
        self._slot = self._buffer[:0]

    def _read_table(self) -> None:
        size = len(self._slot)
        lengths = struct.unpack(f"<{len(self._table) // 4}I", self._table)
        self._table = self._buffer[:0]
        if not all(lengths) or sum(lengths) != self.left:
            raise ProtocolError(f"pieces of {sum(lengths)} bytes in a payload with {self.left}")
        last = size - (len(lengths) - 1) * PIECE
        if lengths[-1] > last or (len(lengths) > 1 and max(lengths[:-1]) > PIECE):
            raise ProtocolError("a piece that is longer on the wire than in its batch")
        self._lengths = lengths


def _table(size: int) -> int:
    """Bytes of the lengths in front of a batch of `size` bytes."""
    return 4 * ((size + PIECE - 1) // PIECE)
