"""Conversion of a callable to a name: what can be an input_fn, and the error for each thing that cannot."""

from __future__ import annotations

import functools
import math
import os
import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import streams
import torch

from penstock.client.states.code_reference import CodeReference, encode_arguments, forbid_in_runner, refer, search_path
from penstock.proto.errors import InvalidArgumentError, UnsupportedStateError
from penstock.proto.state.codec import decode_state


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


@pytest.mark.parametrize("thing", [3, None, "streams:counter", [streams.counter]])
def test_not_callable_is_a_type_error(thing: Any) -> None:
    with pytest.raises(TypeError, match="input_fn must be callable"):
        refer(thing)


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


SCRIPT = """
import sys
from penstock.client.states.code_reference import refer
def make(): return []
print(refer(make))
"""


AS_MODULES = """
import os, runpy
for module in ("pack.train", "pack"):
    sys.stdout.flush()
    if not os.fork():
        runpy._run_module_as_main(module)
        sys.exit()
    os.wait()
"""
"""Program that runs modules as the interpreter's -m does, in processes that have torch already: importing it takes two
seconds."""


def run(arguments: list[str], tmp_path: Path) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    return done.stdout + done.stderr


def test_main_is_named_by_its_file_or_module(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT + AS_MODULES)
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "train.py").write_text(SCRIPT)
    (tmp_path / "pack" / "__main__.py").write_text(SCRIPT)
    assert run(["train.py"], tmp_path).splitlines() == [
        repr(CodeReference("penstock_main:make", str(tmp_path / "train.py"))),
        repr(CodeReference("pack.train:make")),
        repr(CodeReference("pack.__main__:make")),
    ]


@pytest.mark.parametrize("file", [None, "<stdin>"])
def test_a_main_without_a_file_is_told_to_use_one(monkeypatch: pytest.MonkeyPatch, file: str | None) -> None:
    """Refuse callables of `python -c`, and those of a module without a file."""
    main: Any = types.ModuleType("__main__")
    exec("def make(): return []", main.__dict__)
    main.__file__ = file
    monkeypatch.setitem(sys.modules, "__main__", main)
    with pytest.raises(InvalidArgumentError, match="'make', which is defined in a notebook"):
        refer(main.make)


def test_same_function_under_the_names_of_a_main() -> None:
    assert CodeReference("penstock_main:make").same_as("train:make")
    assert CodeReference("train:make").same_as("penstock_main:make")
    assert CodeReference("train:make").same_as("train:make")
    assert not CodeReference("train:make").same_as("other:make")
    assert not CodeReference("train:make").same_as("penstock_main:other")


def test_arguments_travel_as_they_are() -> None:
    args = (3, [1.5, None], {"x": (1, 2)}, torch.arange(3), np.float32(2))
    value: Any = decode_state(encode_arguments("m:f", args, {"path": "/data", "flag": True}))
    assert value["kwargs"] == {"path": "/data", "flag": True}
    assert value["args"][:3] == args[:3]
    assert torch.equal(value["args"][3], args[3])


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


def test_a_script_without_a_main_guard_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_in_runner("anything")
    monkeypatch.setenv("PENSTOCK_RUNNER", "1")
    with pytest.raises(RuntimeError, match=r'creating an Appliance inside a worker(.|\n)*if __name__ == "__main__":'):
        forbid_in_runner("creating an Appliance")
