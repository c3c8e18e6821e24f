"""`collate` is default_collate, wherever it builds; `empty` is torch.empty."""

from __future__ import annotations

import warnings
from collections import OrderedDict, UserDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import default_collate
from torch.utils.data._utils import collate as torchs

from penstock.proto.batch.flatten import Flattener
from penstock.proto.lane.producer import Producer
from penstock.worker import collate, empty
from penstock.worker.batch import building, stacking
from penstock.worker.batch import entry_lease as module
from penstock.worker.batch.entry_lease import EntryLease

SLOT = 1 << 16
TORCH = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]
NUMPY = ["f4", "f8", "i2", "u1", "?", ">i4"]


class Pair(NamedTuple):
    left: Any
    right: Any


def no_wait() -> bool:
    return False


def lending() -> EntryLease:
    """Lend slots of a ring of 64 KiB to this process, as a runner does."""
    producer = Producer(1 << 20)
    reserved = producer.reserve(SLOT)
    assert reserved is not None
    producer.return_unused(reserved)
    lease = EntryLease(producer, no_wait)
    lease.offered = True
    building.lend(stacking.Builder(lease))
    return lease


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "WORTH_FROM", 0)
    yield
    building.lend(None)


def same(one: Any, two: Any) -> bool:
    """Equal in types, dtypes, shapes and values, NaN and all."""
    if type(one) is not type(two):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype is two.dtype and one.shape == two.shape and bits(one) == bits(two)
    if isinstance(one, dict | UserDict):
        return list(one) == list(two) and all(same(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(same, one, two))
    return bool(one == two)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def outcome(function: Any, samples: Any) -> Any:
    try:
        return function(samples)
    except Exception as error:
        return type(error), str(error)


def check(samples: list[Any], *, in_slot: bool | None = None) -> None:
    """Our batch is torch's; and it goes through the ring without a copy of what lies there, if `in_slot` says so."""
    expected = outcome(default_collate, samples)
    assert same(outcome(collate, samples), expected), "outside a runner"
    lease = lending()
    batch = outcome(collate, samples)
    assert same(batch, expected)
    if isinstance(batch, tuple) and batch and isinstance(batch[0], type):
        return
    plain = Flattener().flatten(expected)
    wanted = np.zeros(max(plain.nbytes, 1), np.uint8)
    plain.write_to(wanted.ctypes.data)
    flat = Flattener().flatten(batch)
    del batch
    reserved = lease.take(flat, flat.nbytes)
    if in_slot is not None:
        assert lease.built == in_slot
    assert lease.copied == 0, "each leaf is at its place"
    if reserved is not None:
        flat.write_to(reserved.ring.address + reserved.offset)
        assert bytes(reserved.view[: flat.nbytes]) == wanted.tobytes()[: flat.nbytes]
    building.lend(None)


def leaves() -> st.SearchStrategy[Any]:
    """A maker of a sample's leaf, by a seed."""
    shape = st.lists(st.integers(0, 3), max_size=3).map(tuple)
    tensor = st.tuples(st.sampled_from(TORCH), shape).map(
        lambda of: lambda seed: (torch.arange(seed, seed + int(np.prod(of[1]))).reshape(of[1]) * 3).to(of[0])
    )
    array = st.tuples(st.sampled_from(NUMPY), shape).map(
        lambda of: lambda seed: (np.arange(seed, seed + int(np.prod(of[1]))).reshape(of[1]) * 3).astype(of[0])
    )
    others: list[Any] = [
        lambda seed: seed,
        lambda seed: seed / 3,
        lambda seed: seed % 2 == 0,
        lambda seed: "ä" * (seed * 40),
        lambda seed: bytes(seed * 30),
        lambda seed: np.float32(seed),
        lambda seed: np.int16(seed),
        lambda seed: torch.full((2,), float(seed)).double() if seed % 2 else torch.full((2,), float(seed)),
        lambda seed: torch.zeros(3, 4).T,
        lambda seed: torch.ones(seed % 2 + 1) if seed == 99 else torch.ones(2),
    ]
    return st.one_of(tensor, array, st.sampled_from(others))


def nested() -> st.SearchStrategy[Any]:
    def grow(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        few = st.lists(children, min_size=1, max_size=3)
        return st.one_of(
            few.map(lambda parts: lambda seed: [part(seed) for part in parts]),
            few.map(lambda parts: lambda seed: tuple(part(seed) for part in parts)),
            few.map(lambda parts: lambda seed: {f"k{n}": part(seed) for n, part in enumerate(parts)}),
            few.map(lambda parts: lambda seed: OrderedDict((n, part(seed)) for n, part in enumerate(parts))),
            st.tuples(children, children).map(lambda parts: lambda seed: Pair(parts[0](seed), parts[1](seed))),
        )

    return st.recursive(leaves(), grow, max_leaves=8)


@settings(max_examples=60, deadline=None)
@given(nested(), st.integers(1, 5))
def test_equal_to_default_collate(make: Any, count: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check([make(seed) for seed in range(count)])


@pytest.mark.parametrize(
    "samples",
    [
        [torch.zeros(2), torch.zeros(3)],
        [torch.zeros(2, dtype=torch.float64), torch.zeros(2)],
        [torch.zeros(2), np.zeros(2)],
        [torch.zeros(2, requires_grad=True), torch.zeros(2)],
        [torch.zeros(2, dtype=torch.complex64).conj(), torch.full((2,), 1j).conj()],
        [torch.zeros(2).to_sparse(), torch.zeros(2).to_sparse()],
        [torch.zeros(2, device="meta")],
        [torch.zeros(1 << 15), torch.zeros(1 << 15)],
        [np.array(["a"]), np.array(["b"])],
        [{"x": 1}, {"y": 1}],
        [None, None],
        [],
    ],
)
def test_inputs_torch_refuses_are_left_to_torch(samples: list[Any]) -> None:
    if samples and isinstance(samples[0], torch.Tensor) and samples[0].is_meta:
        lending()
        assert collate(samples).is_meta
        return
    check(samples, in_slot=None)


def test_an_error_leaves_no_slot_behind() -> None:
    lease = lending()
    free = lease._producer.free_entries
    for _ in range(100):
        with pytest.raises(RuntimeError, match="equal size"):
            collate([[torch.zeros(5), torch.zeros(2)], [torch.zeros(5), torch.zeros(3)]])
    lease.release()
    assert lease._producer.free_entries == free


def test_functions_that_users_register(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine:
        def __init__(self, value: int) -> None:
            self.value = torch.full((3,), value)

    def mine(batch: Any, *, collate_fn_map: Any = None) -> Any:
        return torchs.collate([one.value for one in batch], collate_fn_map=collate_fn_map)

    monkeypatch.setitem(torchs.default_collate_fn_map, Mine, mine)
    check([{"a": Mine(number), "b": torch.ones(2)} for number in range(3)], in_slot=True)


@pytest.mark.parametrize(
    ("shape", "dtype"), [((), None), (3, torch.bfloat16), ((2, 0), None), (torch.Size([5]), None), ((1 << 20,), None)]
)
def test_empty_is_torchs(shape: Any, dtype: Any) -> None:
    for _ in range(2):
        made, expected = empty(shape, dtype), torch.empty(shape, dtype=dtype)
        assert (made.shape, made.dtype, made.is_contiguous()) == (expected.shape, expected.dtype, True)
        made.fill_(1)
        lending()
