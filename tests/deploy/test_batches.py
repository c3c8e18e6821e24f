"""A replayed batch: what is shown of it, and the files that it is written to."""

from __future__ import annotations

import json
import math
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.deploy.operations.batch_tables import describe, write
from penstock.proto.errors import InvalidArgumentError
from penstock.proto.state.codec import decode_state, encode_state

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Meta:
    length: int
    name: str


BATCH: dict[str, Any] = {
    "x": torch.tensor([[1.0, math.nan], [3.0, math.inf]]),
    "half": torch.tensor([1, 2], dtype=torch.bfloat16),
    "mask": torch.tensor([True, False]),
    "array": np.array([5, 7], dtype=">i2"),
    "complex": torch.tensor([1 + 2j, 3]),
    "empty": torch.zeros(0),
    "scalar": torch.tensor(4),
    "keys": ["a-1", "a-2"],
    "nested": (Pair(torch.tensor([1, 2]), None), [b"raw", 3]),
}


def test_leaves_have_names_kinds_and_numbers() -> None:
    found = describe({**BATCH, "meta": Meta(3, "n"), "samples": [{"text": "a"}, {"text": "b"}]})
    assert json.loads(json.dumps(found)) == found
    leaves = {leaf["name"]: leaf for leaf in found}
    assert {"scalar", "nested.0.left", "nested.1", "meta.length", "samples.1.text"} <= set(leaves)
    x = leaves["x"]
    assert (x["kind"], x["dtype"], x["shape"], x["nan"], x["min"]) == ("Tensor", "float32", [2, 2], 1, 1.0)
    assert x["max"] == x["mean"] == {"$": "float", "value": "inf"}
    assert x["first"] == [1.0, {"$": "float", "value": "nan"}, 3.0, {"$": "float", "value": "inf"}]
    assert (leaves["half"]["dtype"], leaves["half"]["mean"]) == ("bfloat16", 1.5)
    assert (leaves["array"]["dtype"], leaves["array"]["max"]) == (">i2", 7)
    assert leaves["complex"]["first"] == ["(1+2j)", "(3+0j)"]
    assert "min" not in leaves["complex"]
    assert (leaves["empty"]["shape"], leaves["empty"]["first"]) == ([0], [])


def test_files_hold_it_exactly_or_are_not_written(tmp_path: Path) -> None:
    plain = {name: value for name, value in BATCH.items() if name != "nested"}
    write(plain, tmp_path / "b.pst")
    assert encode_state(decode_state((tmp_path / "b.pst").read_bytes())) == encode_state(plain)
    tensors = {name: value for name, value in plain.items() if name != "array"} | {"deep": [{"n": None}, (b"x", 1.5)]}
    write(tensors, tmp_path / "b.pt")
    loaded = torch.load(tmp_path / "b.pt", weights_only=True)
    assert encode_state(loaded) == encode_state(tensors)
    for name, batch, says in (
        ("c.pst", BATCH, r"pst: batch\[.*, which has no safe encoding"),
        ("c.pt", plain, r"the batch\['array'\] is a ndarray"),
        ("c.pt", {"p": Pair(1, 2)}, r"the batch\['p'\] is a Pair"),
        ("nowhere/c.pst", plain, "cannot be written"),
    ):
        with pytest.raises(InvalidArgumentError, match=says):
            write(batch, tmp_path / name)
        assert not (tmp_path / name).exists()
    with pytest.raises(InvalidArgumentError, match="File exists"):
        write(tensors, tmp_path / "b.pt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.pst", "b.pt"]


TURNED = torch.tensor([1 + 2j, 3 - 4j]).conj()


@pytest.mark.parametrize(
    ("tensor", "values"),
    [
        (torch.nn.Parameter(torch.tensor([1.0, 2.0])), [1.0, 2.0]),
        (TURNED, [1 - 2j, 3 + 4j]),
        (TURNED.imag, [-2.0, 4.0]),  # negated when it is read
        (torch.arange(1_000_000.0)[4:8:2], [4.0, 6.0]),
    ],
)
def test_tensors_that_are_more_than_their_values(tmp_path: Path, tensor: torch.Tensor, values: list[Any]) -> None:
    """A graph, a bit that turns each value when it is read, or a large storage behind a view: none is the batch's."""
    (leaf,) = describe([[tensor]])
    if not tensor.is_complex():
        assert (leaf["first"], leaf["max"], leaf["mean"]) == (values, max(values), sum(values) / 2)
    for name in ("b.pst", "b.pt"):
        write({"x": tensor}, tmp_path / name)
        assert (tmp_path / name).stat().st_size < 4096
    loaded = torch.load(tmp_path / "b.pt", weights_only=True)["x"]
    assert (loaded.tolist(), loaded.dtype, loaded.requires_grad) == (values, tensor.dtype, False)
    state: Any = decode_state((tmp_path / "b.pst").read_bytes())
    assert state["x"].tolist() == values
