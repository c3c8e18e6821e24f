"""Batches as NumPy arrays: the memory that they are views of, and how long they hold it. JAX: tests/frameworks."""

from __future__ import annotations

import json
import sys
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import streams
import torch

from penstock.client import DataExecutor, DataLoader
from penstock.client.integrations import jax as views
from penstock.client.integrations.jax import as_numpy, numpy_batches, state_from_json, state_to_json
from penstock.client.testing import FakeAppliance
from penstock.proto.batch.flatten import Assembler, Flattener, wrap_buffer
from penstock.proto.batch.structure import TORCH_DTYPES
from penstock.proto.errors import InvalidArgumentError, StateCorruptError, UnsupportedLeafError

WITHOUT = {"complex32", "float4_e2m1fn_x2"}
"""Dtypes of torch that travel, and that neither NumPy nor ml_dtypes has."""


class Pair(NamedTuple):
    left: torch.Tensor
    right: str


@dataclass(frozen=True)
class Sample:
    image: torch.Tensor
    label: int


# ---- views


@pytest.mark.parametrize("name", sorted(TORCH_DTYPES.keys() - WITHOUT))
def test_array_has_dtype_and_memory(name: str) -> None:
    tensor = torch.arange(6).reshape(2, 3).to(getattr(torch, name))
    array = as_numpy(tensor)
    assert array.dtype.name == name
    assert array.shape == (2, 3)
    assert array.ctypes.data == tensor.data_ptr()
    assert array.tolist() == tensor.to(torch.complex128 if "complex" in name else torch.float64).tolist()
    assert as_numpy(tensor[0, 0]).shape == ()


@pytest.mark.parametrize("name", sorted(WITHOUT))
def test_dtype_without_array_is_named(name: str) -> None:
    tensor = torch.zeros(4, dtype=torch.int32).view(torch.uint8).view(getattr(torch, name))
    with pytest.raises(UnsupportedLeafError, match=f"got torch.{name}: return another one"):
        as_numpy({"x": tensor})
    assert as_numpy(tensor.view(torch.uint8)).dtype == np.uint8, "the remedy"


def test_missing_ml_dtypes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    views._extended.cache_clear()
    with pytest.raises(UnsupportedLeafError, match="pip install ml_dtypes"):
        as_numpy(torch.zeros(2, dtype=torch.bfloat16))
    assert as_numpy(torch.zeros(2)).dtype == np.float32


def test_tensor_elsewhere_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"on the CPU, got one on meta: leave device= out"):
        as_numpy([torch.empty(2, device="meta")])


def test_tree_keeps_its_types() -> None:
    plain = [1, 2.5, "text", b"bytes", None, True, np.float32(3), np.arange(2)]
    batch = OrderedDict(a=[torch.ones(2)], b=(Pair(torch.zeros(1), "r"), Sample(torch.ones(3), 7)), c={0: plain})
    seen = as_numpy(batch)
    assert type(seen) is OrderedDict
    assert list(seen) == ["a", "b", "c"]
    assert isinstance(seen["a"][0], np.ndarray)
    pair, sample = seen["b"]
    assert type(pair) is Pair
    assert isinstance(pair.left, np.ndarray)
    assert pair.right == "r"
    assert type(sample) is Sample
    assert isinstance(sample.image, np.ndarray)
    assert sample.label == 7
    assert all(one is other for one, other in zip(seen["c"][0], plain, strict=True))
    assert isinstance(batch["a"][0], torch.Tensor), "the batch itself was changed"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_view_holds_its_ring_entry(dtype: torch.dtype) -> None:
    flat = Flattener().flatten({"x": torch.ones(4, 8, dtype=dtype)})
    ring = wrap_buffer(bytearray(flat.nbytes))
    flat.write_to(ring.ctypes.data)
    released: deque[int] = deque()
    batch = Assembler(flat.structure).assemble(flat.shapes, ring, 0, flat.nbytes, released, 5)
    array = as_numpy(batch)["x"]
    assert array.ctypes.data == ring.ctypes.data
    del batch
    row = array[1:, 2].T
    del array
    assert not released, "a view of a view still uses the entry"
    assert row.tolist() == [1.0] * 3
    del row
    assert list(released) == [5]


def test_batches_and_state_as_json() -> None:
    with FakeAppliance(seed=1):
        loader = DataLoader(streams.counter)
        seen = []
        for batch in numpy_batches(DataExecutor(loader, num_steps=4)):
            assert isinstance(batch["x"], np.ndarray)
            seen.append(batch["x"].tolist())
            if loader.step == 2:
                saved = json.dumps(state_to_json(loader.state_dict()))
        assert seen == [[step] * 4 for step in range(1, 5)]
        resumed = DataLoader(streams.counter)
        resumed.load_state_dict(state_from_json(json.loads(saved)))
        assert [batch["x"][0] for batch in numpy_batches(DataExecutor(resumed, num_steps=2))] == [3, 4]


@pytest.mark.parametrize("saved", [{}, [], {"penstock_state": 3}, {"penstock_state": "?"}, {"penstock_state": "AAAA"}])
def test_damaged_state_is_refused(saved: Any) -> None:
    with pytest.raises(StateCorruptError):
        state_from_json(saved)
