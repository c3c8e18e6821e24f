"""Whatever cannot travel is refused with its path, its type and what to do instead."""

from __future__ import annotations

import enum
import types
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from batch_memory import trip
from PIL import Image
from torch.utils import _pytree

from penstock.proto.batch.flatten import Flattener
from penstock.proto.batch.structure import MAX_DEPTH, MAX_LEAVES
from penstock.proto.errors import UnsupportedLeafError


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Sample:
    image: Any
    label: Any = None


@dataclass
class DictRecord(dict):  # type: ignore[type-arg]
    x: Any = None


class Colour(enum.IntEnum):
    RED = 1


class Text(str):
    pass


class NamedPair(Pair):
    """Unlike its base, it has a `__dict__`."""


class Slow(UserList):  # type: ignore[type-arg]
    pass


class MyTensor(torch.Tensor):
    pass


class MyArray(np.ndarray):
    pass


class MyFloat(np.float64):
    pass


def nested() -> Any:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def jagged() -> Any:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


def with_attribute(value: Any) -> Any:
    value.note = "mine"
    return value


def freed() -> torch.Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{text}:UserWarning")
    for text in ("Sparse CSR", "torch.quantize_per_tensor", "The PyTorch API of nested", "The PyTorch API of MaskedT")
]
pytestmark.append(pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning"))

REFUSED: list[tuple[Callable[[], Any], str, str]] = [
    (lambda: torch.ones(2, 2).to_sparse(), "torch.Tensor", "to_dense"),
    (lambda: torch.ones(2, 2).to_sparse_csr(), "torch.Tensor", "to_dense"),
    (lambda: torch.ones(2, device="meta"), "torch.Tensor", "meta"),
    (lambda: torch.ones(0, device="meta"), "torch.Tensor", "meta"),
    (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "torch.Tensor", "int_repr"),
    (nested, "torch.Tensor", "unbind"),
    (lambda: torch.zeros(2, dtype=torch.uint8).view(torch.bits8), "torch.Tensor", "bits8"),
    (lambda: torch.empty(2, dtype=vars(torch)["uint4"]), "torch.Tensor", "uint4"),
    (lambda: torch.ones([1] * 33), "torch.Tensor", "33"),
    (freed, "torch.Tensor", "freed"),
    (jagged, "torch.nested._internal.nested_tensor.NestedTensor", "unbind"),
    (lambda: torch.masked.masked_tensor(torch.ones(2), torch.tensor([True, False])), "MaskedTensor", "tensors"),
    (lambda: with_attribute(torch.ones(2)), "torch.Tensor", "detach"),
    (lambda: with_attribute(torch.nn.Parameter(torch.ones(2))), "torch.nn.parameter.Parameter", "as_subclass"),
    (lambda: with_attribute(torch.ones(2).as_subclass(MyTensor)), "MyTensor", "as_subclass"),
    (lambda: with_attribute(Sample(1)), "Sample", "make it a field"),
    (lambda: with_attribute(NamedPair(1, 2)), "NamedPair", "'note'"),
    (lambda: with_attribute(OrderedDict(a=1)), "collections.OrderedDict", "'note'"),
    (lambda: np.array([None, "x"]), "numpy.ndarray", "object"),
    (lambda: np.zeros(2, [("a", "i4"), ("b", "f8")]), "numpy.ndarray", "x[name]"),
    (
        lambda: np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
        f"{np.recarray.__module__}.recarray",
        "x[name]",
    ),
    (lambda: np.zeros(2, "V5"), "numpy.ndarray", "V5"),
    (lambda: np.zeros(1, [("a", "i4")])[0], "numpy.void", "structured"),
    (lambda: np.ones(2).view(MyArray), "MyArray", "asarray"),
    (lambda: np.ma.masked_array([1, 2], [True, False]), f"{np.ma.MaskedArray.__module__}.MaskedArray", "getmaskarray"),
    (lambda: MyFloat(3), "MyFloat", "base type"),
    (lambda: Colour.RED, "Colour", ".value"),
    (lambda: Text("x"), "Text", "plain"),
    (lambda: {1, 2}, "set", "sorted"),
    (lambda: frozenset(), "frozenset", "list"),
    (lambda: bytearray(b"x"), "bytearray", "bytes(x)"),
    (lambda: 1j, "complex", "complex128"),
    (lambda: object(), "object", "dataclass"),
    (lambda: len, "builtin_function_or_method", "code"),
    (lambda: int, "type", "code"),
    (lambda: defaultdict(list), "collections.defaultdict", "dict(x)"),
    (lambda: types.MappingProxyType({}), "mappingproxy", "dict(x)"),
    (lambda: DictRecord(x=1), "DictRecord", "no base written in C"),
    (lambda: with_attribute(Counter(a=1)), "collections.Counter", "dict(x), and its attributes beside it"),
    (lambda: Slow("x"), "Slow", "list(x)"),
    (lambda: range(3), "range", "list(x)"),
    (lambda: iter([1]), "list_iterator", "list(x)"),
    (lambda: UserDict(a=1), "collections.UserDict", "dict(x)"),
    (lambda: Path("a"), "pathlib.PosixPath", "str(x)"),
    (lambda: datetime(2020, 1, 1, tzinfo=UTC), "datetime.datetime", "str(x)"),
    (lambda: torch.float32, "torch.dtype", "str(x)"),
    (lambda: Image.new("RGB", (2, 2)), "PIL.Image.Image", "numpy.asarray"),
    (lambda: slice(1), "slice", "input_fn"),
    (lambda: ..., "ellipsis", "input_fn"),
    (lambda: {1.5: 0}, "dict", "1.5 of type float"),
    (lambda: {(1, 2): 0}, "dict", "tuple"),
    (lambda: {Colour.RED: 0}, "dict", "Colour"),
    (lambda: {np.str_("k"): 0}, "dict", "numpy.str_"),
    (lambda: {1 << 63: 0}, "dict", "64 bits"),
]


@pytest.mark.parametrize(("make", "name", "remedy"), REFUSED, ids=lambda part: part if isinstance(part, str) else "")
def test_refused_with_path_type_and_remedy(make: Callable[[], Any], name: str, remedy: str) -> None:
    value = make()
    flattener = Flattener()
    flattener.flatten({"images": [0, 1, 2, Sample(torch.ones(1), Pair(1, 2))]})
    with pytest.raises(UnsupportedLeafError) as caught:
        flattener.flatten({"images": [0, 1, 2, Sample(torch.ones(1), Pair(1, value))]})
    message = str(caught.value)
    assert message.startswith("batch['images'][3].label.right is a "), message
    assert name in message.split(" is a ", 1)[1].split()[0], message
    assert remedy in message, message
    assert caught.value.__suppress_context__
    with pytest.raises(UnsupportedLeafError, match=r"^batch is a "):
        Flattener().flatten(value)


REMEDIES: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
    (jagged, lambda x: list(x.unbind())),
    (nested, lambda x: list(x.unbind())),
    (lambda: np.ma.masked_array([1, 2], [True, False]), lambda x: [x.data, np.ma.getmaskarray(x), x.filled(9)]),
    (
        lambda: np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
        lambda x: {name: x[name] for name in x.dtype.names},
    ),
    (lambda: np.zeros(1, [("a", "i4")])[0], lambda x: {name: x[name] for name in x.dtype.names}),
    (lambda: np.matrix([[1, 2]]), np.asarray),
    (
        lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        lambda x: [x.int_repr(), x.q_scale(), x.dequantize()],
    ),
    (lambda: torch.ones(2, 2).to_sparse(), lambda x: [x.to_dense(), x.indices(), x.values()]),
    (lambda: torch.ones(2, 2).to_sparse_csr(), lambda x: x.to_dense()),
    (lambda: torch.zeros(2, dtype=torch.uint8).view(torch.bits8), lambda x: x.view(torch.uint8)),
    (lambda: torch.empty(2, dtype=vars(torch)["uint4"]), lambda x: x.view(torch.uint8)),
    (lambda: with_attribute(torch.ones(2)), lambda x: x.detach()),
    (lambda: with_attribute(torch.nn.Parameter(torch.ones(2))), lambda x: x.detach().as_subclass(torch.Tensor)),
    (lambda: with_attribute(torch.ones(2).as_subclass(MyTensor)), lambda x: x.detach().as_subclass(torch.Tensor)),
    (lambda: np.array([None, "x"]), lambda x: x.tolist()),
    (lambda: Colour.RED, lambda x: [x.value, x.name]),
    (lambda: Text("x"), str),
    (lambda: UserDict(a=1), dict),
    (lambda: types.MappingProxyType({"a": 1}), dict),
    (lambda: defaultdict(list, a=1), dict),
    (lambda: {1, 2}, sorted),
    (lambda: Slow("x"), list),
    (lambda: bytearray(b"x"), bytes),
    (lambda: memoryview(b"x"), bytes),
    (lambda: 1j, np.complex128),
    (lambda: Path("a"), str),
    (lambda: Image.new("RGB", (2, 2)), np.asarray),
]
"""Values that are refused, and what the message says to do."""


@pytest.mark.parametrize(("make", "remedy"), REMEDIES, ids=lambda part: "")
def test_remedies_help(make: Callable[[], Any], remedy: Callable[[Any], Any]) -> None:
    value = make()
    with pytest.raises(UnsupportedLeafError):
        Flattener().flatten(value)
    instead = remedy(value)
    assert _pytree.tree_all(lambda leaf: leaf, _pytree.tree_map(equal, instead, trip(instead)))


def equal(sent: Any, got: Any) -> bool:
    same = sent == got
    return type(sent) is type(got) and bool(same if isinstance(same, bool) else same.all())


@pytest.mark.skipif(not hasattr(np.dtypes, "StringDType"), reason="numpy 2")
def test_variable_width_strings_are_refused() -> None:
    with pytest.raises(UnsupportedLeafError, match=r"batch\[0\] is a numpy.ndarray of dtype StringDType"):
        Flattener().flatten([np.zeros(2, np.dtypes.StringDType())])


def test_a_known_structure_does_not_open_the_door() -> None:
    """Values of a type whose signature is known are still checked for what the signature does not hold."""
    flattener = Flattener()
    flattener.flatten([torch.ones(2, 2)])
    other = with_attribute(torch.ones(2, 2).as_subclass(MyTensor))
    layouts = [torch.ones(2, 2).to_sparse(layout=layout) for layout in (torch.sparse_coo, torch.sparse_csr)]
    for bad in (*layouts, torch.ones(2, 2, device="meta"), with_attribute(torch.ones(2, 2)), jagged(), nested(), other):
        with pytest.raises(UnsupportedLeafError, match=r"batch\[0\]"):
            flattener.flatten([bad])
    for good in (Sample(1), NamedPair(1, 2), OrderedDict(a=1)):
        flattener.flatten([good])
        with pytest.raises(UnsupportedLeafError, match=r"batch\[0\] is a .* with the attribute 'note'"):
            flattener.flatten([with_attribute(good)])
    flattener.flatten([torch.ones(0, 2)])
    with pytest.raises(UnsupportedLeafError, match=r"batch\[0\].*meta"):
        flattener.flatten([torch.ones(0, 2, device="meta")])
    tensor = torch.ones(2, 2)
    flattener.flatten([tensor])
    tensor.untyped_storage().resize_(0)
    with pytest.raises(UnsupportedLeafError, match="freed"):
        flattener.flatten([tensor])


def test_a_batch_that_contains_itself() -> None:
    loop: list[Any] = [1]
    loop.append({"again": loop})
    with pytest.raises(UnsupportedLeafError, match=r"batch\[1\]\['again'\]\[1\]\['again'\].* contain itself"):
        Flattener().flatten(loop)
    wide: list[Any] = []
    wide += [wide, wide]
    with pytest.raises(UnsupportedLeafError, match="contain itself"):
        Flattener().flatten(wide)


def test_limits() -> None:
    deep: Any = 1
    for _ in range(MAX_DEPTH):
        deep = (deep,)
    assert Flattener().flatten(deep).structure.describe().count("(") == MAX_DEPTH
    with pytest.raises(UnsupportedLeafError, match=r"batch(\[0\]){64} is a tuple nested in 64 containers"):
        Flattener().flatten((deep,))
    Flattener().flatten([*range(MAX_LEAVES - 1), {"a": 3}, None, []])
    with pytest.raises(UnsupportedLeafError, match=r"batch\[65535\]\['b'\] is a int: leaf 65537, above the limit of"):
        Flattener().flatten([*range(MAX_LEAVES - 1), {"a": 3, "b": 4}])
    doubling: Any = []
    for _ in range(40):
        doubling = [doubling, doubling]  # 2**40 empty lists
    with pytest.raises(UnsupportedLeafError, match="stack values"):
        Flattener().flatten(doubling)
    with pytest.raises(UnsupportedLeafError, match="brackets"):
        Flattener().flatten([{0: {}} for _ in range(100_000)])
    with pytest.raises(UnsupportedLeafError, match="bytes to describe"):
        Flattener().flatten({"k" * (5 << 20): 1})


def test_a_record_with_a_missing_field() -> None:
    sample = Sample(1)
    del sample.image
    with pytest.raises(UnsupportedLeafError, match=r"batch\[0\] is a .*Sample without a value for its field 'image'"):
        Flattener().flatten([sample])
    with pytest.raises(UnsupportedLeafError, match="has 1 values for its 2 fields"):
        Flattener().flatten(tuple.__new__(Pair, (1,)))


def test_a_long_key_is_cut_in_the_message() -> None:
    with pytest.raises(UnsupportedLeafError) as caught:
        Flattener().flatten({"k" * 100_000: object()})
    assert len(str(caught.value)) < 500
