"""Conversion of an encoded state to JSON, for programs that are not written in Python. It needs neither torch nor
numpy, and drops only `_metadata` of an OrderedDict.

JSON has no tensors, bytes, NaN or keys that are not text. Such a value becomes an object with the key "$", which names
its type; docs/grpc.md lists them. Bytes are in base64, and numbers in them little-endian.

Lists, tuples and torch.Size become lists, an OrderedDict a dict, so it cannot be converted back. An integer of 64 bits
is a JSON number: a reader that converts it to a double, such as JavaScript's, loses digits beyond 2^53.
"""

from __future__ import annotations

import base64
import json
import math
import re
import struct
from collections.abc import Callable
from typing import Any

from penstock.proto.state.envelope import MAX_DEPTH, EnvelopeReader, Node, opened

_BITS = {"bool": 8, "complex32": 32, "complex64": 64, "complex128": 128}
_NUMBERS = {"<u4": "I", "<i8": "q", "<f8": "d"}
_ITEM = re.compile(r"[<>|]([a-zA-Z])(\d*)(?:\[.*\])?", re.ASCII)


def state_as_json(data: bytes) -> bytes:
    """Return an envelope's value as JSON; "null" for b"". Raises StateCorruptError, StateVersionError."""
    if not data:
        return b"null"
    return opened(data, EnvelopeReader, _written)


def _written(node: Node, source: EnvelopeReader) -> bytes:
    # Lone surrogates, which UTF-8 cannot encode, are written as \uD800 escapes.
    return json.dumps(_plain(node, source, 0), allow_nan=False, separators=(",", ":")).encode()


def _plain(node: Node, source: EnvelopeReader, depth: int) -> Any:
    if depth > 3 * MAX_DEPTH:  # a container may be up to three levels of the tree
        raise ValueError(f"the state is nested deeper than {MAX_DEPTH} containers")
    if isinstance(node, list):
        return [_plain(item, source, depth + 1) for item in node]
    if not isinstance(node, dict):
        return node
    if "$" not in node:
        return {key: _plain(item, source, depth + 1) for key, item in node.items()}
    ((_, tagged),) = node.items()
    return _TAGGED[tagged[0]](tagged, source, depth + 1)


def _base64(source: EnvelopeReader, nbytes: int) -> str:
    return base64.b64encode(source.view_of(nbytes)).decode()


def _bytes(node: Node, source: EnvelopeReader, depth: int) -> Any:
    return {"$": "bytes", "base64": _base64(source, node[1])}


def _numbers(node: Node, source: EnvelopeReader, depth: int) -> Any:
    _, _, spec, count = node
    numbers = struct.unpack(f"<{count}{_NUMBERS[spec]}", source.view_of(count * int(spec[-1])))
    return [_float(number) if isinstance(number, float) else number for number in numbers]


def _float(value: float) -> Any:
    return value if math.isfinite(value) else {"$": "float", "value": repr(value)}


def _dict(body: Node, source: EnvelopeReader, depth: int) -> Any:
    if isinstance(body, dict):
        items = {key: _plain(item, source, depth + 1) for key, item in body.items()}
        return items if "$" not in items else {"$": "dict", "items": [[key, item] for key, item in items.items()]}
    flat = [_plain(item, source, depth + 1) for item in body]
    return {"$": "dict", "items": [list(pair) for pair in zip(flat[::2], flat[1::2], strict=True)]}


def _ordered(node: Node, source: EnvelopeReader, depth: int) -> Any:
    items = _dict(node[1], source, depth)
    if len(node) == 3:
        _plain(node[2], source, depth)  # read past the dict's attributes: their blobs come before the next value's
    return items


def _shaped(kind: str, node: Node, source: EnvelopeReader, itemsize: int) -> Any:
    shape = node[2:]
    if any(type(dim) is not int or dim < 0 for dim in shape):
        raise ValueError(f"a shape in the state must be ints >= 0, got {shape!r}")
    data = _base64(source, math.prod(shape) * itemsize)
    return {"$": kind, "dtype": node[1], "shape": shape, "base64": data}


def _tensor_item(dtype: str) -> int:
    """Size in bytes of one element. The name of the dtype contains the number of bits (float8_e4m3fn)."""
    found = re.search(r"\d+", dtype, re.ASCII)
    return _BITS[dtype] // 8 if dtype in _BITS else max(8, int(found[0]) if found else 0) // 8


def _array_item(spec: str) -> int:
    """Bytes of an element: the number in its dtype's name, times 4 for text; 8 for a time or a long long."""
    found = _ITEM.fullmatch(spec)
    if found is None:
        raise ValueError(f"a numpy dtype in the state must be a number, text, bytes or time, got {spec!r}")
    kind, size = found[1], int(found[2] or 0)
    return 8 if kind in "qQ" else 4 * size if kind == "U" else size


def _scalar(node: Node, source: EnvelopeReader, depth: int) -> Any:
    data = base64.b64encode(bytes.fromhex(node[2])).decode()
    return {"$": "array", "dtype": node[1], "shape": [], "base64": data}


def _items(node: Node, source: EnvelopeReader, depth: int) -> list[Any]:
    return [_plain(item, source, depth) for item in node[1:]]


def _valued(node: Node, source: EnvelopeReader, depth: int) -> Any:
    return {"$": node[0], "value": node[1] if len(node) == 2 else _items(node, source, depth)}


def _set(node: Node, source: EnvelopeReader, depth: int) -> Any:
    return {"$": "set", "items": _plain(node[1], source, depth)}


_TAGGED: dict[str, Callable[[Node, EnvelopeReader, int], Any]] = {
    **dict.fromkeys(("int", "float", "complex", "slice", "range", "dtype", "np.dtype", "device"), _valued),
    **dict.fromkeys(("bytes", "bytearray", "bytes_"), _bytes),
    **dict.fromkeys(("set", "frozenset"), _set),
    **dict.fromkeys(("tuple", "size"), _items),
    "str_": lambda node, source, depth: node[1],
    "numbers": _numbers,
    "dict": lambda node, source, depth: _dict(node[1], source, depth),
    "odict": _ordered,
    "tensor": lambda node, source, depth: _shaped("tensor", node, source, _tensor_item(node[1])),
    "array": lambda node, source, depth: _shaped("array", node, source, _array_item(node[1])),
    "scalar": _scalar,
}
