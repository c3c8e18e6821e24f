"""Values of common classes travel without a class in the file, and ranks compare values and not bytes."""

from __future__ import annotations

import datetime
import decimal
import fractions
import io
import pickle
import random
import uuid
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.client.checkpoint import AsyncCheckpointer
from penstock.client.checkpoint.values.objects import load_object, plain_bytes
from penstock.client.checkpoint.values.plain_values import decode, encode, value_digest
from penstock.proto.errors import CheckpointError

VALUES: list[Any] = [
    *(np.float32(1.5), np.int64(3), np.bool_(True), np.str_("a"), np.datetime64("2020-01-01"), np.float64("nan")),
    *(np.random.RandomState(3).get_state(), np.random.default_rng(1).bit_generator.state, random.Random(1).getstate()),
    *(np.arange(6, dtype=">i2").reshape(2, 3), np.zeros((0, 3)), np.array(5.0), np.asfortranarray(np.eye(3))),
    datetime.datetime(2020, 1, 1, 3, tzinfo=datetime.timezone(datetime.timedelta(hours=2), "X"), fold=1),
    datetime.datetime(2020, 1, 1, tzinfo=zoneinfo.ZoneInfo("UTC")),
    *(datetime.date(2020, 1, 2), datetime.time(1, 2, 3, fold=1), datetime.timedelta(1, 2, 3), datetime.UTC),
    *(Path("/a/b"), PurePosixPath("x"), range(1, 9, 2), slice(1, None), 1 + 2j, bytearray(b"x"), b""),
    *({1, "a", (2, 3)}, set(), frozenset([1]), deque([1, {2}], 5), Counter("aab"), defaultdict(list, {"a": [1, {2}]})),
    *(OrderedDict([(1, {2}), ("b", 3)]), uuid.UUID(int=5), fractions.Fraction(1, 3), decimal.Decimal("1.20")),
    *(torch.Size([1, 2]), torch.float32, torch.device("cpu"), {np.int64(1): Path("z"), (1, 2): {3}}),
    [1, [np.float64(2.0), (range(3), "x")]],
]


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, set | frozenset):  # equal ones may be listed in any order
        return type(one) is type(other) and sorted(map(repr, one)) == sorted(map(repr, other))
    return type(one) is type(other) and repr(one) == repr(other)


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    encoded = encode(value)
    assert not encoded.opaque
    saved, how = (load_object(plain_bytes(part), "", "", unsafe=False) for part in encoded[:2])
    again = decode(saved, how)
    assert alike(again, value)
    assert value_digest(again) == value_digest(value)


LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
NESTED = st.recursive(
    LEAVES | st.sampled_from(VALUES[:6]) | st.dates() | st.timedeltas() | st.complex_numbers(allow_nan=False),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=8,
)


@settings(max_examples=50)
@given(NESTED)
def test_nested_values_come_back(value: Any) -> None:
    encoded = encode(value)
    saved, how = (load_object(plain_bytes(part), "", "", unsafe=False) for part in encoded[:2])
    assert alike(decode(saved, how), value)


@settings(max_examples=50)
@given(LEAVES.filter(lambda value: value != b"") | st.lists(LEAVES.filter(lambda value: value != b"")))
def test_plain_bytes_are_torch_s_own(value: Any) -> None:
    """torch.load takes them, by its own list of what is safe. (It knows no bytes without any.)"""
    data = plain_bytes(value)
    assert alike(torch.load(io.BytesIO(data), weights_only=True), value)
    assert alike(load_object(data, "", "", unsafe=False), value)


def test_all_of_them_through_a_checkpoint(checkpointer: AsyncCheckpointer) -> None:
    """Values are tested alone, within others, and as keys."""
    saved = {str(number): value for number, value in enumerate(VALUES)}
    keys = {np.int64(3): 1, datetime.date(2020, 1, 1): {"x": torch.ones(2)}, (1, "a"): 2}
    state = {"values": saved, "keys": keys, "some": {"tensors": (torch.ones(2), "text")}}
    found: dict[str, Any] = {"values": {}, "keys": {}, "some": {}}
    checkpointer.save(1, state)
    checkpointer.restore(found)
    assert [name for name in saved if not alike(found["values"][name], saved[name])] == []
    assert repr(found["keys"]) == repr(keys)
    assert repr(found["some"]) == repr(state["some"])


def test_a_pickle_that_names_anything_is_not_run() -> None:
    """A class is detected in the position of a plain value too."""
    ran: list[int] = []

    class Evil:
        def __reduce__(self) -> Any:
            return print, ("ran",)

    good = plain_bytes("x" * 40)
    evil = pickle.dumps(Evil(), 2)
    data = good.replace(pickle.dumps("x" * 40, 2)[: len(evil)], evil)
    with pytest.raises(CheckpointError, match="'name' of where has a class that could run"):
        load_object(data, "name", "where", unsafe=False)
    assert not ran


class Held:
    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (["adam", "adam"], [*map("".join, [["ad", "am"], ["ad", "am"]])], True),
        ({"a": 1, "b": [2]}, {"b": [2], "a": 1}, True),
        ({3, 1, 2}, {1, 2, 3}, True),
        (Counter("abb"), Counter("bba"), True),
        ((torch.ones(2, 2).t(), 1), (torch.ones(2, 2), 1), True),
        (1, 1.0, False),
        (["ab", "c"], ["a", "bc"], False),
        (Held(a=1), Held(a=2), False),
        ((torch.ones(2), 1), (torch.zeros(2), 1), False),
    ],
)
def test_digests_of_values(one: Any, other: Any, same: bool) -> None:
    assert (value_digest(one) == value_digest(other)) is same
