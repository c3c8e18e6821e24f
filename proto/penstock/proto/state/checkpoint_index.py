"""Index of a checkpoint: which value is where. Written twice: as `index.json`, which a restore reads, and as the pickle
`.metadata`, which torch's own reader reads.

Pickling 3,000 entries takes 14 ms, for which the training would wait. So the training process describes the index in
plain values, and the checkpoint writer, without torch, makes both files. The description has a pickle of torch's own
classes and values, the *parts*, which later opcodes (protocol 4 without frames) get from the unpickler's memo, so this
module names no class of torch.

index.json is an object with the fields:
    format: 1
    tensors: kinds of tensors, each once: [dtype, shape, chunks]. A chunk, a part of a tensor, is [offsets, sizes].
    files: names of files
    values: name of a value -> [kind of tensor or null for an object, path, *archives]. The path is the keys, texts and
        integers, that lead to the value in the nested state. An archive, the bytes of one chunk or object, is four
        numbers: number of the chunk or 0, number of the file, offset in it and length in bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

FORMAT = 1
ATTRIBUTES = (
    *("state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"),
    *("properties", "size", "chunks"),
    *("fqn", "index", "offset"),
    *("relative_path", "length"),
)
"""Names of the attributes of objects in torch's index."""

_PROTO, _STOP, _POP, _MARK, _MEMOIZE, _NONE = b"\x80\x04", b".", b"0", b"(", b"\x94", b"N"
_DICT, _ITEMS, _LIST, _APPENDS = b"}(", b"u", b"](", b"e"
_NEW, _BUILD = b")\x81}(", b"ub"
"""Opcodes that make an object of the class on the stack and begin its attributes; opcodes that end them."""
_TUPLES = {0: b")", 1: b"\x85", 2: b"\x86", 3: b"\x87"}


class IndexPickle:
    """Maker of `.metadata`.

    Args:
        index: content of index.json.
        torch: what torch's index has beyond it. "parts": list of torch's classes and values, as the latin-1 text of a
            pickle in protocol 3; first the classes Metadata, TensorStorageMetadata, MetadataIndex, _StorageInfo, then
            the names in ATTRIBUTES. "memo": size of the unpickler's memo after the parts. "places": position of each
            part in it. "tensors": for each of the index's tensors [properties, size, [(chunk, offsets), ...]] as
            numbers of parts. "object", "storage_meta", "version": numbers of these parts.
    """

    def __init__(self, index: dict[str, Any], torch: dict[str, Any]) -> None:
        self._index = index
        self._torch = torch
        self._memo: int = torch["memo"]
        self._texts: dict[str, bytes] = {}
        """Text that is in the unpickler's memo already -> opcodes that load it."""
        self._parts = [_get(place) for place in torch["places"]]
        self._root, self._tensor, self._entry, self._place, *attributes = self._parts[: 4 + len(ATTRIBUTES)]
        self._attributes = dict(zip(ATTRIBUTES, attributes, strict=True))

    @classmethod
    @lru_cache(maxsize=1)  # equal for each save of a state whose archives keep their lengths; 3,000 entries take 25 ms
    def files(cls, description: bytes) -> tuple[bytes, bytes]:
        """Return the contents of index.json and of .metadata from the training process's description."""
        described = json.loads(description)
        return json.dumps(described["index"]).encode(), cls(**described).pickle()

    def pickle(self) -> bytes:
        return b"".join(self._pieces())

    def _pieces(self) -> Iterable[bytes]:
        parts, attributes, values = self._parts, self._attributes, self._index["values"]
        pickled = self._torch["parts"].encode("latin-1")
        yield _PROTO + pickled.removeprefix(b"\x80\x03").removesuffix(_STOP) + _POP
        yield self._root + _NEW + attributes["state_dict_metadata"] + _DICT
        kinds = [self._kind(*kind) for kind in self._torch["tensors"]]
        for name, (kind, *_) in values.items():
            yield self._text(name) + (parts[self._torch["object"]] if kind is None else kinds[kind])
        yield _ITEMS + attributes["planner_data"] + _DICT
        for name, (_, path, *_) in values.items():
            yield self._text(name) + self._path(path)
        yield _ITEMS + attributes["storage_data"] + _DICT
        for name, (kind, _, *archives) in values.items():
            yield from self._entries(name, None if kind is None else self._torch["tensors"][kind][2], archives)
        yield _ITEMS + attributes["storage_meta"] + parts[self._torch["storage_meta"]]
        yield attributes["version"] + parts[self._torch["version"]] + _BUILD + _STOP

    def _kind(self, properties: int, size: int, chunks: list[list[int]]) -> bytes:
        parts, attributes = self._parts, self._attributes
        values: bytes = attributes["properties"] + parts[properties] + attributes["size"] + parts[size]
        listed = attributes["chunks"] + _LIST + b"".join(parts[chunk] for chunk, _ in chunks) + _APPENDS
        return self._tensor + _NEW + values + listed + _BUILD

    def _entries(self, name: str, chunks: list[list[int]] | None, archives: list[int]) -> Iterable[bytes]:
        attributes = self._attributes
        index = self._entry + _NEW + attributes["fqn"] + self._text(name) + attributes["index"]
        place = self._place + _NEW + attributes["relative_path"]
        for chunk, file, begin, length in in_fours(archives):
            if chunks is None:
                yield index + _NONE + _BUILD
            else:
                yield index + _number(chunk) + attributes["offset"] + self._parts[chunks[chunk][1]] + _BUILD
            yield place + self._text(self._index["files"][file]) + attributes["offset"] + _number(begin)
            yield attributes["length"] + _number(length) + _BUILD

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


def in_fours(numbers: list[int]) -> Iterator[tuple[int, ...]]:
    """Split the numbers of a value's archives. Raises ValueError if some are left over."""
    return zip(*[iter(numbers)] * 4, strict=True)


def _get(place: int) -> bytes:
    return b"h%c" % place if place < 256 else b"j" + place.to_bytes(4, "little")


def _number(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K%c" % value
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + value.to_bytes(4, "little", signed=True)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a%c%b" % (len(data), data)
