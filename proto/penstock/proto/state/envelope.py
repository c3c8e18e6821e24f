"""Envelope of an encoded state (layout: codec.py), in a module of its own for processes without torch."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any, NoReturn, TypeAlias, TypeVar

import xxhash

from penstock.proto.errors import StateCorruptError, StateVersionError

FORMAT_VERSION = 1
MAX_DEPTH = 128
"""Largest number of nested containers, far below Python's recursion limit."""
MAGIC = b"PENSTATE"
HEADER = struct.Struct("<8sIIQQ")
CHECKSUM_BYTES = 8
ALIGN = 16
"""Alignment of blobs in bytes: that of the widest numpy item (long double)."""

Node: TypeAlias = Any
"""Value of the tree, as JSON knows it: None, bool, int, float, str, list, dict."""

_Value = TypeVar("_Value")


class EnvelopeReader:
    __slots__ = ("end", "position", "view")

    def __init__(self, view: memoryview, position: int, end: int) -> None:
        self.view, self.position, self.end = view, position, end

    def take(self, nbytes: int) -> int:
        """Move past `nbytes`, and return their offset; ValueError if fewer are left. Call it before allocating."""
        start = self.position
        if not 0 <= nbytes <= self.end - start:
            raise ValueError(f"a value must lie within the {self.end - start} bytes that are left, got {nbytes}")
        self.position = start + nbytes + -nbytes % ALIGN
        return start

    def view_of(self, nbytes: int) -> memoryview:
        start = self.take(nbytes)
        return self.view[start : start + nbytes]


_Source = TypeVar("_Source", bound=EnvelopeReader)


def opened(
    data: bytes | bytearray | memoryview,
    source_of: Callable[[memoryview, int, int], _Source],
    unpack: Callable[[Node, _Source], _Value],
) -> _Value:
    """Check an envelope, and return its decoded value: `unpack` of the tree and a reader of the blobs, which
    `source_of` makes from their first and last offset.

    Raises StateCorruptError for bytes that encode_state did not write (no more memory is allocated than they can fill),
    StateVersionError for a newer format."""
    view = memoryview(data)
    view = view.cast("B") if view.c_contiguous else memoryview(view.tobytes())
    size = len(view)
    if size < HEADER.size + CHECKSUM_BYTES:
        raise _damaged(f"an encoded state must have >= {HEADER.size + CHECKSUM_BYTES} bytes, got {size}")
    magic, version, flags, tree_size, blob_size = HEADER.unpack_from(view)
    if magic != MAGIC:
        raise _damaged(f"an encoded state must begin with {MAGIC!r}, got {magic!r}")
    end = size - CHECKSUM_BYTES
    announced = HEADER.size + tree_size + blob_size + CHECKSUM_BYTES
    if xxhash.xxh3_64_digest(view[:end]) != view[end:]:
        hint = f" (the header announces {announced} bytes, got {size})" if announced != size else ""
        raise _damaged(f"the checksum of an encoded state does not match its content{hint}")
    if version > FORMAT_VERSION:
        raise StateVersionError(f"this state is in format {version}, above {FORMAT_VERSION}: upgrade Penstock here")
    if version != FORMAT_VERSION or flags or announced != size:
        raise _damaged(f"the header of a state is damaged: format {version}, flags {flags:#x}, {announced}/{size} B")
    tree_end = HEADER.size + tree_size
    source = source_of(view, tree_end, end)
    try:
        value = unpack(_JSON.decode(str(view[HEADER.size : tree_end], "utf-8", "surrogatepass")), source)
        if source.position != end:
            raise ValueError(f"each byte of the state must belong to a value, got {end - source.position} unused bytes")
    except MemoryError:
        raise
    except Exception as error:  # the checksum matches, so another program or an attacker made these bytes
        raise _damaged(f"an encoded state cannot be decoded: {type(error).__name__}: {error}") from error
    return value


def with_bytes(data: bytes, name: str, added: bytes) -> bytes:
    """Return the envelope of a dict with one more entry, the bytes `added`. No other value is decoded."""

    def with_entry(tree: Node, source: EnvelopeReader) -> tuple[Node, bytes]:
        start, source.position = source.position, source.end
        return {**tree, name: {"$": ["bytes", len(added)]}}, bytes(source.view[start : source.end])

    tree, blobs = opened(data, EnvelopeReader, with_entry)
    text = json.dumps(tree, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    text += b" " * (-len(text) % ALIGN)
    blobs += added + bytes(-len(added) % ALIGN)
    content = HEADER.pack(MAGIC, FORMAT_VERSION, 0, len(text), len(blobs)) + text + blobs
    return content + xxhash.xxh3_64_digest(content)


def damaged_state(what: str, error: Exception) -> StateCorruptError:
    """Error for a saved value that cannot be read. `what`: sentence without a full stop."""
    reason = f"its entry {error.args[0]!r} is missing" if isinstance(error, KeyError) and error.args else str(error)
    return _damaged(f"{what}: {reason}")


def _damaged(what: str) -> StateCorruptError:
    return StateCorruptError(f"{what}. Load an older state")


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"a number must be finite in JSON, got {name}")


_JSON = json.JSONDecoder(parse_constant=_reject_constant)
