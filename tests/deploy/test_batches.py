"""A replayed batch: what is shown of it, one row of it, and the files that it is written to."""

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
    found = describe({**BATCH, "meta": Meta(3, "n")}, None)
    leaves = {leaf["name"]: leaf for leaf in found["leaves"]}
    assert found["rows"] == 2
    assert list(leaves) == [
        *("x", "half", "mask", "array", "complex", "empty", "scalar", "keys"),
        *("nested.0.left", "nested.0.right", "nested.1", "meta.length", "meta.name"),
    ]
    x = leaves["x"]
    assert (x["kind"], x["dtype"], x["shape"], x["nan"], x["min"]) == ("Tensor", "float32", [2, 2], 1, 1.0)
    assert x["max"] == x["mean"] == {"$": "float", "value": "inf"}
    assert x["first"] == [1.0, {"$": "float", "value": "nan"}, 3.0, {"$": "float", "value": "inf"}]
    assert (leaves["half"]["dtype"], leaves["half"]["mean"]) == ("bfloat16", 1.5)
    assert (leaves["mask"]["min"], leaves["mask"]["mean"]) == (False, 0.5)
    assert (leaves["array"]["dtype"], leaves["array"]["max"]) == (">i2", 7)
    assert leaves["complex"]["first"] == ["(1+2j)", "(3+0j)"]
    assert "min" not in leaves["complex"]
    assert leaves["empty"] == {
        "name": "empty",
        "kind": "Tensor",
        "dtype": "float32",
        "shape": [0],
        "first": [],
        "nan": 0,
    }
    assert leaves["nested.1"]["kind"] == "list of bytes or int"


def test_a_row_has_what_belongs_to_it() -> None:
    row = describe(BATCH, 1)["row"]
    assert {leaf["name"]: leaf["values"] for leaf in row["leaves"]} == {
        "x": [3.0, {"$": "float", "value": "inf"}],
        "half": 2.0,
        "mask": False,
        "array": 7,
        "complex": "(3+0j)",
        "keys": "a-2",
        "nested.0.left": 2,
        "nested.1": 3,
    }
    with pytest.raises(InvalidArgumentError, match="rows 0 to 1"):
        describe(BATCH, 2)
    with pytest.raises(InvalidArgumentError, match="no tensor with a dimension"):
        describe({"a": 1}, 0)


@pytest.mark.parametrize(
    ("batch", "rows", "of_row"),
    [
        (["a", "b"], 2, {"": "b"}),
        ({"n": 3, "meta": {"text": ("a", "b", "c")}}, 3, {"meta.text": "b"}),
        ([("a", "b"), ("x", "y")], 2, {"0": "b", "1": "y"}),  # collated by torch: a tuple for each field
        ([("a", 1), ("b", 2), ("c", 3)], 3, {"": ["b", 2]}),
        ([{"text": "a", "n": 1}, {"text": "b", "n": 2}], 2, {"text": "b", "n": 2}),
        ([Pair("a", 1), Pair("b", 2)], 2, {"left": "b", "right": 2}),
        ([[1, 2, 3], [4]], 2, {"": [4]}),
        ([["a", "b"], ["c"], []], 3, {"": ["c"]}),
        ({"tokens": [[1, 2, 3], [4]], "text": ["a", "b"]}, 2, {"tokens": [4], "text": "b"}),
        ([{"ids": torch.arange(3)}, {"ids": torch.arange(2)}], 2, {"ids": [0, 1]}),
        ([(torch.arange(3), "a"), (torch.arange(2), "b")], 2, {"0": [0, 1], "1": "b"}),
        ([[torch.arange(3), torch.zeros(3)], [torch.ones(3), ["a", "b", "c"]]], 3, None),
    ],
)
def test_rows_of_texts_and_lists(batch: Any, rows: int, of_row: dict[str, Any] | None) -> None:
    of_row = of_row or {"0.0": 1, "0.1": 0.0, "1.0": 1.0, "1.1": "b"}
    found = describe(batch, 1)
    assert found["rows"] == rows
    assert {leaf["name"]: leaf["values"] for leaf in found["row"]["leaves"]} == of_row
    assert json.loads(json.dumps(found)) == found
    with pytest.raises(InvalidArgumentError, match=f"which has rows 0 to {rows - 1}, got {rows}"):
        describe(batch, rows)


def test_a_batch_without_rows() -> None:
    for batch, says in (("text", "no tensor with a dimension"), (torch.zeros(0, 3), "no rows: it is empty")):
        with pytest.raises(InvalidArgumentError, match=says):
            describe(batch, 0)
    assert describe([], None)["rows"] is None


def test_files_hold_it_exactly_or_are_not_written(tmp_path: Path) -> None:
    plain = {name: value for name, value in BATCH.items() if name != "nested"}
    write(plain, tmp_path / "b.pst")
    assert encode_state(decode_state((tmp_path / "b.pst").read_bytes())) == encode_state(plain)
    tensors = {name: value for name, value in plain.items() if name != "array"} | {"deep": [{"n": None}, (b"x", 1.5)]}
    write(tensors, tmp_path / "b.pt")
    loaded = torch.load(tmp_path / "b.pt", weights_only=True)
    assert encode_state(loaded) == encode_state(tensors)
    arrays = {"a": {"b": torch.arange(3)}, "array": BATCH["array"], "keys": BATCH["keys"], "n": 3}
    write(arrays, tmp_path / "b.npz")
    with np.load(tmp_path / "b.npz") as found:
        assert sorted(found) == ["a.b", "array", "keys", "n"]
        assert found["array"].dtype == np.dtype(">i2")
        assert found["keys"].tolist() == BATCH["keys"]
    for name, batch, says in (
        ("c.pst", BATCH, r"pst: batch\[.*, which has no safe encoding\. Pass a file name that ends in \.npz"),
        ("c.npz", plain, "'half' cannot be written as .npz"),
        ("c.npz", {"none": []}, "'none', a list, cannot be written as .npz"),
        ("c.npz", {"mixed": ["a", 1]}, "'mixed', a list, cannot be written as .npz"),
        ("c.npz", {"nul": ["a\0", "b"]}, "'nul', a list, cannot be written as .npz"),
        ("c.npz", {"nul": "a\0"}, "'nul', a str, cannot be written as .npz"),
        ("c.npz", {"large": [2**63, -1]}, "'large', a list, cannot be written as .npz"),
        ("c.npz", {"a": {"b": 1}, "a.b": 2}, "got 'a.b' twice"),
        ("c.pt", plain, r"the batch\['array'\] is a ndarray"),
        ("c.pt", {"p": Pair(1, 2)}, r"the batch\['p'\] is a Pair"),
        ("nowhere/c.pst", plain, "cannot be written"),
    ):
        with pytest.raises(InvalidArgumentError, match=says):
            write(batch, tmp_path / name)
        assert not (tmp_path / name).exists()
    with pytest.raises(InvalidArgumentError, match="File exists"):
        write(tensors, tmp_path / "b.pt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.npz", "b.pst", "b.pt"]


TURNED = torch.tensor([1 + 2j, 3 - 4j]).conj()


@pytest.mark.parametrize(
    ("tensor", "values"),
    [
        (torch.nn.Parameter(torch.tensor([1.0, 2.0])), [1.0, 2.0]),
        (torch.tensor([1.0, 2.0], requires_grad=True) * 2, [2.0, 4.0]),
        (TURNED, [1 - 2j, 3 + 4j]),
        (TURNED.imag, [-2.0, 4.0]),  # negated when it is read
        (torch.arange(1_000_000.0)[4:8:2], [4.0, 6.0]),
        (torch.arange(1_000_000.0)[7].expand(2), [7.0, 7.0]),
    ],
)
def test_tensors_that_are_more_than_their_values(tmp_path: Path, tensor: torch.Tensor, values: list[Any]) -> None:
    """A graph, a bit that turns each value when it is read, or a large storage behind a view: none is the batch's."""
    (leaf,) = describe([[tensor]], None)["leaves"]
    if not tensor.is_complex():
        assert (leaf["first"], leaf["max"], leaf["mean"]) == (values, max(values), sum(values) / 2)
    for name in ("b.pst", "b.npz", "b.pt"):
        write({"x": tensor}, tmp_path / name)
        assert (tmp_path / name).stat().st_size < 4096
    loaded = torch.load(tmp_path / "b.pt", weights_only=True)["x"]
    assert (loaded.tolist(), loaded.dtype, loaded.requires_grad) == (values, tensor.dtype, False)
    with np.load(tmp_path / "b.npz") as found:
        assert found["x"].tolist() == values
    state: Any = decode_state((tmp_path / "b.pst").read_bytes())
    assert state["x"].tolist() == values
