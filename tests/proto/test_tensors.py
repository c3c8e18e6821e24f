"""Batches come back exactly, bit for bit, and one structure is one object."""

from __future__ import annotations

import ctypes
import io
import struct
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from batch_memory import Ring, received, trip
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.proto.batch import flatten, structure
from penstock.proto.batch.flatten import Assembler, Flattener
from penstock.proto.batch.structure import MAX_DEPTH, MAX_LEAVES, Structure
from penstock.proto.batch.tree import TORCH_NAMES
from penstock.proto.errors import StructureChangedError, UnsupportedLeafError

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")

TORCH = list(TORCH_NAMES)
NUMPY = [
    "?", "i1", "<i2", ">i2", "<i4", "<i8", ">i8", "u1", "<u2", "<u4", ">u8", "<f2", "<f4", ">f4", "<f8", "<c8", ">c8",
    "<c16", "<q", "<Q", "S1", "S7", "<U3", ">U2", "<M8[ns]", "<M8[25s]", ">M8[D]", "<M8", "<m8[us]", "<m8",
]  # fmt: skip
SMALL = 1 << 18
"""More than any of `batches` needs: eight leaves of 24 kB at the most."""


class Pair(NamedTuple):
    left: Any
    right: Any


Renamed = namedtuple("Renamed", "a b")


class Holder:
    class Inner(NamedTuple):
        x: Any


@dataclass
class Sample:
    image: Any
    label: Any = None

    def __post_init__(self) -> None:
        raise_if_forbidden()


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Any
    y: Any = field(default=0, kw_only=True)


forbidden = False


def raise_if_forbidden() -> None:
    assert not forbidden, "__post_init__ ran"


def raw(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return ctypes.string_at(plain.data_ptr(), plain.nbytes) if plain.nbytes else b""


def same(a: Any, b: Any) -> None:
    """a arrived as b: types, order, shapes and every bit."""
    assert type(a) is type(b), (type(a), type(b))
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert raw(a) == raw(b)
        assert b.is_contiguous()
        assert not b.requires_grad
        assert b.device.type == "cpu"
    elif isinstance(a, np.ndarray):
        assert (a.dtype.str, a.dtype.char, a.shape) == (b.dtype.str, b.dtype.char, b.shape)
        assert a.tobytes() == b.tobytes()
    elif isinstance(a, (np.str_, np.bytes_)):
        assert len(a) == len(b)
        assert str(a) == str(b)
    elif isinstance(a, np.generic):
        assert a.dtype == b.dtype
        assert a.tobytes() == b.tobytes()
    elif isinstance(a, dict):
        assert [(type(k), k) for k in a] == [(type(k), k) for k in b]
        for key in a:
            same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    elif isinstance(a, float):
        assert struct.pack("<d", a) == struct.pack("<d", b)
    elif hasattr(a, "__dataclass_fields__"):
        for name in a.__dataclass_fields__:
            same(getattr(a, name), getattr(b, name))
    else:
        assert a == b


@st.composite
def some_tensor(draw: Any) -> torch.Tensor:
    dtype = draw(st.sampled_from(TORCH))
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    count = int(np.prod(shape, dtype=int))
    data = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
    if dtype is torch.bool:
        data = bytes(byte & 1 for byte in data)
    flat = torch.empty(count, dtype=dtype)
    ctypes.memmove(flat.data_ptr(), data, len(data))
    tensor = flat.view(shape)
    change = draw(st.sampled_from(["", "t", "stride", "expand", "narrow"]))
    if change == "t":
        tensor = tensor.permute(tuple(reversed(range(tensor.ndim))))
    elif change == "stride" and tensor.ndim:
        tensor = tensor[::2]
    elif change == "expand":
        tensor = tensor.expand(3, *tensor.shape)
    elif change == "narrow" and tensor.ndim > 1:
        tensor = tensor[..., 1:]
    return tensor


@st.composite
def some_array(draw: Any) -> np.ndarray[Any, Any]:
    dtype = np.dtype(draw(st.sampled_from(NUMPY)))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    count = int(np.prod(shape, dtype=int))
    if dtype.kind == "U":
        text = st.text(max_size=dtype.itemsize // 4)
        array = np.array(draw(st.lists(text, min_size=count, max_size=count)), dtype=dtype).reshape(shape)
    else:
        data = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
        if dtype.kind == "b":
            data = bytes(byte & 1 for byte in data)
        array = np.frombuffer(data, dtype).reshape(shape)
    change = draw(st.sampled_from(["", "t", "reverse", "broadcast"]))
    if change == "t":
        array = array.T
    elif change == "reverse" and array.ndim:
        array = array[::-1]
    elif change == "broadcast":
        array = np.broadcast_to(array, (2, *array.shape))
    return array


any_text = st.text(st.characters(exclude_categories=()), max_size=20)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(1 << 300), 1 << 300),
    st.floats(),
    any_text,
    st.binary(max_size=80),
    any_text.filter(lambda text: "\0" not in text).map(np.str_),
    st.floats(width=32).map(np.float32),
    st.integers(0, 255).map(np.uint8),
    st.booleans().map(np.bool_),
    st.integers(-9, 9).map(lambda days: np.datetime64(days, "D")),
)
leaves = st.one_of(scalars, some_tensor(), some_array())
keys = st.one_of(any_text, st.integers(-(1 << 63), (1 << 63) - 1), st.booleans(), st.none())


def containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(children, max_size=4),
        st.lists(children, max_size=4).map(tuple),
        st.dictionaries(keys, children, max_size=4),
        st.dictionaries(keys, children, max_size=3).map(OrderedDict),
        st.builds(Pair, children, children),
        st.builds(Frozen, children, y=children),
        st.builds(Sample, children),
    )


batches = st.recursive(leaves, containers, max_leaves=8)


@settings(max_examples=50, deadline=None)
@given(batches, st.booleans())
def test_every_batch_comes_back_bit_for_bit(batch: Any, copy: bool) -> None:
    expected = batch
    same(expected, trip(batch, copy=copy))


@settings(max_examples=25, deadline=None)
@given(batches)
def test_the_region_is_a_function_of_the_batch(batch: Any) -> None:
    """Whatever was in the slot before: gaps are zeroed, so digests agree."""
    flat = Flattener().flatten(batch)
    assert flat.nbytes % 64 == 0
    first, second = Ring(SMALL, fill=0xFF), Ring(SMALL, fill=0x11)
    first.write(flat)
    second.write(flat)
    assert first.mmap[128 : 128 + flat.nbytes] == second.mmap[128 : 128 + flat.nbytes]


@settings(max_examples=25, deadline=None)
@given(batches)
def test_a_structure_has_one_encoding(batch: Any) -> None:
    made = Flattener().flatten(batch).structure
    again = Structure.from_bytes(made.to_bytes())
    assert again == made
    assert hash(again) == hash(made)
    assert again.key == made.key
    assert again.tree == made.tree
    assert again.leaves == made.leaves
    assert again.dims == made.dims
    assert again.describe() == made.describe()


@pytest.mark.parametrize("dtype", TORCH, ids=str)
@pytest.mark.parametrize(
    ("shape", "change"),
    [
        ((), lambda x: x),
        ((3, 0, 2), lambda x: x),
        ((4, 6), lambda x: x[::2, 1::3].t()),
        ((1, 6), lambda x: x.expand(5, 6)),
        ((2, 3, 4, 4), lambda x: x.contiguous(memory_format=torch.channels_last)),
    ],
    ids=["0d", "empty", "strided", "expanded", "channels_last"],
)
def test_tensors_of_every_dtype(dtype: torch.dtype, shape: tuple[int, ...], change: Callable[[Any], Any]) -> None:
    count = int(np.prod(shape, dtype=int))
    data = np.random.default_rng(0).integers(0, 2 if dtype is torch.bool else 256, count * dtype.itemsize, np.uint8)
    flat = torch.empty(count, dtype=dtype)
    ctypes.memmove(flat.data_ptr(), data.ctypes.data, data.nbytes)
    try:
        tensor = change(flat.view(shape))
        tensor.contiguous()
    except NotImplementedError as error:
        pytest.skip(f"torch itself cannot copy it: {error}")  # float4 in torch 2.8
    same(tensor, trip(tensor))
    same({"x": tensor}, trip({"x": tensor}, copy=True))


def test_nan_payloads_and_negative_zero() -> None:
    bits = torch.tensor([0x7FA00001, 0x7FC12345, -0x00400001, -0x80000000, 0x7F800000], dtype=torch.int32)
    same(bits.view(torch.float32), trip(bits.view(torch.float32)))
    assert trip(bits.view(torch.float32)).view(torch.int32).tolist() == bits.tolist()
    crossed = bits.view(torch.float32).expand(3, 5).t()
    assert trip(crossed).view(torch.int32).tolist() == crossed.contiguous().view(torch.int32).tolist()
    payload = struct.unpack("<d", struct.pack("<Q", 0x7FF800000000BEEF))[0]
    same(payload, trip(payload))
    same(-0.0, trip(-0.0))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_conjugate_and_negative_views(dtype: torch.dtype) -> None:
    x = torch.tensor([[1 + 2j, -0.0 - 3j], [float("nan"), 5j]], dtype=dtype)
    assert x.conj().is_conj()
    assert x.conj().imag.is_neg()
    for view in (
        x.conj(),
        x.conj().imag,
        x.conj().t(),
        x.real,
        x.imag[:, 1],
        x.conj()[0, 1],
        torch._neg_view(x.real.clone()),
    ):
        same(view.clone() if view.is_conj() or view.is_neg() else view, trip(view))


def test_parameters_and_gradients() -> None:
    """requires_grad is dropped, a Parameter travels as a Tensor, and no graph is built."""
    parameter = torch.nn.Parameter(torch.randn(3, 4))
    hidden = (parameter * 2).t()
    got = trip([parameter, hidden, torch.randn(2, requires_grad=True)])
    assert [type(x) for x in got] == [torch.Tensor] * 3
    assert not any(x.requires_grad for x in got)
    assert torch.equal(got[0], parameter)
    assert torch.equal(got[1], hidden)
    plain = Flattener()
    assert plain.flatten(parameter).structure is plain.flatten(torch.randn(3, 4)).structure


class Padding(torch.Tensor):
    """As the Model Zoo's PaddingSample: a subclass whose instances hold nothing of their own."""

    @property
    def is_padding(self) -> bool:
        return True

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("code of the class ran")


def test_subclasses_that_hold_nothing_travel_as_tensors() -> None:
    with torch._C.DisableTorchFunctionSubclass():
        padding = torch.arange(6.0).reshape(2, 3).t().as_subclass(Padding)
    flattener = Flattener()
    for _ in range(2):
        got = trip({"x": padding})["x"]
        assert type(got) is torch.Tensor
        assert got.tolist() == [[0, 3], [1, 4], [2, 5]]
        assert flattener.flatten(padding).structure is flattener.flatten(torch.ones(1, 1)).structure


def test_memmap_travels_as_array(tmp_path: Any) -> None:
    source = np.memmap(tmp_path / "tokens", np.uint16, "w+", shape=(64,))
    source[:] = np.arange(64)
    got = trip(source[3:40])
    assert type(got) is np.ndarray
    assert got.tolist() == list(range(3, 40))
    read_only = np.load(io.BytesIO(_npy(np.arange(4))))
    read_only.flags.writeable = False
    assert trip(read_only).tolist() == [0, 1, 2, 3]


def _npy(array: np.ndarray[Any, Any]) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


@pytest.mark.parametrize("dtype", NUMPY)
def test_arrays_of_every_dtype(dtype: str) -> None:
    if np.dtype(dtype).kind == "U":
        array = np.array([["a", "béc", ""], ["\U0001f600", "x\0y", "zz"]], dtype=dtype)
    else:
        array = np.frombuffer(bytes(range(6 * np.dtype(dtype).itemsize)), np.uint8)
        array = (array & 1 if dtype == "?" else array).view(dtype).reshape(2, 3)
    for view in (array, array.T, array[:, ::-1], array[0, 0:0], array[:, :1], np.asfortranarray(array)):
        same(view, trip(view))
    same(array[0, 0, ...], trip(array[0, 0, ...]))
    assert trip(array).flags.writeable


@pytest.mark.parametrize(
    "value",
    [
        np.float32(3), np.float64("nan"), np.float16(-0.0), np.int8(-3), np.uint64(1 << 63), np.longlong(5),
        np.ulonglong(5), np.bool_(True), np.complex64(1 - 2j), np.datetime64("2024-02-29T12", "h"),
        np.datetime64("NaT", "D"), np.full(1, -(2**63), "q").view("M8")[0],
        np.timedelta64(7, ("s", 25)), np.str_("hé\0"), np.str_(""), np.bytes_(b"a\0"), np.longdouble(1) / 3,
        np.clongdouble(1j), np.intc(3),
    ],
    ids=repr,
)  # fmt: skip
def test_numpy_scalars_keep_their_type(value: Any) -> None:
    same(value, trip(value))
    same([value, {"k": value}], trip([value, {"k": value}]))


@pytest.mark.parametrize(
    "value",
    [
        0, 1, -1, 127, 128, -128, -129, 255, 256, (1 << 63), -(1 << 63), 10**4000, -(10**4000), True, False, 1.5,
        float("inf"), 5e-324, "", "héllo", "\ud800", "\udfff\ud83d\ude00", "x" * 5000, "\0", b"", b"\0\0", b"y" * 4096,
        b"z" * 4097, None,
    ],
    ids=lambda value: repr(value)[:24],
)  # fmt: skip
def test_python_values(value: Any) -> None:
    same(value, trip(value))
    same({"a": [value], "b": (torch.ones(3), value)}, trip({"a": [value], "b": (torch.ones(3), value)}))


def test_the_largest_int() -> None:
    limit = 8 * structure.MAX_INT_BYTES - 1
    for value in ((1 << limit) - 1, -(1 << limit) + 1):
        flat = Flattener().flatten(value)
        ring = Ring(4 << 20)
        ring.write(flat)
        assert Assembler(received(flat)).assemble(flat.shapes, ring.view, 128, flat.nbytes) == value
    with pytest.raises(UnsupportedLeafError, match=r"batch is a int of 8388608 bits"):
        Flattener().flatten(1 << limit)


def test_keys_keep_type_and_order() -> None:
    batch = {"b": 1, "a": 2, 3: 3, -1: 4, None: 5, False: 6, "": 7, "\ud83d\ude00": 8, "\U0001f600": 9, 'é\n"': 10}
    same(batch, trip(batch))
    same(OrderedDict(batch), trip(OrderedDict(batch)))
    one, true = Flattener(), Flattener()
    assert one.flatten({1: 0}).structure != one.flatten({True: 0}).structure
    assert list(map(type, trip({True: 0}))) == [bool]
    assert list(map(type, trip({1: 0}))) == [int]
    same({1: 0}, trip({1: 0}))
    assert true.flatten({0: 1}).structure is not true.flatten({False: 1}).structure


def test_records_are_rebuilt_without_running_code() -> None:
    global forbidden
    batch = [
        Pair(torch.ones(2), 1),
        Frozen(x=[2.0], y="z"),
        Sample(image=np.ones(3)),
        Holder.Inner("deep"),
        Renamed(1, 2),
    ]
    forbidden = True
    try:
        same(batch, trip(batch))
    finally:
        forbidden = False


def test_aliased_and_repeated_leaves_arrive_apart() -> None:
    x = torch.arange(4.0)
    got = trip([x, x, x[1:]])
    got[0][:] = 9
    assert got[1].tolist() == [0, 1, 2, 3]
    assert got[2].tolist() == [1, 2, 3]


def test_deepest_and_widest() -> None:
    deep: Any = torch.ones(2)
    for _ in range(MAX_DEPTH):
        deep = [deep]
    same(deep, trip(deep))
    wide = list(range(1000))
    same(wide, trip(wide))
    flat = Flattener().flatten([None] * 10 + [0.5] * MAX_LEAVES)
    ring = Ring(8 << 20)
    ring.write(flat)
    got = Assembler(received(flat)).assemble(flat.shapes, ring.view, 128, flat.nbytes)
    assert got == [None] * 10 + [0.5] * MAX_LEAVES


def test_flatten_under_default_device() -> None:
    torch.set_default_device("meta")
    try:
        got = trip({"x": torch.ones(3, device="cpu"), "y": torch.empty(0, 3, device="cpu"), "z": 1}, copy=True)
        assert got["x"].device.type == "cpu"
        assert got["y"].device.type == "cpu"
    finally:
        torch.set_default_device(None)
    with torch.inference_mode():
        assert trip(torch.ones(3, 3).t()).sum() == 9


def test_same_structure_same_object() -> None:
    flattener = Flattener()
    first = flattener.flatten({"x": torch.ones(2, 3), "y": [1, "a"], "z": None})
    second = flattener.flatten({"x": torch.zeros(7, 1), "y": [10**50, "bcd"], "z": None})
    assert first.structure is second.structure
    assert first.shapes == [2, 3, 1, 1]
    assert second.shapes == [7, 1, 21, 3]
    assert first.nbytes == 64 * 3
    assert second.nbytes == 64 * 3


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (torch.ones(2), torch.ones(2, 1)),
        (torch.ones(2), torch.ones(2, dtype=torch.float64)),
        (torch.ones(2), np.ones(2, np.float32)),
        (np.ones(2, "<f4"), np.ones(2, ">f4")),
        (np.zeros(2, "<M8[s]"), np.zeros(2, "<M8[ms]")),
        (np.float32(1), np.ones((), np.float32)),
        (np.float64(1), 1.0),
        (np.int64(1), np.longlong(1)),
        (np.str_("x"), "x"),
        (1, 1.0),
        (1, True),
        (None, 1),
        ([1], (1,)),
        ({"x": 1}, OrderedDict(x=1)),
        ({"x": 1, "y": 2}, {"y": 2, "x": 1}),
        ([[1], 2], [1, [2]]),
        ([[], [1]], [[[1]]]),
        (Pair(1, 2), (1, 2)),
        (Pair(1, 2), Renamed(1, 2)),
        (Sample(1, 2), Frozen(1, y=2)),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_what_makes_a_difference(a: Any, b: Any) -> None:
    flattener = Flattener()
    one, two = flattener.flatten(a).structure, flattener.flatten(b).structure
    assert one is not two
    assert one != two
    assert one.key != two.key
    assert flattener.flatten(a).structure is one
    assert flattener.flatten(b).structure is two
    strict = Flattener(strict=True)
    strict.flatten(a)
    with pytest.raises(StructureChangedError):
        strict.flatten(b)


def test_strict_names_both() -> None:
    flattener = Flattener(strict=True)
    first = flattener.flatten({"x": torch.ones(2, 3), "y": torch.ones(2, dtype=torch.int64)})
    for _ in range(2):
        with pytest.raises(StructureChangedError) as caught:
            flattener.flatten({"x": torch.ones(2, 3), "y": torch.ones(2, dtype=torch.int32)})
        assert '{"x": float32[rank 2], "y": int32[rank 1]}' in str(caught.value)
        assert '{"x": float32[rank 2], "y": int64[rank 1]}' in str(caught.value)
    again = flattener.flatten({"x": torch.ones(1, 1), "y": torch.ones(9, dtype=torch.int64)})
    assert again.structure is first.structure


def test_the_flat_batch_holds_its_sources() -> None:
    flat = Flattener().flatten([torch.full((3, 3), 5.0), torch.full((3, 3), 6.0).t(), np.full(4, 7), "x" * 9000])
    _ = [torch.zeros(3, 3) for _ in range(50)]
    ring = Ring()
    ring.write(flat)
    ring.write(flat, 64 * 300)  # and can be written again
    assert ring.mmap[128 : 128 + flat.nbytes] == ring.mmap[64 * 300 : 64 * 300 + flat.nbytes]
    got = Assembler(flat.structure).assemble(flat.shapes, ring.view, 128, flat.nbytes)
    assert got[0].sum() == 45
    assert got[1].sum() == 54
    assert got[2].sum() == 28
    assert got[3] == "x" * 9000


def test_flatten_leaves_the_users_objects_alone() -> None:
    tensor, parameter = torch.ones(4), torch.nn.Parameter(torch.ones(4))
    trip([tensor, parameter, tensor.expand(2, 4)])
    tensor.resize_(0)  # Tensor.numpy() would have made that impossible
    assert parameter.requires_grad
    assert tensor.numel() == 0


def test_large_leaves_take_the_other_road() -> None:
    n = flatten.HOLD_LOCK_UP_TO + 1
    x = torch.randint(0, 255, (n,), dtype=torch.uint8)
    same([x, x.numpy(), x.numpy().tobytes()], trip([x, x.numpy(), x.numpy().tobytes()]))
