"""torch's index of a checkpoint, the file `.metadata`, written without torch.

The index is a pickle of `torch.distributed.checkpoint.metadata.Metadata`. Pickling an index of 3,000 entries takes 14
ms, for which the training would wait. So the training process describes the index in plain values (`DescribedIndex`),
and the checkpoint writer, which runs beside the training and has no torch, makes the pickle.

The description begins with a pickle of torch's own classes and values, the *parts*. The opcodes after that pickle read
the parts from the unpickler's memo, so this module names no class of torch.

Opcodes are those of protocol 4, without frames, as Python's pickletools describes them. Two readers check the opcodes
with regular expressions: client/checkpoint/values/pickles.py skips all opcodes but long texts, and pickle_hashing.py
accepts all opcodes after the parts, unless a name is longer than 255 bytes. Change all three together.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

__all__ = ["ATTRIBUTES", "DescribedIndex"]

ATTRIBUTES = (
    *("state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"),
    *("properties", "size", "chunks"),
    *("fqn", "index", "offset"),
    *("relative_path", "length"),
)
"""Names of the attributes of objects in the index."""

_PROTO, _STOP, _POP, _MARK, _MEMOIZE, _NONE = b"\x80\x04", b".", b"0", b"(", b"\x94", b"N"
_DICT, _ITEMS, _LIST, _APPENDS = b"}(", b"u", b"](", b"e"
_NEW, _BUILD = b")\x81}(", b"ub"
"""_NEW: opcodes that make an object of the class on the stack and begin its attributes. _BUILD: opcodes that end
them."""
_TUPLES = {0: b")", 1: b"\x85", 2: b"\x86", 3: b"\x87"}


@dataclass(frozen=True)
class DescribedIndex:
    """Description of torch's index of a checkpoint in plain values. Numbers in it refer to the list `parts`."""

    parts: str
    """List of torch's own classes and values (the parts), as the latin-1 text of a pickle in protocol 3. The first
    parts are torch's classes Metadata, TensorStorageMetadata, MetadataIndex and _StorageInfo. Then come the names in
    ATTRIBUTES, and then the values."""
    memo: int
    """Number of entries in the unpickler's memo after it has loaded `parts`."""
    places: list[int]
    """For each part, its position in the unpickler's memo; never 0, which is the position of the list itself."""
    storage_meta: int
    """Number of the part that is the index's storage_meta (torch's description of where the files are)."""
    version: str
    kinds: list[Any]
    """Descriptions of saved values, each once. A tensor is described by [properties, size, [chunk, ...]], where each
    item is the number of a part; any other value by the number of a part."""
    names: dict[str, int]
    """Name of a saved value -> index of its description in `kinds`."""
    paths: dict[str, Any]
    """Name of a saved value -> the keys (texts and integers) that lead to it in the nested state."""
    files: list[Any]
    """Files as [name, entries]. An entry is [name of the value, offset in its tensor (number of a part, or None), index
    hint (or None), offset in the file, size in bytes]."""

    def encode(self) -> bytes:
        return json.dumps(vars(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> DescribedIndex:
        return cls(**json.loads(data))

    def pickle(self) -> bytes:
        """Return the pickle of the index, which torch's reader accepts as `.metadata`."""
        return b"".join(_Pickle(self).pieces())


class _Pickle:
    def __init__(self, index: DescribedIndex) -> None:
        self._index = index
        self._memo = index.memo
        self._texts: dict[str, bytes] = {}
        """Text that is in the unpickler's memo already -> opcodes that load it."""
        self._parts = [_get(place) for place in index.places]
        self._root, self._tensor, self._entry, self._place, *attributes = self._parts[: 4 + len(ATTRIBUTES)]
        self._at = dict(zip(ATTRIBUTES, attributes, strict=True))

    def pieces(self) -> Iterable[bytes]:
        index, at = self._index, self._at
        parts = index.parts.encode("latin-1")
        yield _PROTO + parts.removeprefix(b"\x80\x03").removesuffix(_STOP) + _POP
        yield self._root + _NEW + at["state_dict_metadata"] + _DICT
        kinds = [self._kind(kind) for kind in index.kinds]
        for name, kind in index.names.items():
            yield self._text(name) + kinds[kind]
        yield _ITEMS + at["planner_data"] + _DICT
        for name, path in index.paths.items():
            yield self._text(name) + self._path(path)
        yield _ITEMS + at["storage_data"] + _DICT
        for file, entries in index.files:
            yield from self._entries(file, entries)
        yield _ITEMS + at["storage_meta"] + self._parts[index.storage_meta]
        yield at["version"] + self._text(index.version) + _BUILD + _STOP

    def _kind(self, kind: Any) -> bytes:
        parts, at = self._parts, self._at
        if isinstance(kind, int):
            return parts[kind]
        properties, size, chunks = kind
        values: bytes = at["properties"] + parts[properties] + at["size"] + parts[size]
        listed = at["chunks"] + _LIST + b"".join(parts[chunk] for chunk in chunks) + _APPENDS
        return self._tensor + _NEW + values + listed + _BUILD

    def _entries(self, file: str, entries: list[Any]) -> Iterable[bytes]:
        parts, at = self._parts, self._at
        index, place = self._entry + _NEW + at["fqn"], self._place + _NEW + at["relative_path"]
        for name, offset, hint, begin, length in entries:
            yield index + self._text(name) + at["index"] + (_NONE if hint is None else _number(hint))
            yield (b"" if offset is None else at["offset"] + parts[offset]) + _BUILD
            yield place + self._text(file) + at["offset"] + _number(begin) + at["length"] + _number(length) + _BUILD

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
