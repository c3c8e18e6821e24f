"""torch's index of a checkpoint, `.metadata`, written without torch.

The index is a pickle of `torch.distributed.checkpoint.metadata.Metadata`. Pickling one of 3,000 entries takes 14 ms,
which the training would wait for. So the training process describes the index in plain values (`DescribedIndex`), and
the checkpoint writer, which has no torch and keeps nobody waiting, makes the pickle of them.

What only torch knows comes as a pickle of torch's own classes and values, the *parts*, and what is written behind it
refers to them by their places in the unpickler's memo. So no class is named in here.

Opcodes are those of protocol 4, without frames, as Python's pickletools describes them: only such as the reader passes
over in one piece (client/checkpoint/values/pickles.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

__all__ = ["ATTRIBUTES", "CLASSES", "DescribedIndex"]

CLASSES = ("Metadata", "TensorStorageMetadata", "MetadataIndex", "StorageInfo")
"""Of which objects are made here."""
ATTRIBUTES = (
    *("state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"),
    *("properties", "size", "chunks"),
    *("fqn", "index", "offset"),
    *("relative_path", "length"),
)
"""Of these objects."""

_PROTO, _STOP, _POP, _MARK, _MEMOIZE, _NONE = b"\x80\x04", b".", b"0", b"(", b"\x94", b"N"
_DICT, _ITEMS, _LIST, _APPENDS = b"}(", b"u", b"](", b"e"
_TUPLES = {0: b")", 1: b"\x85", 2: b"\x86", 3: b"\x87"}


@dataclass(frozen=True)
class DescribedIndex:
    """An index of torch's as plain values. A *place* is one in the memo that the parts leave."""

    parts: str
    """A pickle of protocol 3, byte by byte as latin-1."""
    memo: int
    """Places that it uses."""
    places: dict[str, int]
    """Of each of CLASSES and ATTRIBUTES."""
    storage_meta: int
    """Place."""
    version: str
    kinds: list[Any]
    """What is saved under a name: a place, or [properties, size, [chunks]] of a tensor, all of them places."""
    names: dict[str, int]
    """Name -> which of the kinds."""
    paths: dict[str, Any]
    """Name -> the keys that lead to it, texts and whole numbers."""
    files: list[Any]
    """[file's name, entries], of each of which there are [name, offset in its tensor (a place, or None), index hint (or
    None), offset in the file, bytes]."""

    def encode(self) -> bytes:
        return json.dumps(vars(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> DescribedIndex:
        return cls(**json.loads(data))

    def pickle(self) -> bytes:
        """The index as torch's reader wants it."""
        return b"".join(_Pickle(self).pieces())


class _Pickle:
    def __init__(self, index: DescribedIndex) -> None:
        self._index = index
        self._memo = index.memo
        self._texts: dict[str, bytes] = {}
        """Those that are in the memo -> what gets them."""
        self._at = {name: _get(place) for name, place in index.places.items()}

    def pieces(self) -> Iterable[bytes]:
        index = self._index
        parts = index.parts.encode("latin-1")
        yield _PROTO + parts.removeprefix(b"\x80\x03").removesuffix(_STOP) + _POP
        yield self._new("Metadata") + self._at["state_dict_metadata"] + _DICT
        kinds = [self._kind(kind) for kind in index.kinds]
        for name, kind in index.names.items():
            yield self._text(name) + kinds[kind]
        yield _ITEMS + self._at["planner_data"] + _DICT
        for name, path in index.paths.items():
            yield self._text(name) + self._path(path)
        yield _ITEMS + self._at["storage_data"] + _DICT
        for file, entries in index.files:
            yield from self._entries(file, entries)
        yield _ITEMS + self._at["storage_meta"] + _get(index.storage_meta)
        yield self._at["version"] + self._text(index.version) + _ITEMS + b"b" + _STOP

    def _new(self, kind: str) -> bytes:
        """An object, and the beginning of its attributes."""
        return self._at[kind] + b")\x81" + _DICT

    def _kind(self, kind: Any) -> bytes:
        if isinstance(kind, int):
            return _get(kind)
        properties, size, chunks = kind
        at = self._at
        values = at["properties"] + _get(properties) + at["size"] + _get(size)
        listed = at["chunks"] + _LIST + b"".join(map(_get, chunks)) + _APPENDS
        return self._new("TensorStorageMetadata") + values + listed + _ITEMS + b"b"

    def _entries(self, file: str, entries: list[Any]) -> Iterable[bytes]:
        at = self._at
        index, info = self._new("MetadataIndex") + at["fqn"], self._new("StorageInfo") + at["relative_path"]
        for name, offset, hint, begin, length in entries:
            yield index + self._text(name) + at["index"] + (_NONE if hint is None else _number(hint))
            yield (b"" if offset is None else at["offset"] + _get(offset)) + _ITEMS + b"b"
            yield info + self._text(file) + at["offset"] + _number(begin) + at["length"] + _number(length)
            yield _ITEMS + b"b"

    def _path(self, path: list[Any]) -> bytes:
        keys = b"".join(self._text(key) if isinstance(key, str) else _number(key) for key in path)
        return keys + _TUPLES[len(path)] if len(path) in _TUPLES else _MARK + keys + b"t"

    def _text(self, text: str) -> bytes:
        known = self._texts.get(text)
        if known is not None:
            return known
        self._texts[text] = _get(self._memo)
        self._memo += 1
        data = text.encode("utf-8", "surrogatepass")
        if len(data) < 256:
            return b"\x8c%c%b\x94" % (len(data), data)
        return b"X" + len(data).to_bytes(4, "little") + data + _MEMOIZE


def _get(place: int) -> bytes:
    return b"h%c" % place if place < 256 else b"j" + place.to_bytes(4, "little")


def _number(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K%c" % value
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + value.to_bytes(4, "little", signed=True)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a%c%b" % (len(data), data)
