"""Structure of a batch (the part that does not change from batch to batch), and how it is sent.

A batch is a tree: containers hold leaves. A `Structure` is the tree of containers, and for each leaf its kind, dtype
and rank (number of dimensions). Shapes and values are sent with each batch, so a batch of another length needs no new
structure. A Structure is announced once, and BATCH frames name it by an id.

It is sent as JSON, safe to read from any peer: a format number and one node. JSON distinguishes keys that are int, str,
bool and None. `from_bytes` accepts only what `to_bytes` writes, so the hash of the encoding (`key`) is its identity.

    [1,["d",["x","y"],[["t","float32",2],["a","<i8",1]]]]
    null                        None                     ["t",dtype,rank]      torch tensor
    "s" "b" "i" "f" "o"         str bytes int float bool ["a",dtype,rank]      numpy array
    "S" "B"                     numpy.str_, numpy.bytes_ ["n",dtype]           another numpy scalar
    ["d"|"od",keys,nodes]       dict, OrderedDict        ["l"|"u",nodes]       list, tuple
    ["nt"|"dc",name,fields,nodes]                        namedtuple, dataclass
    ["pt",name,nodes]                                    value that was taken apart (pytrees.py)

Dtypes are handled by name, without torch, for processes that only forward batches."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, repeat
from typing import Any, Final

import numpy as np
import xxhash

from penstock.proto.errors import UnsupportedLeafError, malformed

ALIGN: Final = 64
"""Alignment of every leaf in bytes: a cache line, the widest vector load, and torch's own alignment."""

MAX_LEAVES: Final = 65_536
MAX_VALUES: Final = 4 * MAX_LEAVES
"""Largest number of leaves, containers and Nones together in a batch."""

MAX_DEPTH: Final = 64

MAX_RANK: Final = 32

MAX_INT_BYTES: Final = 1 << 20

MAX_STRUCTURE_BYTES: Final = 4 << 20
MAX_BRACKETS: Final = 1 << 19
"""Largest number of brackets in an announced structure, checked before the structure is parsed."""

MAX_TEXT: Final = 2000

FORMAT: Final = 1

# Name -> bytes of an element, for a process without torch. Sub-byte dtypes (uint4) and bits8 are left out because torch
# itself cannot copy them, quantized dtypes because their values mean nothing without their scales.
TORCH_DTYPES: Final[dict[str, int]] = {
    "bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "uint32": 4, "int32": 4, "uint64": 8, "int64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex32": 4, "complex64": 8, "complex128": 16,
    "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
}  # fmt: skip

# Not times in steps of 0 units, "<M8[0s]": numpy takes them, and divides by that 0 (SIGFPE) when they meet others.
_NUMPY_NAME = re.compile(
    r"[<>|](?:[biufc][0-9]{1,2}|[qQ]|[SU][0-9]{1,9}|[mM]8(?:\[(?:[1-9][0-9]{0,8})?[a-zA-Z]{1,2}\])?)"
)

Key = str | int | bool | None
Path = tuple["Path", str] | None
"""(path of the container, step to the value, such as "[3]" or ".label"); None for the batch itself."""

_SCALARS = {"s": "str", "b": "bytes", "i": "int", "f": "float", "o": "bool", "S": "numpy.str_", "B": "numpy.bytes_"}
_ONE_DIM = frozenset("sbiSB")
_ARRAYS = frozenset("ta")
_PARTS = {"l": "n", "u": "n", "d": "kn", "od": "kn", "nt": "ckn", "dc": "ckn", "pt": "cn"}
"""Kind of container -> what follows it in its encoding: c the name of its class, k its keys, n its nodes."""


def padded(nbytes: int) -> int:
    return (nbytes + ALIGN - 1) & -ALIGN


def render_path(path: Path) -> str:
    steps: list[str] = []
    while path is not None:
        path, step = path
        steps.append(step if len(step) <= 80 else step[:76] + "...]")
    return "batch" + "".join(reversed(steps))


def numpy_dtype_name(dtype: np.dtype[Any]) -> str:
    """Return `dtype.str`, such as "<f4". C's long long has that of int64, "<i8", so it is sent as "<q"."""
    name = dtype.str
    return name if np.dtype(name).char == dtype.char else name[0] + dtype.char


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Raises ValueError for a name that `numpy_dtype_name` never returns."""
    if not _NUMPY_NAME.fullmatch(name):
        raise ValueError(f"the dtype of a numpy array in a batch must be one that batches may have, got {name[:80]!r}")
    try:
        dtype = np.dtype(name)
    except TypeError as error:
        raise ValueError(f"a numpy dtype must be known to numpy, got {name!r}: {error}") from None
    if numpy_dtype_name(dtype) != name:
        raise ValueError(f"a numpy dtype must have its canonical name {numpy_dtype_name(dtype)!r}, got {name!r}")
    return dtype


@dataclass(frozen=True, slots=True)
class Leaf:
    kind: str
    """"t" tensor, "a" array, "n" numpy scalar, or another letter in the table of this module's docstring."""
    dtype: str = ""
    """torch's name for a tensor, numpy's for an array or numpy scalar, else ""."""
    rank: int = 0

    @property
    def dims(self) -> int:
        """Its values in a batch's `shapes`: a tensor's or array's rank; 1 (length in bytes) for str, bytes and int."""
        return self.rank if self.kind in _ARRAYS else int(self.kind in _ONE_DIM)

    @property
    def itemsize(self) -> int:
        """Bytes of one element of a tensor or array, or of a scalar of fixed size; 1 for str, bytes and int."""
        if self.kind == "t":
            return TORCH_DTYPES[self.dtype]
        if self.kind in "an":
            return np.dtype(self.dtype).itemsize
        return 8 if self.kind == "f" else 1


@dataclass(frozen=True, slots=True)
class Node:
    kind: str
    """Letter of the table in this module's docstring."""
    children: tuple[Tree, ...]
    keys: tuple[Key, ...] = ()
    name: str = ""


Tree = Leaf | Node | None


@dataclass(frozen=True, slots=True)
class Structure:
    """Containers, kinds of leaves, dtypes and ranks of a batch. Made by `of` or `from_bytes`."""

    encoded: bytes
    key: int = field(compare=False)
    """xxh3 of `encoded`, 64 bits."""
    tree: Tree = field(compare=False, repr=False)
    leaves: tuple[Leaf, ...] = field(compare=False, repr=False)
    """In the order in which a batch's data contain them (depth first)."""
    dims: int = field(compare=False)
    sizes: tuple[tuple[int, int], ...] = field(compare=False, repr=False)

    def __hash__(self) -> int:
        return self.key

    @classmethod
    def of(cls, tree: Tree) -> Structure:
        """Raises UnsupportedLeafError if the structure is too long to be announced."""
        text = json.dumps([FORMAT, _plain(tree)], ensure_ascii=False, separators=(",", ":"))
        encoded = text.encode("utf-8", "surrogatepass")
        problem = _too_long(encoded)
        if problem:
            raise UnsupportedLeafError(f"the batch's structure takes {problem}; stack values into fewer tensors")
        leaves = tuple(_leaves(tree))
        sizes = tuple([(leaf.itemsize, leaf.dims) for leaf in leaves])
        return cls(encoded, xxhash.xxh3_64_intdigest(encoded), tree, leaves, sum([dims for _, dims in sizes]), sizes)

    def to_bytes(self) -> bytes:
        """Compact JSON in UTF-8. A lone surrogate in a key, which strict UTF-8 forbids, is encoded as three bytes."""
        return self.encoded

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> Structure:
        """Return a peer's structure, without looking up classes. Raises ProtocolError unless `to_bytes` wrote it."""
        data = bytes(data) if len(data) <= MAX_STRUCTURE_BYTES else b""
        problem = _too_long(data) if data else f"0 bytes, or more than {MAX_STRUCTURE_BYTES}"
        if problem:
            raise malformed(f"the structure of a batch takes {problem}")
        try:
            raw = json.loads(data.decode("utf-8", "surrogatepass"))
            if type(raw) is not list or len(raw) != 2 or raw[0] != FORMAT:
                raise ValueError(f"it must be [{FORMAT}, tree]")
            structure = cls.of(_tree(raw[1], 0, [0, 0]))
        except (ValueError, RecursionError, UnsupportedLeafError) as error:
            raise malformed(f"the structure of a batch is invalid: {str(error)[:200]}") from None
        if structure.encoded != data:
            raise malformed("the structure of a batch must be in its canonical encoding")
        return structure

    def describe(self) -> str:
        """Text for messages, such as `{"x": float32[rank 2], "y": int64[rank 1]}`."""
        text = _describe(self.tree)
        return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 3] + "..."


def _too_long(encoded: bytes) -> str:
    if len(encoded) > MAX_STRUCTURE_BYTES:
        return f"{len(encoded)} bytes to describe, above the limit of {MAX_STRUCTURE_BYTES}"
    brackets = encoded.count(b"[") + encoded.count(b"{")
    return f"{brackets} brackets to describe, above the limit of {MAX_BRACKETS}" if brackets > MAX_BRACKETS else ""


def _leaves(tree: Tree) -> Iterator[Leaf]:
    if isinstance(tree, Leaf):
        yield tree
    elif tree is not None:
        for child in tree.children:
            yield from _leaves(child)


def _plain(tree: Tree) -> Any:
    if tree is None:
        return None
    if isinstance(tree, Leaf):
        if tree.kind in _ARRAYS:
            return [tree.kind, tree.dtype, tree.rank]
        return [tree.kind, tree.dtype] if tree.kind == "n" else tree.kind
    parts = {"c": tree.name, "k": list(tree.keys), "n": [_plain(child) for child in tree.children]}
    return [tree.kind, *(parts[part] for part in _PARTS[tree.kind])]


def _tree(raw: Any, depth: int, count: list[int]) -> Tree:
    """Tree of the JSON value `raw`. Raises ValueError. count: [leaves, all values] read so far; adds its own."""
    count[1] += 1
    if count[1] > MAX_VALUES:
        raise ValueError(f"a batch must have at most {MAX_VALUES} values")
    if raw is None:
        return None
    if type(raw) is str and raw in _SCALARS:
        return _counted(Leaf(raw), count)
    if type(raw) is not list or not raw or type(raw[0]) is not str:
        raise ValueError(f"a container or leaf must be a list that begins with its kind, got {raw!r:.100}")
    kind, *rest = raw
    if kind in ("t", "a", "n"):
        return _counted(_array_leaf(kind, rest), count)
    if depth >= MAX_DEPTH:
        raise ValueError(f"containers must be nested at most {MAX_DEPTH} deep")
    names = _PARTS.get(kind, "")
    parts = dict(zip(names, rest, strict=False))
    name, keys, nodes = parts.get("c", ""), parts.get("k", []), parts.get("n")
    if len(names) != len(rest) or type(keys) is not list or type(nodes) is not list:
        raise ValueError(f"a container must have a known kind and its parts, got {raw!r:.100}")
    if "k" in names:
        _check_keys(keys, len(nodes), "c" in names)
    if "c" in names and (type(name) is not str or not 0 < len(name) <= 1024):
        raise ValueError(f"a class name must be a text of 1 to 1024 characters, got {name!r:.100}")
    return Node(kind, tuple(_tree(node, depth + 1, count) for node in nodes), tuple(keys), name)


def _check_keys(keys: list[Any], count: int, fields: bool) -> None:
    """Raise ValueError unless these can be the keys of a container of `count` values; `fields`: of a class."""
    for key in keys:
        if type(key) is not str and (fields or not allowed_key(key)):
            raise ValueError(f"a key must be a str, a bool, None or an int of 64 bits, got {type(key).__name__}")
    if len(keys) != count or len(set(keys)) != count:
        raise ValueError(f"each value must have a key of its own, got {len(keys)} keys for {count} values")
    if fields and not all(key.isidentifier() for key in keys):
        raise ValueError(f"field names must be Python identifiers, got {keys!r:.100}")


def path_steps(kind: str, keys: Sequence[Key], count: int) -> Iterator[str]:
    if kind in ("l", "u", "pt"):
        return (f"[{i}]" for i in range(count))
    return (f"[{key!r}]" for key in keys) if kind in ("d", "od") else (f".{key}" for key in keys)


def allowed_key(key: object) -> bool:
    """True for a dict key, not a str, that a batch may have: None, a bool and an int of 64 bits."""
    return key is None or type(key) is bool or (type(key) is int and -(1 << 63) <= key < 1 << 63)


def _array_leaf(kind: str, rest: list[Any]) -> Leaf:
    if len(rest) != (1 if kind == "n" else 2) or type(rest[0]) is not str:
        raise ValueError(f"a tensor or array must have a dtype and a number of dimensions, got {rest!r:.100}")
    name, rank = rest[0], 0 if kind == "n" else rest[1]
    if type(rank) is not int or not 0 <= rank <= MAX_RANK:
        raise ValueError(f"the number of dimensions must be an int from 0 to {MAX_RANK}, got {rank!r:.100}")
    if kind == "t":
        if name not in TORCH_DTYPES:
            raise ValueError(f"the dtype of a tensor must be one that batches may have, got {name[:80]!r}")
    else:
        dtype = numpy_dtype(name)
        if kind == "n" and (dtype.kind in "SU" or dtype.byteorder == (">" if sys.byteorder == "little" else "<")):
            raise ValueError(f"a numpy scalar must be a number, bool or time in native byte order, got {name!r}")
    return Leaf(kind, name, rank)


def _counted(leaf: Leaf, count: list[int]) -> Leaf:
    count[0] += 1
    if count[0] > MAX_LEAVES:
        raise ValueError(f"a batch must have at most {MAX_LEAVES} leaves")
    return leaf


def _describe(tree: Tree) -> str:
    if isinstance(tree, Leaf):
        kind = {"t": "", "a": "ndarray ", "n": "numpy scalar "}.get(tree.kind)
        rank = f"[rank {tree.rank}]" if tree.kind in _ARRAYS else ""
        return _SCALARS[tree.kind] if kind is None else f"{kind}{tree.dtype}{rank}"
    if tree is None:
        return "None"
    if tree.kind in ("nt", "dc"):
        labels = [f"{key}=" for key in tree.keys]
    else:
        labels = [f"{json.dumps(key) if isinstance(key, str) else repr(key)}: " for key in tree.keys]
    texts = [label + _describe(child) for label, child in zip(labels or repeat(""), tree.children, strict=False)]
    # Equal elements in a row are written once.
    counted = [(text, len(list(equal))) for text, equal in groupby(texts)]
    inside = ", ".join(text if times == 1 else f"{text} x {times}" for text, times in counted)
    if tree.kind == "l":
        return f"[{inside}]"
    if tree.kind == "u":
        return f"({inside}{',' if len(tree.children) == 1 else ''})"
    if tree.kind == "d":
        return f"{{{inside}}}"
    return f"OrderedDict({{{inside}}})" if tree.kind == "od" else f"{tree.name}({inside})"
