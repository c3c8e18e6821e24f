"""Whatever cannot travel is refused with its path, its type and what to do instead."""

from __future__ import annotations

import enum
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image

from penstock.proto.batch import flatten, structure, tree
from penstock.proto.batch.flatten import Flattener
from penstock.proto.batch.structure import MAX_DEPTH
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


class NamedPair(Pair):
    """Unlike its base, it has a `__dict__`."""


class MyTensor(torch.Tensor):
    pass


class MyArray(np.ndarray):
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
    (lambda: torch.ones(2, device="meta"), "torch.Tensor", "meta"),
    (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "torch.Tensor", "int_repr"),
    (nested, "torch.Tensor", "unbind"),
    (lambda: torch.zeros(2, dtype=torch.uint8).view(torch.bits8), "torch.Tensor", "bits8"),
    (lambda: torch.ones([1] * 33), "torch.Tensor", "33"),
    (freed, "torch.Tensor", "freed"),
    (jagged, "torch.nested._internal.nested_tensor.NestedTensor", "unbind"),
    (lambda: with_attribute(torch.ones(2)), "torch.Tensor", "detach"),
    (lambda: with_attribute(Sample(1)), "Sample", "make it a field"),
    (lambda: with_attribute(OrderedDict(a=1)), "collections.OrderedDict", "'note'"),
    (lambda: np.array([None, "x"]), "numpy.ndarray", "object"),
    (lambda: np.zeros(2, [("a", "i4"), ("b", "f8")]), "numpy.ndarray", "x[name]"),
    (lambda: np.ones(2).view(MyArray), "MyArray", "asarray"),
    (lambda: Colour.RED, "Colour", ".value"),
    (lambda: {1, 2}, "set", "sorted"),
    (lambda: bytearray(b"x"), "bytearray", "bytes(x)"),
    (lambda: len, "builtin_function_or_method", "code"),
    (lambda: defaultdict(list), "collections.defaultdict", "dict(x)"),
    (lambda: DictRecord(x=1), "DictRecord", "no base written in C"),
    (lambda: Path("a"), "pathlib.PosixPath", "str(x)"),
    (lambda: Image.new("RGB", (2, 2)), "PIL.Image.Image", "numpy.asarray"),
    (lambda: {1.5: 0}, "dict", "1.5 of type float"),
    (lambda: {Colour.RED: 0}, "dict", "Colour"),
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


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """With small ones of leaves, values and brackets: a batch at the real ones takes seconds to flatten."""
    for module, name, small in (
        *((module, "MAX_LEAVES", 64) for module in (flatten, tree)),
        (tree, "MAX_VALUES", 4 * 64),
        (structure, "MAX_BRACKETS", 256),
    ):
        assert getattr(module, name) > 1000 * small
        monkeypatch.setattr(module, name, small)
    deep: Any = 1
    for _ in range(MAX_DEPTH):
        deep = (deep,)
    assert Flattener().flatten(deep).structure.describe().count("(") == MAX_DEPTH
    with pytest.raises(UnsupportedLeafError, match=r"batch(\[0\]){64} is a tuple nested in 64 containers"):
        Flattener().flatten((deep,))
    Flattener().flatten([*range(63), {"a": 3}, None, []])
    with pytest.raises(UnsupportedLeafError, match=r"batch\[63\]\['b'\] is a int: leaf 65, above the limit of 64"):
        Flattener().flatten([*range(63), {"a": 3, "b": 4}])
    doubling: Any = []
    for _ in range(40):
        doubling = [doubling, doubling]  # 2**40 empty lists
    with pytest.raises(UnsupportedLeafError, match="stack values"):
        Flattener().flatten(doubling)
    with pytest.raises(UnsupportedLeafError, match="brackets"):
        Flattener().flatten([{0: {}} for _ in range(100)])
    with pytest.raises(UnsupportedLeafError, match="bytes to describe"):
        Flattener().flatten({"k" * (5 << 20): 1})


def test_a_record_with_a_missing_field() -> None:
    sample = Sample(1)
    del sample.image
    with pytest.raises(UnsupportedLeafError, match=r"batch\[0\] is a .*Sample without a value for its field 'image'"):
        Flattener().flatten([sample])
    with pytest.raises(UnsupportedLeafError, match="has 1 values for its 2 fields"):
        Flattener().flatten(tuple.__new__(Pair, (1,)))
