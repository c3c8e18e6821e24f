"""A user's state, shown: JSON that any reader takes, and a short form for tables."""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

from penstock.deploy.operations.state_values import BYTES_IN_FULL, as_json


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (1 << 80, 1 << 80),
        (float("nan"), {"$": "float", "value": "nan"}),
        (b"hello", {"$": "bytes", "size": 5, "base64": "aGVsbG8="}),
        (bytes(BYTES_IN_FULL + 1), {"$": "bytes", "size": BYTES_IN_FULL + 1, "base64": None}),
        ((1, [2, ()]), [1, [2, []]]),
        (OrderedDict(a=1), {"a": 1}),
        ({1: "x", (2, 3): None}, {"$": "dict", "items": [[1, "x"], [[2, 3], None]]}),
        ({"$": 1}, {"$": "dict", "items": [["$", 1]]}),
        ({3}, {"$": "set", "items": [3]}),
        (torch.zeros(2, 3, dtype=torch.bfloat16), {"$": "tensor", "dtype": "bfloat16", "shape": [2, 3]}),
        (torch.tensor(1), {"$": "tensor", "dtype": "int64", "shape": [], "value": 1}),
        (np.zeros((2, 0), np.uint8), {"$": "array", "dtype": "uint8", "shape": [2, 0]}),
        (1j, {"$": "complex", "text": "1j"}),
    ],
)
def test_json(value: Any, shown: Any) -> None:
    assert as_json(value) == shown
    assert json.loads(json.dumps(as_json(value), allow_nan=False)) == shown
