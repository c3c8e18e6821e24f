"""A structure as it is announced: described, encoded, read from anyone; and the classes it may name."""

from __future__ import annotations

import abc
import json
import sys
import tracemalloc
import types
from collections import namedtuple
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from batch_memory import Ring, received, trip

from penstock.proto.batch import classes
from penstock.proto.batch.flatten import Assembler, Flattener, register_class
from penstock.proto.batch.structure import Structure
from penstock.proto.errors import InvalidArgumentError, ProtocolError, UnsupportedLeafError


class Pair(NamedTuple):
    left: Any
    right: Any


class Holder:
    class Inner(NamedTuple):
        x: Any


@dataclass
class Sample:
    image: Any
    label: Any = None


@dataclass
class Unfinished(abc.ABC):
    x: Any = None

    @abc.abstractmethod
    def finish(self) -> None: ...


@dataclass
class DictRecord(dict):  # type: ignore[type-arg]
    x: Any = None


def test_the_table_forgets_the_longest_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.proto.batch.flatten.STRUCTURES_KEPT", 3)
    flattener = Flattener()

    def of(rank: int) -> Structure:
        return flattener.flatten(torch.ones([1] * rank)).structure

    made = [of(rank) for rank in range(3)]
    assert of(0) is made[0]
    fourth = of(3)  # rank 1 is now the longest unused
    assert of(0) is made[0]
    assert of(2) is made[2]
    assert of(3) is fourth
    again = of(1)
    assert again is not made[1]
    assert again == made[1]


def local_class() -> Any:
    @dataclass
    class Local:
        x: Any

    return Local


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classes, "_by_name", {})
    monkeypatch.setattr(classes, "_names", {})


def test_local_classes_need_a_name(registry: None) -> None:
    local = local_class()
    with pytest.raises(UnsupportedLeafError, match=r"batch\[0\] is a .*Local.*register_class on both sides"):
        Flattener().flatten([local(1)])
    assert register_class(local, "my local") is local
    got = trip([local(torch.ones(2))])
    assert type(got[0]) is local
    assert got[0].x.tolist() == [1, 1]
    assert b"my local" in Flattener().flatten(local(1)).structure.to_bytes()


def test_a_receiver_that_does_not_know_the_class(registry: None) -> None:
    local = local_class()
    register_class(local, "my local")
    sent = Flattener().flatten([local(1)]).structure
    classes._by_name.clear()
    got = Structure.from_bytes(sent.to_bytes())  # a process that forwards it may
    with pytest.raises(
        UnsupportedLeafError, match=r"'my local', which this process has not imported; import .*register_class"
    ):
        Assembler(got)


def test_register_class_checks(registry: None) -> None:
    for wrong in (int, torch.Tensor, DictRecord, Unfinished, "x"):
        with pytest.raises(InvalidArgumentError, match="must be a namedtuple, or a dataclass"):
            register_class(wrong)  # type: ignore[type-var]
    register_class(Pair, "p")
    register_class(Pair, "p")
    with pytest.raises(InvalidArgumentError, match=r"'p' is already the name of .*Pair"):
        register_class(Sample, "p")
    with pytest.raises(InvalidArgumentError, match="1 to"):
        register_class(Pair, "")
    first, second = register_class(local_class()), register_class(local_class())  # a notebook cell run twice
    assert first is not second
    assert type(trip(second(1))) is second
    assert classes.class_name(first) == classes.class_name(second)


def announced(name: str, fields: list[str], kind: str = "nt") -> Structure:
    return Structure.from_bytes(
        json.dumps([1, [kind, name, fields, ["i"] * len(fields)]], separators=(",", ":")).encode()
    )


@pytest.mark.parametrize(
    ("name", "fields", "kind"),
    [
        ("os:path", ["a"], "nt"),
        ("builtins:eval", ["a"], "nt"),
        ("subprocess:Popen", [], "dc"),
        ("antigravity:X", ["a"], "nt"),
        (f"{__name__}:Pair", ["left"], "nt"),
        (f"{__name__}:Pair", ["left", "right"], "dc"),
        (f"{__name__}:Unfinished", ["x"], "dc"),
        (f"{__name__}:Holder.Inner.x", ["x"], "nt"),
        (f"{__name__}:sys.modules", ["x"], "nt"),
        (f"{__name__}:", ["x"], "nt"),
        (":Pair", ["left", "right"], "nt"),
    ],
)
def test_names_reach_nothing_else(name: str, fields: list[str], kind: str) -> None:
    before = set(sys.modules)
    with pytest.raises(UnsupportedLeafError, match=r"which this process has not imported|but here it has"):
        Assembler(announced(name, fields, kind))
    assert set(sys.modules) == before


def test_lookup_runs_no_code_of_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lazy(types.ModuleType):
        def __getattribute__(self, name: str) -> Any:
            raise AssertionError(f"asked for {name}")

    lazy = Lazy("lazy_one")
    monkeypatch.setitem(sys.modules, "lazy_one", lazy)
    with pytest.raises(UnsupportedLeafError, match="has not imported"):
        Assembler(announced("lazy_one:Pair", ["a"]))


def row() -> Any:
    return namedtuple("Row", "a b")


def test_a_main_script_has_three_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for sender, receiver in (("penstock_main", "__main__"), ("__main__", "penstock_main"), ("__mp_main__", "__main__")):
        there = types.ModuleType(sender)
        there.__dict__["Row"] = row()
        there.Row.__module__ = sender
        here = types.ModuleType(receiver)
        here.__dict__["Row"] = row()
        with monkeypatch.context() as patch:
            for name in classes.MAIN_MODULES:
                patch.delitem(sys.modules, name, raising=False)
            patch.setitem(sys.modules, sender, there)
            flat = Flattener().flatten(there.Row(1, torch.ones(2)))
        ring = Ring()
        ring.write(flat)
        with monkeypatch.context() as patch:
            for name in classes.MAIN_MODULES:
                patch.delitem(sys.modules, name, raising=False)
            patch.setitem(sys.modules, receiver, here)
            got = Assembler(received(flat)).assemble(flat.shapes, ring.view, 128, flat.nbytes)
        assert type(got) is here.Row
        assert got.a == 1


def test_another_version_of_a_class(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = Flattener().flatten(Pair(1, 2)).structure
    monkeypatch.setitem(globals(), "Pair", namedtuple("Pair", "left right extra"))
    with pytest.raises(UnsupportedLeafError, match=r"fields \['left', 'right'\], but here .*'extra'\]; run the same"):
        Assembler(Structure.from_bytes(sent.to_bytes()))


WRONG = r"""
x|1|null|[]|[1]|[2,null]|[true,null]|[1,null,1]| [1,null]|[1,null] |[1, null]|{"a":1}|[1,{"a":1}]|[1,1]|[1,1.5]|[1,NaN]
[1,true]|[1,"x"]|[1,["s"]]|[1,[]]|[1,["zz",[]]]|[1,[["l",[]]]]
[1,["t"]]|[1,["t","float32"]]|[1,["t","float33",1]]|[1,["t","float32",-1]]|[1,["t","float32",33]]|[1,["t","float32",1.0]]
[1,["t","float32",true]]|[1,["t","qint8",1]]|[1,["t","float32",1,1]]|[1,["t",["float32"],1]]
[1,["a","O",1]]|[1,["a","[O8",1]]|[1,["a","float32",1]]|[1,["a","<f4,<f4",1]]|[1,["a","<f3",1]]|[1,["a","=f4",1]]
[1,["a","<S4",1]]|[1,["a","<U999999999",1]]|[1,["a","<M8[xx]",1]]|[1,["a","<M8[0s]",1]]|[1,["a","<f4"]]|[1,["a","<V4",1]]|[1,["a","<i1",1]]
[1,["n","<f4",0]]|[1,["n","<U4"]]|[1,["n",">f4"]]
[1,["l"]]|[1,["l",null]]|[1,["l",[],[]]]
[1,["d",["a"]]]|[1,["d",["a"],[]]]|[1,["d",["a","a"],["i","i"]]]|[1,["d",[1,true],["i","i"]]]|[1,["d",[[]],["i"]]]
[1,["d",[1.5],["i"]]]|[1,["d",[9223372036854775808],["i"]]]|[1,["d","a",["i"]]]|[1,["d",["\u00e9"],["i"]]]
[1,["nt","a:b",["x"],[]]]|[1,["nt","",["x"],["i"]]]|[1,["nt",1,["x"],["i"]]]|[1,["nt","a:b",["x y"],["i"]]]
[1,["pt","a:b"]]|[1,["pt","",[]]]|[1,["pt",1,[]]]|[1,["pt","a:b",null]]|[1,["pt",[],[]]]
[1,["nt","a:b",["x","x"],["i","i"]]]|[1,["nt","a:b",[1],["i"]]]|[1,["nt",["x"],["i"]]]|[1,["nt","a:b","x",["i"]]]
"""

HUGE = [
    b"[" * 100_000,
    b"[" * 600_000,
    b'[1,["l",[' * 60 + b"]" * 5,
    b'[1,["l",[' + b'["l",[' * 65 + b"]]" * 65 + b"]]]",
    b'[1,["l",[' + b'"i",' * 65_536 + b'"i"]]]',
    b"[1," + b" " * (5 << 20) + b"null]",
    b'[1,["l",[' + b"{}," * 700_000 + b"null]]]",
    b'[1,["d",["' + b"k" * (5 << 20) + b'"],["i"]]]',
    b'[1,["d",[' + b"9" * 5000 + b'],["i"]]]',
    b'[1,["nt","' + b"a" * 1025 + b'",[],[]]]',
    b'[1,["a","|S9999999999",1]]',
    b'[1,["a","|O8",1]]',
    b"",
    b"\xff\xfe",
    b'[1,["d",["\xc3"],["i"]]]',
]


@pytest.mark.parametrize(
    "data",
    [wrong.encode() for line in WRONG.strip("\n").splitlines() for wrong in line.split("|")] + HUGE,
    ids=lambda data: repr(data[:40]),
)
def test_structures_that_cannot_be(data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError) as caught:
            Structure.from_bytes(data)
        assert tracemalloc.get_traced_memory()[1] < 40 << 20
    finally:
        tracemalloc.stop()
    assert len(str(caught.value)) < 1000
