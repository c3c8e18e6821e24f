"""The part of a batch that does not change from batch to batch, and how it is announced to a peer.

A `Structure` is the tree of containers, and for each leaf its kind, dtype and rank. Shapes and values are no part of
it: they ride with each batch, so variable lengths and changing strings announce nothing new. The two ends agree on a
Structure once and then name it by an id.

On the wire it is JSON: a format number and one node. JSON because it is safe to read from anyone, keeps int, str,
bool and None keys apart, and is read once per structure, where speed does not count. `from_bytes` accepts only what
`to_bytes` would write, so a structure has one encoding and the hash of that encoding (`key`) is its identity.

    [1,["d",["x","y"],[["t","float32",2],["a","<i8",1]]]]

    null                        None                     ["t",dtype,rank]      torch tensor
    "s" "b" "i" "f" "o"         str bytes int float bool ["a",dtype,rank]      numpy array
    "S" "B"                     numpy.str_, numpy.bytes_ ["n",dtype]           another numpy scalar
    ["d"|"od",keys,nodes]       dict, OrderedDict        ["l"|"u",nodes]       list, tuple
    ["nt"|"dc",name,fields,nodes]                        namedtuple, dataclass

This module knows dtypes by name only and does not import torch, so that a process that merely forwards batches
can check and describe them.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final

import numpy as np
import xxhash

from penstock.proto.errors import ProtocolError, UnsupportedLeafError

__all__ = [
    "ALIGN",
    "MAX_DEPTH",
    "MAX_INT_BYTES",
    "MAX_LEAVES",
    "MAX_RANK",
    "MAX_VALUES",
    "TORCH_DTYPES",
    "Key",
    "Leaf",
    "Node",
    "Path",
    "Structure",
    "Tree",
    "allowed_key",
    "numpy_dtype",
    "numpy_dtype_name",
    "padded",
    "path_steps",
    "render_path",
    "required_nbytes",
]

ALIGN: Final = 64
"""Bytes; every leaf starts at a multiple: a cache line, the widest vector load, torch's own alignment."""

MAX_LEAVES: Final = 65_536
MAX_VALUES: Final = 4 * MAX_LEAVES
"""Leaves, containers and Nones together: what a batch may hold, and so what may be announced."""

MAX_DEPTH: Final = 64
"""Containers inside each other; far below the interpreter's recursion limit, so neither side can be made to hit it."""

MAX_RANK: Final = 32
"""Dimensions of one leaf: what every supported numpy can hold."""

MAX_INT_BYTES: Final = 1 << 20
"""Bytes of one Python int leaf."""

MAX_STRUCTURE_BYTES: Final = 4 << 20
MAX_BRACKETS: Final = 1 << 19
"""An announcement beyond these is refused before it is parsed; 65,536 dicts of one leaf take 2**18 brackets."""

MAX_TEXT: Final = 2000
"""Characters of describe()."""

FORMAT: Final = 1

# Names, for a process without torch; bytes an element. Sub-byte (uint4), bits8 and quantized dtypes are left out:
# torch itself cannot copy the former, and the latter are nothing without their scales.
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
"""Where a value stands in its batch, innermost step last; rendered only when an error names it."""

_SCALARS = {"s": "str", "b": "bytes", "i": "int", "f": "float", "o": "bool", "S": "numpy.str_", "B": "numpy.bytes_"}
_ONE_DIM = frozenset("sbiSB")
_ARRAYS = frozenset("ta")


def padded(nbytes: int) -> int:
    """`nbytes` rounded up to the alignment of leaves."""
    return (nbytes + ALIGN - 1) & -ALIGN


def render_path(path: Path) -> str:
    """A path as Python would write it: `batch['images'][3].label`."""
    steps: list[str] = []
    while path is not None:
        path, step = path
        steps.append(step if len(step) <= 80 else step[:76] + "...]")
    return "batch" + "".join(reversed(steps))


def numpy_dtype_name(dtype: np.dtype[Any]) -> str:
    """The name of a dtype on the wire: numpy's `str` form with byte order, "<q" for the C long long it hides."""
    name = dtype.str
    return name if np.dtype(name).char == dtype.char else name[0] + dtype.char


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The dtype a peer named. Raises ValueError for every name that numpy_dtype_name does not give."""
    if not _NUMPY_NAME.fullmatch(name):
        raise ValueError(f"{name[:80]!r} names no dtype that may travel")
    try:
        dtype = np.dtype(name)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name!r} names no dtype: {error}") from None
    if numpy_dtype_name(dtype) != name:
        raise ValueError(f"{name!r} is not how this dtype is written")
    return dtype


@dataclass(frozen=True, slots=True)
class Leaf:
    """One value whose data ride in the region."""

    kind: str
    """t tensor, a array, n numpy scalar, or one of the letters of the essay."""
    dtype: str = ""
    """torch name for t, numpy name for a and n, else ""."""
    rank: int = 0
    """Dimensions, for t and a."""

    @property
    def dims(self) -> int:
        """How many numbers it takes in `shapes`: its rank; for str, bytes and int one, the byte length; else none."""
        return self.rank if self.kind in _ARRAYS else int(self.kind in _ONE_DIM)

    @property
    def itemsize(self) -> int:
        """Bytes of one element; of all of it where it takes no dims."""
        if self.kind == "t":
            return TORCH_DTYPES[self.dtype]
        if self.kind in "an":
            return np.dtype(self.dtype).itemsize
        return 8 if self.kind == "f" else 1


@dataclass(frozen=True, slots=True)
class Node:
    """One container."""

    kind: str
    """d dict, od OrderedDict, l list, u tuple, nt namedtuple, dc dataclass."""
    children: tuple[Tree, ...]
    keys: tuple[Key, ...] = ()
    """Keys of a dict or names of the fields, as many as children; () for list and tuple."""
    name: str = ""
    """Of the class, for nt and dc."""


Tree = Leaf | Node | None


@dataclass(frozen=True, slots=True)
class Structure:
    """The unchanging part of a batch; equal and hashed by its encoding. Make one with `of` or `from_bytes`."""

    encoded: bytes
    key: int = field(compare=False)
    """64-bit xxh3 of `encoded`: the same in every process."""
    tree: Tree = field(compare=False, repr=False)
    leaves: tuple[Leaf, ...] = field(compare=False, repr=False)
    """In the order of their data in the region: depth first."""
    dims: int = field(compare=False)
    """Length of a batch's `shapes`."""

    def __hash__(self) -> int:
        return self.key

    @classmethod
    def of(cls, tree: Tree) -> Structure:
        """The structure of a tree made in this process. Raises UnsupportedLeafError if it is too long to announce."""
        text = json.dumps([FORMAT, _plain(tree)], ensure_ascii=False, separators=(",", ":"))
        encoded = text.encode("utf-8", "surrogatepass")
        problem = _too_long(encoded)
        if problem:
            raise UnsupportedLeafError(f"the batch's structure takes {problem}; batch its values into fewer tensors")
        leaves = tuple(_leaves(tree))
        return cls(encoded, xxhash.xxh3_64_intdigest(encoded), tree, leaves, sum(leaf.dims for leaf in leaves))

    def to_bytes(self) -> bytes:
        """Compact JSON, UTF-8 (lone surrogates in keys as three bytes each)."""
        return self.encoded

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> Structure:
        """The structure a peer announced. Classes are not looked up here: a forwarding process need not know them.

        Raises ProtocolError for anything that `to_bytes` would not have written.
        """
        data = bytes(data) if len(data) <= MAX_STRUCTURE_BYTES else b""
        problem = _too_long(data) if data else f"0 or more than {MAX_STRUCTURE_BYTES} bytes"
        if problem:
            raise ProtocolError(f"a structure of {problem}")
        try:
            raw = json.loads(data.decode("utf-8", "surrogatepass"), parse_float=_refuse, parse_constant=_refuse)
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"a structure that is no JSON: {str(error)[:200]}") from None
        if type(raw) is not list or len(raw) != 2 or type(raw[0]) is not int:
            raise ProtocolError("a structure is a list of a format number and a node")
        if raw[0] != FORMAT:
            raise ProtocolError(f"a structure of format {str(raw[0])[:20]}; this Penstock reads {FORMAT}")
        count = [0, 0]
        try:
            structure = cls.of(_tree(raw[1], None, 0, count))
        except UnsupportedLeafError as error:
            raise ProtocolError(str(error)) from None
        if structure.encoded != data:
            raise ProtocolError("a structure that is not in its one canonical encoding")
        return structure

    def describe(self) -> str:
        """For messages: `{"x": float32[rank 2], "y": int64[rank 1]}`, cut at 2,000 characters."""
        text = _describe(self.tree, [MAX_TEXT])
        return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 3] + "..."


def required_nbytes(structure: Structure, shapes: Sequence[int]) -> int:
    """Bytes of the region that a batch with these `shapes` takes: what `FlatBatch.nbytes` says.

    Raises ProtocolError if the number of dims or one of them cannot be meant.
    """
    if len(shapes) != structure.dims:
        raise ProtocolError(f"{len(shapes)} dims for a structure that takes {structure.dims}")
    if structure.dims and min(shapes) < 0:
        raise ProtocolError(f"a negative dim: {min(shapes)}")
    at = total = 0
    for leaf in structure.leaves:
        total += padded(prod(shapes[at : at + leaf.dims], start=leaf.itemsize))
        at += leaf.dims
    return total


def _too_long(encoded: bytes) -> str:
    if len(encoded) > MAX_STRUCTURE_BYTES:
        return f"{len(encoded)} bytes to describe, above {MAX_STRUCTURE_BYTES}"
    brackets = encoded.count(b"[") + encoded.count(b"{")
    return f"{brackets} brackets to describe, above {MAX_BRACKETS}" if brackets > MAX_BRACKETS else ""


def _refuse(text: str) -> None:
    raise ValueError(f"a number {text[:40]}")


def _leaves(tree: Tree) -> Iterator[Leaf]:
    if isinstance(tree, Leaf):
        yield tree
    elif tree is not None:
        for child in tree.children:
            yield from _leaves(child)


def _plain(tree: Tree) -> Any:
    """A tree as JSON values."""
    if tree is None:
        return None
    if isinstance(tree, Leaf):
        if tree.kind in _ARRAYS:
            return [tree.kind, tree.dtype, tree.rank]
        return [tree.kind, tree.dtype] if tree.kind == "n" else tree.kind
    children = [_plain(child) for child in tree.children]
    if tree.kind in ("l", "u"):
        return [tree.kind, children]
    if tree.kind in ("d", "od"):
        return [tree.kind, list(tree.keys), children]
    return [tree.kind, tree.name, list(tree.keys), children]


def _tree(raw: Any, path: Path, depth: int, count: list[int]) -> Tree:
    """JSON values as a tree; every wrong one is a ProtocolError with its path. count: leaves, and all values."""
    count[1] += 1
    if count[1] > MAX_VALUES:
        raise _wrong(path, f"more than {MAX_VALUES} values")
    if raw is None:
        return None
    if type(raw) is str and raw in _SCALARS:
        return _counted(Leaf(raw), path, count)
    if type(raw) is not list or not raw or type(raw[0]) is not str:
        raise _wrong(path, "no node")
    kind, *rest = raw
    if kind in ("t", "a", "n"):
        return _counted(_array_leaf(kind, rest, path), path, count)
    if depth >= MAX_DEPTH:
        raise _wrong(path, f"deeper than {MAX_DEPTH}")
    shape = {"l": 1, "u": 1, "d": 2, "od": 2, "nt": 3, "dc": 3}.get(kind)
    if shape != len(rest) or any(type(part) is not list for part in rest[-min(shape, 2) :]):
        raise _wrong(path, "no node")
    nodes, keys = rest[-1], rest[-2] if shape != 1 else []
    name = rest[0] if shape == 3 else ""
    if shape != 1 and len(keys) != len(nodes):
        raise _wrong(path, f"{len(keys)} keys for {len(nodes)} values")
    for key in keys:
        if type(key) is not str and (shape == 3 or not allowed_key(key)):
            raise _wrong(path, f"a key of type {type(key).__name__}")
    if len(set(keys)) != len(keys):
        raise _wrong(path, "two equal keys")
    if shape == 3 and (type(name) is not str or not 0 < len(name) <= 1024):
        raise _wrong(path, "no class name")
    if shape == 3 and not all(key.isidentifier() for key in keys):
        raise _wrong(path, "a field that is no identifier")
    steps = path_steps(kind, keys, len(nodes))
    children = tuple(_tree(node, (path, step), depth + 1, count) for node, step in zip(nodes, steps, strict=True))
    return Node(kind, children, tuple(keys), name)


def path_steps(kind: str, keys: Sequence[Key], count: int) -> Iterator[str]:
    """The steps from a container of a Node's `kind` to its children, for a Path."""
    if kind in ("l", "u"):
        return (f"[{i}]" for i in range(count))
    return (f"[{key!r}]" for key in keys) if kind in ("d", "od") else (f".{key}" for key in keys)


def allowed_key(key: object) -> bool:
    """Whether a dict key other than a str may travel."""
    return key is None or type(key) is bool or (type(key) is int and -(1 << 63) <= key < 1 << 63)


def _array_leaf(kind: str, rest: list[Any], path: Path) -> Leaf:
    if len(rest) != (1 if kind == "n" else 2) or type(rest[0]) is not str:
        raise _wrong(path, "no leaf")
    name, rank = rest[0], 0 if kind == "n" else rest[1]
    if type(rank) is not int or not 0 <= rank <= MAX_RANK:
        raise _wrong(path, f"a rank outside 0 to {MAX_RANK}")
    if kind == "t":
        if name not in TORCH_DTYPES:
            raise _wrong(path, f"no tensor dtype that may travel: {name[:80]!r}")
    else:
        try:
            dtype = numpy_dtype(name)
        except ValueError as error:
            raise _wrong(path, str(error)) from None
        if kind == "n" and (dtype.kind in "SU" or dtype.byteorder == (">" if sys.byteorder == "little" else "<")):
            raise _wrong(path, f"no scalar has dtype {name!r}")
    return Leaf(kind, name, rank)


def _counted(leaf: Leaf, path: Path, count: list[int]) -> Leaf:
    count[0] += 1
    if count[0] > MAX_LEAVES:
        raise _wrong(path, f"more than {MAX_LEAVES} leaves")
    return leaf


def _wrong(path: Path, what: str) -> ProtocolError:
    return ProtocolError(f"a structure that cannot be: {render_path(path)}: {what}")


def _describe(tree: Tree, room: list[int]) -> str:
    """Text of a tree; `room` is what is left of the characters, so that a huge structure costs no more than its cut."""
    if isinstance(tree, Leaf):
        text = (
            _SCALARS.get(tree.kind)
            or {
                "t": f"{tree.dtype}[rank {tree.rank}]",
                "a": f"ndarray {tree.dtype}[rank {tree.rank}]",
                "n": f"numpy scalar {tree.dtype}",
            }[tree.kind]
        )
        room[0] -= len(text)
        return text
    if tree is None:
        return "None"
    parts: list[tuple[str, int]] = []
    labelled = tree.kind not in ("l", "u")
    for i, child in enumerate(tree.children):
        if room[0] <= 0:
            parts.append(("...", 1))
            break
        label = ""
        if labelled:
            key = tree.keys[i]
            label = (json.dumps(key) if isinstance(key, str) else repr(key)) + ": "
            label = f"{key}=" if tree.kind in ("nt", "dc") else label
            room[0] -= len(label)
        before = room[0]
        text = label + _describe(child, room)
        if parts and parts[-1][0] == text:
            parts[-1] = (text, parts[-1][1] + 1)
            room[0] = before  # a run of equal elements is written once
        else:
            parts.append((text, 1))
    inside = ", ".join(text if times == 1 else f"{text} x {times}" for text, times in parts)
    if tree.kind == "l":
        return f"[{inside}]"
    if tree.kind == "u":
        return f"({inside}{',' if len(tree.children) == 1 else ''})"
    if tree.kind == "d":
        return f"{{{inside}}}"
    return f"OrderedDict({{{inside}}})" if tree.kind == "od" else f"{tree.name}({inside})"
