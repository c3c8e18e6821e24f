"""State envelopes: what goes in comes out, exactly, and what cannot is refused by its key path."""

from __future__ import annotations

import base64
import collections
import enum
import json
import math
import random
import re
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from round_trips import fingerprint, same

from penstock.proto.errors import UnsupportedStateError
from penstock.proto.state import codec as state
from penstock.proto.state import state_json
from penstock.proto.state.codec import decode_state, encode_state
from penstock.proto.state.envelope import MAX_DEPTH
from penstock.proto.state.state_json import state_as_json

# torch says it once a process, at the first complex32 that it allocates, and at the first bcomplex32, which torch 2.14
# has; see test_decoding_warns_of_nothing.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf", "ignore:BComplex32")

DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
TENSOR_DTYPES = [d for d in DTYPES if "torch.qu" not in str(d) and "torch.qi" not in str(d)]


# --- round trips ------------------------------------------------------------------------------------------------------


def is_hashable(value: object) -> bool:
    try:
        hash(value)
    except (TypeError, ValueError, OverflowError):  # numpy's: timedelta64 without a unit; datetime64 far from now
        return False
    return True


def tensor_of(dtype: torch.dtype, shape: list[int], raw: bytes) -> torch.Tensor:
    count = math.prod(shape)
    data = torch.tensor(list((raw * (count * dtype.itemsize + 1))[: count * dtype.itemsize]), dtype=torch.uint8)
    if dtype is torch.bool:
        data = data % 2
    return data.view(dtype).view(shape)


texts = st.text(st.characters(exclude_categories=()), max_size=8)
shapes = st.lists(st.integers(0, 3), max_size=4)
tensors = st.builds(tensor_of, st.sampled_from(TENSOR_DTYPES), shapes, st.binary(min_size=1, max_size=64))
ODD_DTYPES = [np.dtype(code) for code in ("q", "Q", ">q", "V3", ">c8", ">f2", "<M8[25us]", "m8", ">m8[D]", "S3", ">u2")]
drawn_dtypes = hnp.scalar_dtypes() | hnp.byte_string_dtypes(min_len=1) | hnp.unicode_string_dtypes(min_len=1)
UNITLESS = np.full(1, 3, "q").view("m8")[0], np.full(1, -(2**63), "q").view("M8")[0]
"""A timedelta64 and a NaT as older numpy makes them; newer ones warn where they are asked for one."""
numpy_dtypes = drawn_dtypes | st.sampled_from([*ODD_DTYPES, np.dtype("g"), np.dtype("G")])
arrays = st.one_of(
    drawn_dtypes.flatmap(lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, min_side=0, max_side=3))),
    st.builds(
        lambda dtype, shape, raw: np.frombuffer(raw, dtype, math.prod(shape)).reshape(shape),
        st.sampled_from(ODD_DTYPES),
        st.lists(st.integers(0, 2), max_size=3),
        st.binary(min_size=128, max_size=128),
    ),
)
numpy_scalars = st.one_of(
    numpy_dtypes.map(lambda dtype: np.zeros((), dtype)[()]),
    arrays.filter(lambda a: a.size > 0).map(lambda a: a.reshape(-1)[-1]),
    texts.map(np.str_),
    st.binary(max_size=8).map(np.bytes_),
)
hashable_leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**200), 2**200),
    st.floats(),
    st.complex_numbers(),
    texts,
    st.binary(max_size=40),
    st.sampled_from(DTYPES),
    st.sampled_from([torch.device("cpu"), torch.device("cuda", 3), torch.device("meta")]),
    st.lists(st.integers(0, 9), max_size=4).map(torch.Size),
    st.builds(range, st.integers(), st.integers(), st.integers(1, 2**70)),
    numpy_dtypes,
    numpy_scalars.filter(is_hashable),
)
keys = st.recursive(hashable_leaves, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=4)
leaves = st.one_of(
    hashable_leaves,
    numpy_scalars,
    tensors,
    arrays,
    st.binary(max_size=8).map(bytearray),
    st.lists(st.integers(-(2**65), 2**65), min_size=30, max_size=40),
    st.lists(st.integers(0, 2**32), min_size=30, max_size=40).map(tuple),
    st.lists(st.floats(), min_size=30, max_size=40),
    st.sets(keys, max_size=4),
    st.frozensets(st.integers(), min_size=30, max_size=40),
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(texts | st.just("$"), inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4).map(OrderedDict),
        st.builds(slice, inner, inner, inner),
    ),
    max_leaves=12,
)


@settings(max_examples=50, deadline=None)
@given(values)
@example({"$": 1})
@example([{"$": [], "a": {"$": {}}}])
@example({1: "int", 1.5: "float", None: 0, (1, ("a", b"b")): [], b"": {}, False: 1, "1": 2})
@example(["\ud83d\ude00", "\U0001f600", "\ud800", "\0\n\x7f\u2028"])
@example([10**5000, -(10**5000), 2**64, 2**64 - 1, -(2**63), -(2**63) - 1])
@example([math.nan, math.inf, -math.inf, -0.0, 5e-324, 1e308, 0.1])
@example([True] * 40)
@example([1] * 39 + [True])
@example([2**63] * 40)
@example(np.str_("a\0"))
@example(
    [np.longlong(3), np.int64(3), np.ulonglong(3), np.zeros(2, "q"), np.zeros(2, "l"), np.dtype("q"), np.dtype("l")]
)
@example(np.ndarray((2, 3), "S0", bytearray()))
def test_round_trip(value: object) -> None:
    same(value)


SHOWN: list[tuple[Any, Any]] = [
    ({"a": [1, (True, "\ud800")], "$b": None}, {"a": [1, [True, "\ud800"]], "$b": None}),
    ({"$": 1}, {"$": "dict", "items": [["$", 1]]}),
    ({1: 2.5, (2, "c"): b"\0\xff"}, {"$": "dict", "items": [[1, 2.5], [[2, "c"], {"$": "bytes", "base64": "AP8="}]]}),
    ([2**64 - 1, 2**64], [2**64 - 1, {"$": "int", "value": hex(2**64)}]),
    ([math.inf, 2j], [{"$": "float", "value": "inf"}, {"$": "complex", "value": [0.0, 2.0]}]),
    ((2.5, math.nan) * 20, [2.5, {"$": "float", "value": "nan"}] * 20),
    ([{3}, frozenset()], [{"$": "set", "items": [3]}, {"$": "set", "items": []}]),
    ([bytearray(b"\xff"), np.bytes_(b"\xff"), np.str_("s")], [{"$": "bytes", "base64": "/w=="}] * 2 + ["s"]),
    ([range(3), slice(2)], [{"$": "range", "value": [0, 3, 1]}, {"$": "slice", "value": [None, 2, None]}]),
    ([torch.float16, np.dtype(">f4")], [{"$": "dtype", "value": "float16"}, {"$": "np.dtype", "value": ">f4"}]),
    ([torch.device("cuda", 3), torch.Size([2])], [{"$": "device", "value": "cuda:3"}, [2]]),
    (OrderedDict(a=np.float32(1)), {"a": {"$": "array", "dtype": "<f4", "shape": [], "base64": "AACAPw=="}}),
    (np.array([["a"]]), {"$": "array", "dtype": "<U1", "shape": [1, 1], "base64": "YQAAAA=="}),
    (np.zeros(1, "<M8[25us]"), {"$": "array", "dtype": "<M8[25us]", "shape": [1], "base64": "AAAAAAAAAAA="}),
]


@pytest.mark.parametrize(("value", "shown"), SHOWN, ids=lambda value: "")
def test_json_shows_what_the_page_says(value: Any, shown: Any) -> None:
    assert json.loads(state_as_json(encode_state(value))) == shown


def test_json_shows_every_tensor() -> None:
    for dtype in TENSOR_DTYPES:
        tensor = tensor_of(dtype, [2, 1], bytes(range(64)))
        shown = json.loads(state_as_json(encode_state([tensor, 1])))[0]
        assert (shown["$"], shown["dtype"], shown["shape"]) == ("tensor", str(dtype).removeprefix("torch."), [2, 1])
        assert base64.b64decode(shown["base64"]) == fingerprint(tensor)[-1]


@pytest.mark.parametrize("dtype", TENSOR_DTYPES, ids=str)
def test_every_tensor_dtype(dtype: torch.dtype) -> None:
    value = tensor_of(dtype, [4, 6], bytes(range(1, 200)))
    plain = [tensor_of(dtype, shape, bytes(range(1, 200))) for shape in ([], [0], [3, 0, 2], [5])]
    for back in same([value, *plain, value[::2, 1::3], value.t(), value[1:, 2:], value[:1].expand(3, 6)]):
        assert back.is_contiguous()
        assert not back.requires_grad


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype.is_complex and dtype.itemsize == 4], ids=str)
def test_decoding_warns_of_nothing(dtype: torch.dtype) -> None:
    data = encode_state(tensor_of(dtype, [3], b"\1"))
    torch.set_warn_always(True)  # and not only at the first of the process, which may be long past
    try:
        with pytest.warns(UserWarning, match="experimental"):
            torch.empty(3, dtype=dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert cast(Any, decode_state(data)).dtype is dtype
    finally:
        torch.set_warn_always(False)


def test_lazy_views_are_resolved() -> None:
    value = torch.tensor([1 + 2j, 3 - 4j])
    same([value.conj(), value.conj().imag, value.conj()[::2], value[:1].conj().imag])
    assert torch.equal(decode_state(encode_state(value.conj().imag)), torch.tensor([-2.0, 4.0]))  # type: ignore[arg-type]


def test_parameters_come_back_plain_and_detached() -> None:
    parameter = torch.nn.Parameter(torch.randn(3, 3))
    for value in (parameter, parameter.t(), torch.randn(2, requires_grad=True) * 2):
        back = same(value)
        assert type(back) is torch.Tensor
        assert back.is_leaf
        assert not back.requires_grad


@pytest.mark.parametrize("size", [10, 1 << 19], ids=["small", "large"])
def test_the_users_tensor_is_left_as_it_was(size: int) -> None:
    value = torch.zeros(size)
    encode_state(value)
    value.resize_(2 * size)  # Tensor.numpy() would have made this an error


def test_decoded_tensors_are_ordinary() -> None:
    back: Any = decode_state(encode_state(torch.arange(6.0)))
    assert back._base is None
    back.resize_(100)


def test_arrays_of_any_layout_and_byte_order() -> None:
    value = np.arange(24.0).reshape(2, 3, 4)
    same([value.T, value[:, ::2], value[..., ::-1], np.asfortranarray(value[0]), value.astype(">f4"), value[1, 2, 3]])
    same(np.array([["2020-01-01", "NaT"]], "M8[ns]").T)


def test_order_and_metadata_of_dicts() -> None:
    value = OrderedDict([("b", 1), ("a", 2)])
    value._metadata = OrderedDict([("", {"version": 2})])  # type: ignore[attr-defined]
    assert vars(same(value)) == vars(value)
    assert list(same({"z": 1, 3: 2, "a": 3})) == ["z", 3, "a"]
    assert len(same({math.nan: 1, float("nan"): 2})) == 2


def test_equal_sets_have_equal_bytes() -> None:
    names = [f"n{i}" for i in range(100)]
    backwards = names[::-1]
    assert encode_state(set(names)) == encode_state(set(backwards))


def test_long_runs_of_numbers_are_compact() -> None:
    assert len(encode_state(random.getstate())) < 2700
    assert len(encode_state(list(range(2**40, 2**40 + 1000)))) < 8100
    assert len(encode_state([0.1] * 1000)) < 8100


def test_input_may_be_any_buffer() -> None:
    data = encode_state({"a": torch.arange(3)})
    spaced = memoryview(b"".join(bytes([b, 0]) for b in data))[::2]
    shifted = memoryview(b"x" + data)[1:]  # misaligned
    for buffer in (bytearray(data), memoryview(data), spaced, shifted, np.frombuffer(data, np.int8).data):
        assert fingerprint(decode_state(buffer)) == fingerprint({"a": torch.arange(3)})


# --- independence -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [4, 1 << 18], ids=["small", "large"])
def test_encoded_state_is_independent_of_source(count: int) -> None:
    value: dict[str, Any] = {
        "tensor": torch.ones(count),
        "view": torch.ones(2, count).t(),
        "array": np.ones(count),
        "dates": np.zeros(count, "M8[s]"),
        "bytes": bytearray(count),
        "list": [1.0] * 50,
        "set": {1},
    }
    data = encode_state(value)
    before = fingerprint(value)
    value["tensor"].fill_(2)
    value["view"].fill_(2)
    value["array"].fill(2)
    value["dates"][:] = np.datetime64(7, "s")
    value["bytes"][:] = b"\1" * count
    value["list"][0] = 2.0
    value["set"].add(2)
    assert fingerprint(decode_state(data)) == before


@pytest.mark.parametrize("count", [0, 4, 1 << 18], ids=["empty", "small", "large"])
def test_decoded_values_own_their_memory(count: int) -> None:
    value: dict[str, Any] = {
        "tensor": torch.ones(count),
        "half": torch.ones(count, dtype=torch.bfloat16),
        "array": np.ones(count),
        "bytes": b"\1" * count,
        "bytearray": bytearray(count),
    }
    data = bytearray(encode_state(value))
    back: Any = decode_state(data)
    other: Any = decode_state(data)
    data[:] = bytes(len(data))
    data.clear()  # and nothing still holds the buffer: this would be a BufferError
    assert fingerprint(back) == fingerprint(value)
    back["tensor"].fill_(2)
    back["half"].fill_(2)
    back["array"][:] = 2
    back["bytearray"][:] = b"\2" * count
    assert fingerprint(other) == fingerprint(value)


# --- refusals ---------------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    left: int
    right: int


class Colour(enum.IntEnum):
    RED = 1


class Counter:
    """An object of the user's own."""

    def state_dict(self) -> dict[str, int]:
        return {}


def odd_ordered() -> OrderedDict[str, int]:
    value: OrderedDict[str, int] = OrderedDict(a=1)
    value.note = 1  # type: ignore[attr-defined]
    return value


def bad_metadata() -> OrderedDict[str, int]:
    value: OrderedDict[str, int] = OrderedDict(a=1)
    value._metadata = {"x": object()}  # type: ignore[attr-defined]
    return value


def freed() -> torch.Tensor:
    value = torch.ones(4)
    value.untyped_storage().resize_(0)
    return value


REFUSED: list[tuple[Any, str, str, str]] = [
    (object(), "state is a ", "builtins.object", "plain values"),
    ({"sampler": [0, 1, np.random.default_rng()]}, "state['sampler'][2] is", "Generator", ".bit_generator.state"),
    ({3: (0, {"x": Pair(1, 2)})}, "state[3][1]['x'] is", "Pair", "plain"),
    ({"a": [1] * 40 + [Colour.RED]}, "state['a'][40] is", "Colour", ".value"),
    ({"a": collections.defaultdict(int)}, "state['a'] is", "defaultdict", "dict"),
    ({(1, 2): len}, "state[(1, 2)] is", "builtin_function", "name"),
    ({"a": {0: 0, (1, Colour.RED): 2}}, "list(state['a'])[1][1] is", "Colour", ".value"),
    ({"s": {("a", Colour.RED)}}, "list(state['s'])[0][1] is", "Colour", ".value"),
    ({"it": iter([1])}, "state['it'] is", "list_iterator", "number of items"),
    ([odd_ordered()], "state[0] is an OrderedDict with attributes (note)", "", "items"),
    ([bad_metadata()], "state[0]._metadata['x'] is", "object", "plain"),
    ({"t": torch.ones(3).to_sparse()}, "state['t'] is a tensor without plain memory", "sparse", "dense"),
    ({"t": freed()}, "state['t'] is a tensor whose storage has been freed", "", "Save"),
    ({"m": torch.nn.Linear(1, 1)}, "state['m'] is", "Linear", "state_dict()"),
    ({"c": Counter()}, "state['c'] is", "Counter", "state_dict()"),
    ({"a": np.array([object()])}, "state['a'] has the numpy dtype object", "", "plain arrays"),
    ({"a": np.zeros(2, "i4,f8")}, "state['a'] has the numpy dtype [('f0'", "", "plain arrays"),
    ({"a": np.ma.masked_array([1])}, "state['a'] is", "MaskedArray", "np.asarray"),
    ({"b": memoryview(b"")}, "state['b'] is", "memoryview", "bytes"),
]


@pytest.mark.parametrize(("value", "begins", "names", "remedy"), REFUSED, ids=[begins for _, begins, _, _ in REFUSED])
def test_refusals_name_path_type_and_remedy(value: object, begins: str, names: str, remedy: str) -> None:
    with pytest.raises(UnsupportedStateError) as caught:
        encode_state(value)
    assert str(caught.value).startswith(begins)
    assert names in str(caught.value)
    assert remedy in str(caught.value)


def test_cycles_are_refused_with_both_paths() -> None:
    inner: list[Any] = [0]
    value: dict[str, Any] = {"a": {"b": inner}, "c": 1}
    inner.append((value["a"],))
    with pytest.raises(
        UnsupportedStateError, match=r"^state\['a'\]\['b'\]\[1\]\[0\] refers back to state\['a'\], a cycle"
    ):
        encode_state(value)
    ordered: Any = OrderedDict()
    ordered._metadata = {"up": ordered}
    with pytest.raises(UnsupportedStateError, match=r"^state._metadata\['up'\] refers back to state, a cycle"):
        encode_state(ordered)


WRAPPERS: dict[str, Any] = {
    "list": lambda inner: [inner],
    "dict": lambda inner: {"a": inner},
    "escaped": lambda inner: {"$": inner},
    "slice": lambda inner: slice(None, inner),
    "frozenset": lambda inner: frozenset({inner}),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_depth_is_capped(name: str) -> None:
    value: Any = 0
    for _ in range(MAX_DEPTH):
        value = WRAPPERS[name](value)
    encode_state(value)
    data = encode_state(value)
    assert encode_state(decode_state(data)) == data
    with pytest.raises(UnsupportedStateError, match=rf"nested deeper than {MAX_DEPTH}"):
        encode_state(WRAPPERS[name](value))


def test_page_and_json_know_every_tag() -> None:
    page = (Path(__file__).parents[2] / "examples" / "state_over_grpc" / "envelope.md").read_text()
    named = set(re.findall(r'`\["([\w.]+)"', page))
    assert named == state._UNPACK.keys() == state_json._TAGGED.keys()
