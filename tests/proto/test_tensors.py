"""Batches come back exactly, bit for bit, and one structure is one object."""

from __future__ import annotations

import ctypes
import struct
from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from batch_memory import Ring, received, trip
from hypothesis import given, settings
from hypothesis import strategies as st
from round_trips import fingerprint

from penstock.proto.batch import flatten, structure
from penstock.proto.batch.flatten import Assembler, Flattener
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


def same(a: Any, b: Any) -> None:
    """a arrived as b: types, order, shapes and every bit."""
    assert fingerprint(a) == fingerprint(b)


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
ARRAYS = [
    *(torch.arange(6.0).reshape(2, 3).t(), torch.ones(0, 3), torch.ones(2).bfloat16(), torch.tensor(3), torch.ones(70)),
    *(np.arange(6, dtype=">i2")[::2], np.zeros((2, 0)), np.array(["é", ""]), np.array(b"x"), np.ones((3, 3)).T),
]
leaves = st.one_of(scalars, st.sampled_from(ARRAYS))
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


@pytest.mark.parametrize("dtype", TORCH, ids=str)
def test_tensors_of_every_dtype(dtype: torch.dtype) -> None:
    data = np.random.default_rng(0).integers(0, 2 if dtype is torch.bool else 256, 24 * dtype.itemsize, np.uint8)
    flat = torch.empty(24, dtype=dtype)
    ctypes.memmove(flat.data_ptr(), data.ctypes.data, data.nbytes)
    strided = flat.view(4, 6)[::2, 1::3].t()
    try:
        strided.contiguous()
    except NotImplementedError as error:
        pytest.skip(f"torch itself cannot copy it: {error}")  # float4 in torch 2.8
    tensors = [flat.view(4, 6), flat[0], flat[:0].view(3, 0, 2), flat[:6].expand(5, 6), strided]
    same(tensors, trip(tensors))
    same(tensors, trip(tensors, copy=True))


def test_nan_payloads_and_negative_zero() -> None:
    bits = torch.tensor([0x7FA00001, 0x7FC12345, -0x00400001, -0x80000000, 0x7F800000], dtype=torch.int32)
    same(bits.view(torch.float32), trip(bits.view(torch.float32)))
    assert trip(bits.view(torch.float32)).view(torch.int32).tolist() == bits.tolist()
    crossed = bits.view(torch.float32).expand(3, 5).t()
    assert trip(crossed).view(torch.int32).tolist() == crossed.contiguous().view(torch.int32).tolist()
    payload = struct.unpack("<d", struct.pack("<Q", 0x7FF800000000BEEF))[0]
    assert struct.pack("<d", trip(payload)) == struct.pack("<d", payload)
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


@pytest.mark.parametrize("dtype", NUMPY)
def test_arrays_of_every_dtype(dtype: str) -> None:
    if np.dtype(dtype).kind == "U":
        array = np.array([["a", "béc", ""], ["\U0001f600", "x\0y", "zz"]], dtype=dtype)
    else:
        array = np.frombuffer(bytes(range(6 * np.dtype(dtype).itemsize)), np.uint8)
        array = (array & 1 if dtype == "?" else array).view(dtype).reshape(2, 3)
    for view in (array, array.T, array[:, ::-1], array[0, 0:0], array[:, :1], np.broadcast_to(array, (2, 2, 3))):
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
        (np.ones(2, "<f4"), np.ones(2, ">f4")),
        (np.int64(1), np.longlong(1)),
        (1, True),
        ([1], (1,)),
        ({"x": 1}, OrderedDict(x=1)),
        ({"x": 1, "y": 2}, {"y": 2, "x": 1}),
        ([[1], 2], [1, [2]]),
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
