"""The walk finds what user code may draw from, in one order, and runs none of it; each kind is seeded and restored."""

from __future__ import annotations

import functools
import random
import sys
import threading
import types
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch

from penstock.proto.errors import StateCorruptError, StateMismatchError, UnsupportedStateError
from penstock.proto.state.codec import encode_state
from penstock.proto.state.found_generators import (
    FoundGenerator,
    capture,
    defining_modules,
    find_generators,
    initial_seed,
    reseed,
    restore,
)

DRAWS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "PCG64": (lambda: np.random.default_rng(5), lambda g: (g.integers(9, dtype=np.uint32), g.normal(size=3).tolist())),
    "MT19937": (lambda: np.random.Generator(np.random.MT19937(5)), lambda g: g.random(3).tolist()),
    "Philox": (lambda: np.random.Generator(np.random.Philox(5)), lambda g: g.random(3).tolist()),
    "SFC64": (lambda: np.random.Generator(np.random.SFC64(5)), lambda g: g.random(3).tolist()),
    "RandomState": (lambda: np.random.RandomState(5), lambda g: g.normal()),  # keeps a second number
    "RandomState over PCG64": (lambda: np.random.RandomState(np.random.PCG64(5)), lambda g: g.normal()),
    "Random": (lambda: random.Random(5), lambda g: (g.gauss(0, 1), g.random())),
    "torch": (lambda: torch.Generator().manual_seed(5), lambda g: torch.randn(3, generator=g).tolist()),
}
if np.lib.NumpyVersion(np.__version__) >= "2.0.0":
    DRAWS["spawn"] = lambda: np.random.default_rng(5), lambda g: g.spawn(1)[0].random()


def found(generator: object) -> FoundGenerator:
    (only,) = find_generators([[generator]])
    return only


@pytest.mark.parametrize("name", DRAWS)
def test_seeding_forgets_the_past_and_restoring_brings_it_back(name: str) -> None:
    make, draw = DRAWS[name]
    one, other = make(), make()
    draw(one)
    saved = capture([found(one)])
    expected = [draw(one) for _ in range(3)]
    for seed in (0, 7, 2**200):
        reseed(found(one), seed)
        reseed(found(other), seed)
        assert [draw(one) for _ in range(3)] == [draw(other) for _ in range(3)] != expected
    restore([found(one)], saved)
    assert [draw(one) for _ in range(3)] == expected


@pytest.mark.parametrize("name", sorted(DRAWS.keys() - {"spawn"}))
def test_the_initial_seed_is_a_function_of_the_state(name: str) -> None:
    make, draw = DRAWS[name]
    one, other = make(), make()
    assert initial_seed(found(one)) == initial_seed(found(other)) < 2**63
    draw(one)
    assert initial_seed(found(one)) != initial_seed(found(other))


class Slots:
    __slots__ = ("rng", "unset")

    def __init__(self, rng: object) -> None:
        self.rng = rng


class Shared:
    rng = np.random.default_rng(3)


class Jitter(Shared):
    def __init__(self) -> None:
        self.own = random.Random(1)

    def apply(self, sample: Any) -> Any:
        return sample


def collate(samples: list[Any], rng: np.random.Generator = np.random.default_rng(4)) -> Any:  # noqa: B008
    return samples, rng


def with_closure(rng: object) -> Callable[[], Any]:
    return lambda: rng


def test_generators_are_found_wherever_user_code_keeps_them() -> None:
    def rng() -> random.Random:
        return random.Random(0)

    twice, jitter, plain = rng(), Jitter(), rng()
    inner: Any = torch.nn.Identity()
    inner.rng = rng()
    module = torch.nn.Sequential(torch.nn.Linear(1, 1), inner)
    data = types.SimpleNamespace(
        twice=twice,
        again=[twice],
        nested={"a": ({1: OrderedDict(z=rng())},), (1, 2): deque([rng()])},
        slots=Slots(rng()),
        jitter=jitter,
        draw=plain.random,
        normal=np.random.RandomState(0).normal,
        partial=functools.partial(max, rng(), key=rng()),
        closure=with_closure(rng()),
        module=module,
        cls=Shared,
    )
    paths = [each.path for each in find_generators([data, collate])]
    head = "SimpleNamespace"
    assert sorted(paths) == sorted(
        [
            f"{head}.twice",
            f"{head}.nested['a'][0][1]['z']",
            f"{head}.nested[<tuple>][0]",
            f"{head}.slots.rng",
            f"{head}.jitter.own",
            "Shared.rng",
            f"{head}.draw.__self__",
            f"{head}.normal.__self__",
            f"{head}.partial.args[0]",
            f"{head}.partial.keywords['key']",
            f"{head}.closure.<closure>.rng",
            f"{head}.module._modules['1'].rng",
            "collate.__defaults__[0]",
        ]
    )
    assert paths == [each.path for each in find_generators([data, collate])]
    assert [each.path for each in find_generators([jitter.apply])] == ["apply.__self__.own", "Shared.rng"]


def test_global_generators_and_those_without_a_state_are_left_out() -> None:
    everything = [
        random.random,
        np.random.rand,
        np.random.mtrand._rand,
        torch.default_generator,
        random.SystemRandom(),
        random,
        np.random,
        threading.local(),
        {random.Random(0)},
    ]
    assert find_generators([everything]) == []


def test_module_globals_are_marked_and_come_last() -> None:
    module = types.ModuleType("augmentations")
    own = np.random.default_rng(0)
    vars(module).update(RNG=random.Random(0), BOTH=own, JITTER=Slots(random.Random(1)), other=random)
    listed = [(each.path, each.in_module) for each in find_generators([[own]], [module])]
    assert listed == [("list[0]", False), ("augmentations.RNG", True), ("augmentations.JITTER.rng", True)]


def test_defining_modules_are_those_of_functions_and_classes() -> None:
    here = sys.modules[__name__]
    partial = functools.partial(collate, [1])
    assert defining_modules([Jitter(), partial, Jitter().apply, Jitter, [1], random.Random, torch.zeros(1)]) == [here]


def test_globals_of_a_class_pickled_by_value_are_found() -> None:
    namespace: dict[str, Any] = {"__name__": "notebook"}
    exec(
        "import random\nRNG = random.Random(3)\nclass Data:\n    def __getitem__(self, i): return RNG.random()",
        namespace,
    )
    data = cloudpickle.loads(cloudpickle.dumps(namespace["Data"]()))
    (only,) = find_generators([data])
    assert (only.path, only.in_module) == ("Data.__getitem__.__globals__['RNG']", True)
    reseed(only, 1)
    assert data[0] == random.Random(1).random()


def test_globals_of_a_wrapper_are_the_librarys(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Hugging Face's Dataset, whose methods are wrapped by a module with a generator from entropy."""
    library = types.ModuleType("wrapping_library")
    monkeypatch.setitem(sys.modules, library.__name__, library)
    exec(
        "import functools, random\nRNG = random.Random()\ndef wrapped(f):\n"
        "    @functools.wraps(f)\n    def call(*args): return f(*args)\n    return call",
        vars(library),
    )

    class Data:
        @library.wrapped  # type: ignore[untyped-decorator]
        def __getitem__(self, index: int) -> int:
            return index

    assert find_generators([Data()]) == []


class _Touched(AssertionError):
    pass


def _refuse(*_: object, **__: object) -> Any:
    raise _Touched


class _Meta(type):
    __getattribute__ = __eq__ = _refuse
    __hash__ = None  # type: ignore[assignment]
    __instancecheck__ = __subclasscheck__ = _refuse
    __name__ = property(_refuse)


class _Hostile(metaclass=_Meta):
    __getattribute__ = __getattr__ = __eq__ = __len__ = __iter__ = __bool__ = __repr__ = _refuse
    __class__ = property(_refuse)
    value = property(_refuse)
    rng = random.Random(0)


class _HostileDict(dict[Any, Any]):
    items = values = keys = __iter__ = __getitem__ = __len__ = _refuse


def test_the_walk_runs_no_user_code() -> None:
    hostile = object.__new__(_Hostile)
    object.__setattr__(hostile, "own", random.Random(1))
    filled = _HostileDict()
    dict.__setitem__(filled, 1, random.Random(2))
    paths = [each.path for each in find_generators([[hostile, filled, _Hostile]])]
    assert sorted(paths) == sorted(["list[0].own", "_Hostile.rng", "list[1][1]"])


def test_many_samples_do_not_hide_the_transform() -> None:
    transform = types.SimpleNamespace(steps=[Slots(random.Random())])
    data = types.SimpleNamespace(samples=[(f"{n}.jpg", n) for n in range(100_000)], transform=transform)
    assert [each.path for each in find_generators([data])] == ["SimpleNamespace.transform.steps[0].rng"]


def test_states_of_other_generators_are_refused_by_name() -> None:
    one = find_generators([types.SimpleNamespace(rng=random.Random(0))])
    saved = capture(one)
    others = [types.SimpleNamespace(rng=random.Random(0), z=[random.Random(0)])]
    with pytest.raises(StateMismatchError, match=r"no generator where .*\.z\[0\]"):
        restore(find_generators(others), saved)
    for damaged in (7, [[1]], [[one[0].path, one[0].kind, [3, 1]]]):
        with pytest.raises(StateCorruptError):
            restore(one, encode_state(damaged))


class _OwnBits(np.random.PCG64):
    def __init__(self) -> None:
        super().__init__(3)


def test_a_bit_generator_without_a_seed_is_named() -> None:
    with pytest.raises(UnsupportedStateError, match=r"list\[0\]: .* over _OwnBits cannot be seeded"):
        reseed(found(np.random.Generator(_OwnBits())), 1)
