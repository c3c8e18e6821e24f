"""Callables and arguments by value: what they are in another process, and who refuses them."""

from __future__ import annotations

import fnmatch
import functools
import pickle
import sys
import threading
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import streams

from penstock.client import DataLoader
from penstock.client.states.code_reference import CodeReference, ship
from penstock.proto.errors import InputFnNotAllowedError, InvalidArgumentError, UnsupportedStateError
from penstock.proto.state.by_value import dump, load
from penstock.proto.state.codec import decode_state
from penstock.proto.state.loader_names import BY_VALUE
from penstock.proto.v1 import records_pb2
from penstock.worker.processes.user_code import load_input_fn, unpacked


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType(__name__)  # pytest's import mode leaves none under this name
    module.__dict__.update(globals())
    monkeypatch.setitem(sys.modules, __name__, module)


def no_main() -> types.ModuleType:
    raise AssertionError


def again(value: Any) -> Any:
    return load(dump(value)[0], no_main)


@dataclass
class Config:
    folder: Path
    length: int


def test_closures_defaults_and_recursion() -> None:
    factor = 3

    def power(n: int, *, base: int = 2) -> int:
        return 1 if n == 0 else base * power(n - 1, base=base)

    copied = again(lambda x, y=5: factor * x + y + power(3))
    assert copied(2) == 3 * 2 + 5 + 8
    assert again(power)(4, base=factor) == 81
    assert again({"f": [functools.partial(power, 2)]})["f"][0]() == 4
    uses_module = again(lambda: Config(Path("/data"), 3))
    assert uses_module() == Config(Path("/data"), 3)


def test_cached_function_travels_with_its_code() -> None:
    calls: list[int] = []

    @functools.lru_cache(maxsize=2)
    def square(n: int) -> int:
        calls.append(n)
        return n * n

    copied = again(lambda n: square(n) + square(n))
    assert (copied(3), square.cache_info().misses) == (18, 0)
    assert again(square).cache_parameters() == {"maxsize": 2, "typed": False}
    importable = fnmatch._compile_pattern  # type: ignore[attr-defined]
    assert again(importable) is importable  # by its name


def test_what_cannot_go_is_named() -> None:
    lock = threading.Lock()

    def holds() -> None:
        lock.acquire()

    with pytest.raises(pickle.PicklingError, match=r"cannot pickle '_thread.lock' object, which .*holds holds or uses"):
        dump(lambda: holds())


class Held:
    """A dataset as people write it: its file is open from the beginning."""

    def __init__(self) -> None:
        self.parts = {"first": [open(__file__, "rb")]}  # noqa: SIM115


def test_the_attribute_that_cannot_go_is_named() -> None:
    held = Held()
    with held.parts["first"][0]:
        words = r"cannot pickle '_io.BufferedReader' object, which Held.parts\['first'\]\[0\] is: open or make it"
        with pytest.raises(UnsupportedStateError, match=words):
            ship(streams.counter, (held,), {})


def test_what_has_a_name_goes_by_it() -> None:
    assert again(streams.counter) is streams.counter
    assert again((Path("/data"), streams.Counter(3).__iter__))[1].__self__.batches == 3


def test_a_notebook_s_functions_and_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = types.ModuleType("__main__")
    program = "def scale(x): return 2 * x\ndef make(n): return [scale(i) for i in range(n)]\n"
    program += "class Batch:\n  def __init__(self): self.made = make(2)"
    exec(program, notebook.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    data, of_main = dump([notebook.make, notebook.Batch])
    assert not of_main
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))  # as in another process
    make, batch = load(data, no_main)
    assert make(3) == [0, 2, 4]
    assert batch().made == [0, 2]


def test_script_functions_travel_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = types.ModuleType("__main__")
    script.__file__ = str(tmp_path / "train.py")
    Path(script.__file__).write_text("")
    exec("class Config: pass\ndef make(): return 1", script.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", script)
    data, of_main = dump([script.Config, script.make])
    assert of_main == "make"
    elsewhere = types.ModuleType("penstock_main")
    exec("class Config: pass\ndef make(): return 2", elsewhere.__dict__)
    assert load(data, lambda: elsewhere) == [elsewhere.Config, elsewhere.make]


# ---- who takes them


def test_by_name_wherever_that_can_be() -> None:
    reference, arguments = ship(streams.counter, (3,), {})
    assert (reference, reference.only_here) == (CodeReference("streams:counter"), None)
    assert decode_state(arguments) == {"args": (3,), "kwargs": {}}


def test_by_value_is_refused_elsewhere() -> None:
    cases: list[tuple[Any, tuple[Any, ...], str, type[Exception], str]] = [
        (lambda: 1, (), "penstock_by_value:", InvalidArgumentError, "the lambda .*: write a def at the top level"),
        (functools.partial(streams.counter, 3), (), "penstock_by_value:counter", InvalidArgumentError, "partial"),
        (streams.counter, (Path("/data"),), "streams:counter", UnsupportedStateError, r"args\[0\] of input_fn"),
    ]
    for input_fn, args, name, kind, words in cases:
        reference, _ = ship(input_fn, args, {})
        assert reference.name.startswith(name)
        with pytest.raises(kind, match=words):
            raise reference.only_here or AssertionError
    with pytest.raises(
        UnsupportedStateError, match=r"Sending it by value to workers of this machine failed too: cannot pickle"
    ):
        ship(streams.counter, ((i for i in range(3)),), {})


class Uncopied:
    """An object that can be pickled, and not be made again from that."""

    def __new__(cls, source: str) -> Uncopied:
        return object.__new__(cls)


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        (threading.Lock(), r"argument 'batches' of input_fn streams:counter cannot be sent to a worker"),
        (Uncopied("here"), r"the arguments of input_fn counter cannot be copied: .*Uncopied.*inside it"),
    ],
)
def test_what_cannot_be_copied_is_named(argument: Any, words: str) -> None:
    with pytest.raises(UnsupportedStateError, match=words):
        DataLoader(streams.counter, batches=argument)


def test_only_an_embedded_worker_takes_them() -> None:
    reference, arguments = ship(lambda n: n + 1, (Path("/data"),), {})
    spec = records_pb2.LoaderSpec(input_fn=reference.name, arguments=arguments, sys_path=sys.path[:1])
    assert spec.input_fn.startswith(BY_VALUE)
    fn, args, kwargs = unpacked(load_input_fn(spec), spec)
    assert (fn(1), args, kwargs) == (2, (Path("/data"),), {})
    del spec.sys_path[:]
    with pytest.raises(InputFnNotAllowedError, match="as a pickle, which only an embedded worker accepts"):
        unpacked(load_input_fn(spec), spec)
