"""Assembly of a received batch, from its shapes and the part of a ring that holds its bytes.

Each tensor and array wraps its own slice of the ring, so that `torch.save` of one leaf saves only that leaf. All have
one `_Region` as base object. When the last view is gone, Python deletes the region, which appends `token` to the deque
`release`, so that the caller can reuse the memory. The deletion takes no lock (the garbage collector may run while one
is held), uses no socket, and does nothing in a forked child. A weakref.finalize would cost 1.2 us more.

numpy shortens a chain of bases (leaf, region, ring) if the ring has the same type as the leaf: Python would then delete
the region at once. So ring and region are two subclasses of ndarray (a test checks this).

All input except the compiled structure comes from a peer. Dimensions are multiplied as Python ints, which cannot
overflow, and compared with the region's size before memory is read."""

from __future__ import annotations

import os
import struct
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from math import prod
from typing import Any, Final

import numpy as np
import torch

from penstock.proto.batch.classes import resolve_class
from penstock.proto.batch.pytrees import maker
from penstock.proto.batch.structure import MAX_INT_BYTES, Leaf, Structure, Tree, numpy_dtype
from penstock.proto.batch.tree import TORCH_NAMES
from penstock.proto.errors import InvalidArgumentError, UnsupportedLeafError, malformed

_unpack_float = struct.Struct("<d").unpack_from
_U8: Final = np.dtype(np.uint8)


def _carrier(dtype: torch.dtype) -> tuple[np.dtype[Any], torch.dtype | None]:
    try:
        native = np.dtype(TORCH_NAMES[dtype])
        if torch.from_numpy(np.empty(0, native)).dtype is dtype:
            return native, None
    except TypeError:
        pass
    return np.dtype(f"i{dtype.itemsize}"), dtype


CARRIERS: Final = {dtype: _carrier(dtype) for dtype in TORCH_NAMES}
"""torch dtype -> (numpy dtype of its bytes, torch dtype to view as, or None): bfloat16 -> (int16, bfloat16)."""


class _Ring(np.ndarray[Any, np.dtype[np.uint8]]):
    __slots__ = ()


class _Region(np.ndarray[Any, np.dtype[np.uint8]]):
    """Base object of all views of a batch. A view that a user makes of it has no `release`, and appends nothing."""

    __slots__ = ("pid", "release", "token")

    pid: int
    release: deque[int] | None
    token: int

    def __del__(self, getpid: Callable[[], int] = os.getpid) -> None:
        try:
            if self.release is not None and self.pid == getpid():
                self.release.append(self.token)
        except AttributeError:
            pass


def wrap_buffer(buffer: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return a writable buffer as a uint8 array, the form of a ring that `Assembler.assemble` handles fastest. While it
    or a view exists, `mmap.close()` raises BufferError. Raises InvalidArgumentError for read-only memory."""
    ring = np.frombuffer(buffer, _U8).view(_Ring)
    if not ring.flags.writeable:
        raise InvalidArgumentError("buffer must be writable memory, got read-only memory: pass a writable buffer")
    return ring


# Kinds of leaves for an Assembler.
_TENSOR, _ARRAY, _SCALAR, _FLOAT, _BOOL, _BYTES = range(6)


class Assembler:
    """Maker of batches of one structure. Raises UnsupportedLeafError for a class or dtype that is not here."""

    __slots__ = ("_build", "_dims", "_plan", "_scalars", "structure")

    def __init__(self, structure: Structure) -> None:
        self.structure = structure
        self._dims = structure.dims
        self._plan = [_plan_of(leaf) for leaf in structure.leaves]
        self._scalars = any(plan[0] > _ARRAY for plan in self._plan)
        self._build = _builder(structure.tree)

    def assemble(
        self,
        shapes: Sequence[int],
        buffer: Any,
        offset: int,
        nbytes: int,
        release: deque[int] | None = None,
        token: int = 0,
        copy: bool = False,
        move: Callable[[list[Any]], list[Any]] | None = None,
    ) -> Any:
        """Return the batch whose bytes are the `nbytes` bytes at `offset` of `buffer`.

        Args:
            shapes: FlatBatch.shapes of the batch: the dimensions of all leaves, in order.
            buffer: writable memory, preferably from wrap_buffer, of which tensors and arrays are writable views.
            offset: position of the batch in the buffer in bytes, a multiple of 64.
            release: deque to which `token` is appended once, when the last view is gone; at once if there is none.
            copy: make the leaves copies instead of views.
            move: called with all leaves in order, and returns those to build the batch from (such as copies on a GPU).
                The caller then keeps the memory as long as `move` needs it, and passes no `release`.

        Raises ProtocolError if shapes, nbytes and bytes do not fit together, and UnsupportedLeafError if a function
        that is registered for a type cannot make the value; then no token is appended."""
        ring = buffer if type(buffer) is _Ring else wrap_buffer(buffer)
        if type(shapes) is not list:
            shapes = list(shapes)
        if len(shapes) != self._dims or (shapes and min(shapes) < 0):
            raise malformed(f"the structure of a batch needs {self._dims} dimensions >= 0, got {len(shapes)}")
        if offset < 0 or nbytes < 0 or offset + nbytes > ring.size:
            raise malformed(f"a batch of {nbytes} bytes at {offset} must lie within its buffer of {ring.size} bytes")
        memory = ring.data if self._scalars else None
        values: list[Any] = []
        region: Any = None
        at = start = 0
        for kind, dims, itemsize, dtype, extra in self._plan:
            if dims:
                shape = shapes[at : at + dims]
                at += dims
                size = prod(shape, start=itemsize)
            else:
                shape = []
                size = itemsize
            if start + size > nbytes:
                raise malformed(f"a leaf must end within its batch of {nbytes} bytes, got {start + size}")
            if kind <= _ARRAY:
                if size:
                    if region is None:
                        if copy:
                            region = torch.empty(nbytes, dtype=torch.uint8, device="cpu").numpy()
                            region[...] = ring[offset : offset + nbytes]
                        else:
                            region = _Region(nbytes, _U8, ring, offset)
                    array = np.ndarray(shape, dtype, region, start)
                else:
                    array = _empty(shape, dtype)
                if kind == _TENSOR:
                    tensor = torch.from_numpy(array)
                    values.append(tensor if extra is None else tensor.view(extra))
                else:
                    values.append(array)
            else:
                values.append(_scalar(kind, memory, offset + start, size, dtype, extra))
            start += (size + 63) & -64
        if start != nbytes:
            raise malformed(f"the leaves of a batch must fill its {nbytes} bytes, got leaves of {start} bytes")
        if move is not None:
            values = move(values)
        batch = self._build(iter(values))
        if release is not None:
            if region is None or copy:
                release.append(token)
            else:
                region.pid = os.getpid()
                region.token = token
                region.release = release
        return batch


def _empty(shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    try:
        return np.ndarray(shape, dtype, bytearray())  # without a buffer numpy 1 allocates an item, of any width
    except (ValueError, OverflowError) as error:
        raise malformed(f"numpy cannot make an array with the dimensions {str(list(shape))[:200]}: {error}") from None


def _scalar(kind: int, memory: Any, start: int, size: int, dtype: Any, decode: Any) -> Any:
    if kind == _FLOAT:
        return _unpack_float(memory, start)[0]
    if kind == _SCALAR:
        return np.ndarray((), dtype, memory, start)[()]
    # Copied first: the peer could change the bytes while they are decoded.
    data = memory[start : start + size].tobytes()
    if kind == _BYTES:
        try:
            return decode(data)
        except ValueError as error:
            raise malformed(f"a str, bytes or int in a batch cannot be decoded: {str(error)[:200]}") from None
    if data > b"\1":
        raise malformed(f"a bool in a batch must be the byte 0 or 1, got {data[0]}")
    return data == b"\1"


def _to_int(data: bytes) -> int:
    if not 0 < len(data) <= MAX_INT_BYTES:
        raise ValueError(f"an int must have 1 to {MAX_INT_BYTES} bytes, got {len(data)}")
    return int.from_bytes(data, "little", signed=True)


def _to_str(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def _to_numpy_str(data: bytes) -> np.str_:
    return np.str_(_to_str(data))


_FROM_BYTES: Final[dict[str, Callable[[bytes], Any]]] = {
    "s": _to_str,
    "b": bytes,
    "i": _to_int,
    "S": _to_numpy_str,
    "B": np.bytes_,
}

_LeafPlan = tuple[int, int, int, Any, Any]


def _plan_of(leaf: Leaf) -> _LeafPlan:
    """What `assemble` needs to know about a leaf. Raises UnsupportedLeafError for a dtype that torch lacks."""
    if leaf.kind == "t":
        dtype = getattr(torch, leaf.dtype, None)
        if dtype not in CARRIERS:
            raise UnsupportedLeafError(f"the batch has a {leaf.dtype} tensor: install the workers' version of torch")
        return (_TENSOR, leaf.rank, leaf.itemsize, *CARRIERS[dtype])
    if leaf.kind in "an":
        return (_ARRAY if leaf.kind == "a" else _SCALAR, leaf.rank, leaf.itemsize, numpy_dtype(leaf.dtype), None)
    kind = {"f": _FLOAT, "o": _BOOL}.get(leaf.kind, _BYTES)
    return (kind, leaf.dims, leaf.itemsize, None, _FROM_BYTES.get(leaf.kind))


def _builder(tree: Tree) -> Callable[[Iterator[Any]], Any]:
    if tree is None:
        return lambda leaves: None
    if isinstance(tree, Leaf):
        return next
    children, keys, count = [_builder(child) for child in tree.children], tree.keys, len(tree.children)
    if all(child is next for child in children):

        def values(leaves: Iterator[Any]) -> Iterable[Any]:
            return islice(leaves, count)
    else:

        def values(leaves: Iterator[Any]) -> Iterable[Any]:
            return [child(leaves) for child in children]

    if tree.kind == "d":
        return lambda leaves: dict(zip(keys, values(leaves), strict=True))
    if tree.kind == "od":
        return lambda leaves: OrderedDict(zip(keys, values(leaves), strict=True))
    if tree.kind == "l":
        return lambda leaves: list(values(leaves))
    if tree.kind == "u":
        return lambda leaves: tuple(values(leaves))
    if tree.kind == "pt":
        make = maker(tree.name, tree.children)
        return lambda leaves: make(list(values(leaves)))
    if tree.kind == "nt":
        named = resolve_class(tree.name, "nt", tree.keys)  # type: ignore[arg-type]
        return lambda leaves: tuple.__new__(named, values(leaves))
    record = resolve_class(tree.name, "dc", tree.keys)  # type: ignore[arg-type]

    def rebuild(leaves: Iterator[Any]) -> Any:
        instance: Any = object.__new__(record)
        for name, value in zip(keys, values(leaves), strict=True):
            object.__setattr__(instance, name, value)  # type: ignore[arg-type]
        return instance

    return rebuild
