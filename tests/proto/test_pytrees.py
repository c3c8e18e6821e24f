"""Types of other libraries arrive as themselves, by functions that the receiver has; what would be lost is named."""

from __future__ import annotations

import json
import sys
import warnings
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pytest
import torch
from batch_memory import Ring, received, trip
from torch.utils import _pytree

from penstock.proto.batch.flatten import Assembler, Flattener
from penstock.proto.batch.structure import Structure
from penstock.proto.errors import UnsupportedLeafError


class Box:
    """Registered by `boxes`: the tensor is its leaf, the rest its context."""

    def __init__(self, x: Any, context: Any = None) -> None:
        self.x = x
        self.context = context


class Unregistered(Box):
    pass


class Table(dict):  # type: ignore[type-arg]
    """Registered with a function that loses the key "lost"."""


def kept(table: Table) -> list[str]:
    return [key for key in table if key != "lost"]


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    known = dict(_pytree.SUPPORTED_NODES)
    _pytree.register_pytree_node(
        Box,
        lambda box: ([box.x], box.context),
        lambda leaves, context: Box(leaves[0], context),  # type: ignore[index]
    )
    _pytree.register_pytree_node(
        Table,
        lambda table: ([table[key] for key in kept(table)], kept(table)),
        lambda leaves, keys: Table(zip(keys, leaves, strict=True)),
    )
    yield
    _pytree.SUPPORTED_NODES.clear()
    _pytree.SUPPORTED_NODES.update(known)


def announced(name: str, *nodes: Any) -> Assembler:
    return Assembler(Structure.from_bytes(json.dumps([1, ["pt", name, nodes]], separators=(",", ":")).encode()))


CONTEXT = {"a": [1, (2.5, None)], "b": {"c": b"x", 3: True}, "d": "e"}


def test_registered_types_arrive_as_themselves() -> None:
    got = trip({"box": Box(torch.ones(2), CONTEXT), "inner": [Box(Box(np.arange(3)))]})
    assert type(got["box"]) is Box
    assert got["box"].x.tolist() == [1, 1]
    assert repr(got["box"].context) == repr(CONTEXT)
    assert got["inner"][0].x.x.tolist() == [0, 1, 2]
    largest = trip(torch.tensor([[1.0, 3.0], [5.0, 2.0]]).max(1))
    assert type(largest) is torch.return_types.max
    assert largest.indices.tolist() == [1, 0]
    last = trip(deque([1, torch.ones(2)], maxlen=3))
    assert (type(last), last.maxlen, last[1].tolist()) == (deque, 3, [1, 1])
    shape = trip([torch.Size([3, 4]), torch.Size([])])
    assert [type(size) for size in shape] == [torch.Size] * 2
    assert shape == [torch.Size([3, 4]), torch.Size([])]
    assert trip(defaultdict(None, a=1)) == {"a": 1}


def test_contexts_travel_with_each_batch() -> None:
    flattener = Flattener()
    structures = {id(flattener.flatten(Box(torch.ones(rows), (rows, "x" * rows))).structure) for rows in (1, 2, 3)}
    assert len(structures) == 1, "a context that changes with each batch is no new structure"


@pytest.mark.parametrize(
    "context", [{"k": [int]}, torch.ones(2), np.float32(1)], ids=lambda value: type(value).__name__
)
def test_contexts_are_plain_values(context: Any) -> None:
    with pytest.raises(UnsupportedLeafError, match=r"^batch\['x'\] is a .*Box, whose context in torch"):
        Flattener().flatten({"x": Box(1, context)})


def test_code_in_a_context_is_named() -> None:
    with pytest.raises(UnsupportedLeafError, match=r"a collections.defaultdict, whose context.*pass dict\(x\)"):
        Flattener().flatten(defaultdict(list, a=1))


def test_losses_of_registered_functions_are_refused() -> None:
    """For each batch: the first of a structure may lose nothing, and the next something."""
    flattener = Flattener()
    flattener.flatten([Box(1)])
    box = Box(1)
    box.note = "mine"  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedLeafError, match=r"batch\[0\] is a .*Box, which its .*attribute 'note' is lost"):
        flattener.flatten([box])
    flattener.flatten(Table(kept=1))
    with pytest.raises(UnsupportedLeafError, match=r"batch is a .*Table, .*its content differs"):
        flattener.flatten(Table(kept=1, lost=2))


def test_attributes_are_compared_by_value() -> None:
    class Noted:
        def __init__(self, x: Any) -> None:
            self.x, self.cache, self.mask = x, {"rows": [len(x)]}, x > 0

    globals()["Noted"] = Noted
    Noted.__qualname__ = "Noted"
    _pytree.register_pytree_node(Noted, lambda noted: ([noted.x], None), lambda leaves, _: Noted(*leaves))
    try:
        assert trip(Noted(torch.ones(2))).cache == {"rows": [2]}
        for name, value in (("cache", {"rows": [3]}), ("mask", torch.zeros(2, dtype=torch.bool)), ("cache", None)):
            changed = Noted(torch.ones(2))
            setattr(changed, name, value)
            with pytest.raises(UnsupportedLeafError, match=f"attribute '{name}'"):
                Flattener().flatten(changed)
    finally:
        del globals()["Noted"]


def test_unregistered_types_are_refused() -> None:
    with pytest.raises(UnsupportedLeafError, match=r"Unregistered, which a batch must not.*register_pytree_node"):
        Flattener().flatten(Unregistered(1))
    local = type("Local", (), {"__qualname__": "f.<locals>.Local"})
    _pytree.register_pytree_node(local, lambda value: ([], None), lambda leaves, _: local())
    with pytest.raises(UnsupportedLeafError, match="does not lead to this class"):
        Flattener().flatten(local())


# ---- the receiver


@pytest.mark.parametrize(
    ("name", "nodes", "match"),
    [
        ("builtins:eval", (None, "s"), "unknown to this process"),
        ("antigravity:X", (None,), "unknown to this process; import antigravity before the loop"),
        ("subprocess:Popen", (None, "s"), "is not registered here"),
        ("penstock_main:Nothing", (None,), "define it at the top of the main script"),
        (f"{__name__}:Unregistered", (None, "i"), "before the loop, as on the workers"),
        (f"{__name__}:Box", (["t", "float32", 1], "i"), "context is not of plain values"),
        (f"{__name__}:Box", (["nt", f"{__name__}:Nothing", [], []], "i"), "register_class"),
    ],
)
def test_names_reach_registered_types_alone(name: str, nodes: tuple[Any, ...], match: str) -> None:
    before = set(sys.modules)
    with pytest.raises(UnsupportedLeafError, match=match):
        announced(name, *nodes).assemble([], memoryview(bytearray(64)), 0, 0)
    assert set(sys.modules) == before, "a peer causes no import"


def test_functions_that_fail_are_named() -> None:
    flat = Flattener().flatten(Box(1.5))
    released: deque[int] = deque()
    ring = Ring()
    ring.write(flat)
    wrong = announced(f"{__name__}:Box", None)  # without its leaf
    with pytest.raises(
        UnsupportedLeafError, match=r"Box' that cannot be put together here \(IndexError: .*Run the same"
    ):
        wrong.assemble([], ring.view, 128, 0, released, 1)
    with pytest.raises(UnsupportedLeafError, match="cannot be put together here"):
        announced("collections:deque", "s").assemble([1], ring.view, 128, 64, released, 1)
    assert not released
    assert Assembler(received(flat)).assemble([], ring.view, 128, 64).x == 1.5


def test_forwarders_need_no_pair() -> None:
    sent = Flattener().flatten({"box": Box(torch.ones(2), "c"), "size": torch.Size([1])}).structure
    assert sent.describe() == f'{{"box": {__name__}:Box(str, float32[rank 1]), "size": torch:Size(int)}}'
    assert Structure.from_bytes(sent.to_bytes()) == sent


# ---- attributes of our own containers and leaves


@dataclass
class Sample:
    x: Any
    pad_id = 0
    made: Any = field(init=False, default=None)

    @cached_property
    def rows(self) -> int:
        return len(self.x)


class Slotted:
    __slots__ = ("extra",)


@dataclass
class OnSlots(Slotted):
    x: Any = 0


def test_cached_properties_are_computed_again() -> None:
    sample = Sample(torch.ones(3))
    assert sample.rows == 3
    got = trip(sample)
    assert "rows" not in got.__dict__
    assert got.rows == 3


def test_slots_that_are_no_fields_are_refused() -> None:
    with pytest.raises(UnsupportedLeafError, match=r"OnSlots.*no slots but its fields"):
        Flattener().flatten(OnSlots())


# ---- Hugging Face (tensordict and PyG: tests/frameworks/run_batch_types.py)


def test_hugging_face() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import BatchEncoding, BatchFeature, PreTrainedTokenizerFast
        from transformers.modeling_outputs import CausalLMOutput

    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?", pad_token="?")
    batch = tokenizer(["a b", "b"], padding=True, return_tensors="pt")
    batch.note = "mine"
    got = trip([batch, BatchEncoding({"x": torch.ones(2)}), BatchFeature({"pixels": torch.ones(1, 3)})])
    assert [type(value) for value in got] == [BatchEncoding, BatchEncoding, BatchFeature]
    assert got[0]["input_ids"].tolist() == [[0, 1], [1, 2]]
    assert (got[0].tokens(0), got[0].word_ids(1), got[0].note) == (["a", "b"], [0, None], "mine")
    assert got[2].pixels.shape == (1, 3)
    output = trip(CausalLMOutput(loss=torch.ones(()), logits=torch.ones(2, 3)))
    assert type(output) is CausalLMOutput
    assert list(output) == ["loss", "logits"]
    extra = CausalLMOutput(logits=torch.ones(2))
    extra.note = "mine"
    with pytest.raises(UnsupportedLeafError, match="attribute 'note' is lost"):
        Flattener().flatten(extra)
