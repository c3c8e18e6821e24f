"""Conversion of a callable to a name: what can be an input_fn, and the error for each thing that cannot."""

from __future__ import annotations

import functools
import math
import os
import sys
import threading
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import streams

from penstock.client.states.code_reference import CodeReference, encode_arguments, refer, search_path
from penstock.proto.errors import InvalidArgumentError, UnsupportedStateError


class Outer:
    class Inner:
        pass

    @classmethod
    def make(cls) -> list[int]:
        return []

    def method(self) -> list[int]:
        return []

    def __call__(self) -> list[int]:
        return []


def original() -> list[int]:
    return []


@functools.wraps(original)
def decorated() -> list[int]:
    return [1]


decorated.__qualname__ = original.__qualname__ = "decorated"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    # pytest's import mode does not put test modules into sys.modules under a name that can be imported.
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or _this_module())


def _this_module() -> Any:
    module = types.ModuleType(__name__)
    module.__dict__.update(globals())
    return module


def test_names_that_lead_back() -> None:
    assert refer(streams.counter).name == "streams:counter"
    assert refer(streams.Counter).name == "streams:Counter"
    assert refer(Outer.Inner).name == f"{__name__}:Outer.Inner"
    assert refer(Outer.make).name == f"{__name__}:Outer.make"
    assert refer(decorated).name == f"{__name__}:decorated"
    assert refer(math.sqrt).name == "math:sqrt"
    assert refer(streams.counter).main_path == ""


def test_unimportable_callables_get_a_remedy() -> None:
    def local() -> list[int]:
        return []

    cases: list[tuple[Any, str]] = [
        (lambda: [1], "got the lambda .*: write a def at the top level"),
        (local, "local, which is defined inside a function"),
        (functools.partial(streams.counter, 3), "functools.partial of counter"),
        (Outer(), "an instance of Outer"),
        (Outer().method, "a method of an instance of Outer"),
        (original, "another object than .*decorated has"),
    ]
    for thing, words in cases:
        with pytest.raises(InvalidArgumentError, match=words):
            refer(thing)


def test_a_name_that_is_not_there() -> None:
    def function() -> list[int]:
        return []

    function.__module__, function.__qualname__ = "streams", "gone"
    with pytest.raises(InvalidArgumentError, match=r"streams.gone, which cannot be imported"):
        refer(function)
    function.__module__ = "no_such_module"
    with pytest.raises(InvalidArgumentError, match="no_such_module"):
        refer(function)


def test_main_is_named_by_its_file_or_module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And refused as of `python -c` or standard input, which have none."""
    main: Any = types.ModuleType("__main__")
    exec("def make(): return []", main.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", main)
    for main.__file__ in (None, "<stdin>"):
        with pytest.raises(InvalidArgumentError, match="'make', which is defined in a notebook"):
            refer(main.make)
    main.__file__ = str(tmp_path / "train.py")
    Path(main.__file__).touch()
    assert refer(main.make) == CodeReference("penstock_main:make", main.__file__)
    main.__spec__ = ModuleSpec("pack.__main__", None)
    assert refer(main.make) == CodeReference("pack.__main__:make")


def test_same_function_under_the_names_of_a_main() -> None:
    assert CodeReference("penstock_main:make").same_as("train:make")
    assert CodeReference("train:make").same_as("penstock_main:make")
    assert CodeReference("train:make").same_as("train:make")
    assert not CodeReference("train:make").same_as("other:make")
    assert not CodeReference("train:make").same_as("penstock_main:other")


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        ((1, threading.Lock()), {}, r"args\[1\] of input_fn m:f cannot be sent"),
        ((), {"transform": math.sqrt}, "argument 'transform' of input_fn m:f cannot be sent"),
    ],
)
def test_an_argument_that_cannot_travel_is_named(args: tuple[Any, ...], kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedStateError, match=words):
        encode_arguments("m:f", args, kwargs)


def test_the_search_path_is_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", "relative", "/absolute", ""])
    assert search_path() == [str(tmp_path), os.path.join(tmp_path, "relative"), "/absolute"]
