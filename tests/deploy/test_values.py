"""A user's state, shown: JSON that any reader takes, and a short form for tables."""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

from penstock.deploy.operations.state_values import BYTES_IN_FULL, as_json, brief
from penstock.runtime.telemetry.units import seconds, size


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, None),
        (True, True),
        (1 << 80, 1 << 80),
        (0.1, 0.1),
        (float("nan"), {"$": "float", "value": "nan"}),
        (float("-inf"), {"$": "float", "value": "-inf"}),
        ("text", "text"),
        (b"hello", {"$": "bytes", "size": 5, "base64": "aGVsbG8="}),
        (bytes(BYTES_IN_FULL + 1), {"$": "bytes", "size": BYTES_IN_FULL + 1, "base64": None}),
        ((1, [2, ()]), [1, [2, []]]),
        ({"a": {"b": 1}}, {"a": {"b": 1}}),
        (OrderedDict(a=1), {"a": 1}),
        ({1: "x", (2, 3): None}, {"$": "dict", "items": [[1, "x"], [[2, 3], None]]}),
        ({"$": 1}, {"$": "dict", "items": [["$", 1]]}),
        ({3}, {"$": "set", "items": [3]}),
        (torch.zeros(2, 3, dtype=torch.bfloat16), {"$": "tensor", "dtype": "bfloat16", "shape": [2, 3]}),
        (torch.tensor(1), {"$": "tensor", "dtype": "int64", "shape": [], "value": 1}),
        (np.zeros((2, 0), np.uint8), {"$": "array", "dtype": "uint8", "shape": [2, 0]}),
        (torch.Size([2, 3]), [2, 3]),
        (torch.float32, {"$": "dtype", "text": "torch.float32"}),
        (1j, {"$": "complex", "text": "1j"}),
        (range(3), {"$": "range", "text": "range(0, 3)"}),
    ],
)
def test_json(value: Any, shown: Any) -> None:
    assert as_json(value) == shown
    assert json.loads(json.dumps(as_json(value), allow_nan=False)) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ({"done": 3, "rng": torch.zeros(5056, dtype=torch.uint8)}, "{'done': 3, 'rng': uint8[5056]}"),
        (np.float32(1.5), "1.5 (float32)"),
        (torch.tensor(True), "True (bool)"),
        (b"12345", "5 bytes"),
        ("x" * 100, repr("x" * 100)[:22] + "..." + repr("x" * 100)[-23:]),
        (list(range(20)), "[0, 1, 2, 3, 4, 5, 6, 7, ...]"),
        ({number: number for number in range(9)}, "{0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 6: 6, 7: 7, ...}"),
        ({"a": {"b": {"c": {"d": 1}, "e": {}, "f": [1, 2]}}}, "{'a': {'b': {'c': {...}, 'e': {}, 'f': [...]}}}"),
        (None, "None"),
    ],
)
def test_brief(value: Any, shown: str) -> None:
    assert brief(value) == shown


def test_times_and_sizes_to_read() -> None:
    assert [seconds(value) for value in (0.04, 9.94, 59.6, 150, 9000)] == ["0.0 s", "9.9 s", "60 s", "2 min", "2.5 h"]
    assert [size(count) for count in (0, 1023, 1024, 5 << 20, 3 << 40)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "5.0 MiB",
        "3072.0 GiB",
    ]
