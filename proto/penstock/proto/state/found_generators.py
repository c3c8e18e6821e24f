"""Random generators of the user's own objects: found by a walk, seeded again, and saved as bytes.

What a dataset's own generator draws depends on all that was drawn before in this process, so on the numbers of workers
and on restarts. Who finds it can seed it, as is done with the global generators (generators.py).

The walk runs no user code: it reads what objects hold, as `inspect.getattr_static` does. It follows `__dict__` and
`__slots__` of instances and their classes, items of dicts, lists, tuples and deques, parts of a functools.partial, the
object of a bound method, closures, defaults and attributes of functions, and globals of what was pickled by value. Sets
have no order, and are left out; so are modules, tensors, arrays, frames and thread-locals.

It goes breadth first, 8 steps deep (`Subset.dataset.datasets[0].transform.transforms[1].rng` has 7), through 10,000
objects. Items after a container's first 100 come last, so that a million samples do not hide a transform. The order is
the same in each process that made the objects by the same code. Not found: global generators, `random.SystemRandom`,
other devices than the CPU, and what is made later, at its first use."""

from __future__ import annotations

import functools
import random
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.random import mtrand

from penstock.proto.errors import StateMismatchError, UnsupportedStateError
from penstock.proto.state.codec import decode_state, encode_state
from penstock.proto.state.envelope import damaged_state
from penstock.proto.state.generators import torch_rng_state

_MAX_DEPTH = 8
_MAX_OBJECTS = 10_000
_FIRST_ITEMS = 100

_ATOMS = frozenset(
    map(id, (type(None), type(...), bool, int, float, complex, str, bytes, bytearray, range, slice, types.CodeType))
)
"""Ids of types whose instances hold nothing. Ids, because a metaclass may define how its classes are compared."""
_SKIPPED = (types.ModuleType, np.ndarray, np.generic, torch.Tensor, types.FrameType, threading.local)
_PYTHON: Any = random.random
_GLOBAL = frozenset(map(id, (_PYTHON.__self__, mtrand._rand, torch.default_generator)))
_KINDS: dict[type, str] = {
    np.random.Generator: "numpy.random.Generator",
    np.random.RandomState: "numpy.random.RandomState",
    random.Random: "random.Random",
    torch.Generator: "torch.Generator",
}
_BOUND = (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)

SAME_DRAWS = (
    "input_fn leaves them in the same state on all workers, so each worker draws the same numbers. Seed them in "
    "input_fn by torch.initial_seed() % 2**32, which differs between workers, or pass the dataset itself: "
    "DataLoader(dataset, batch_size=, shuffle=) sets them for each sample"
)

_Get = Callable[[Any], Any]
_mro = type.__dict__["__mro__"].__get__
_class_dict = type.__dict__["__dict__"].__get__
_class_name = type.__dict__["__name__"].__get__
_module_dict: _Get = vars(types.ModuleType)["__dict__"].__get__
_partial: Any = vars(functools.partial)


@dataclass(frozen=True, slots=True)
class FoundGenerator:
    path: str
    """Where it was found, as a Python expression that begins with a class, function or module: "Images.rng"."""
    generator: Any
    kind: str
    """Public name of its class, such as "random.Random"."""
    in_module: bool = False
    """True if it was reached through the globals of a module, which other code may use too."""


def find_generators(roots: Iterable[object], modules: Iterable[types.ModuleType] = ()) -> list[FoundGenerator]:
    """Return the random generators that `roots` hold, then those that the globals of `modules` hold; each once."""
    walk = _walked(roots)
    for module in modules:
        for name, value in list(_module_dict(module).items()):
            walk.add(f"{_module_dict(module).get('__name__')}.{name}", value, depth=1, in_module=True)
    walk.run()
    return walk.found


def same_draws(states: Sequence[int]) -> bool:
    """Return whether several workers' `generators_state`s (records.proto) are one and the same."""
    return len(states) > 1 and states[0] != 0 and len(set(states)) == 1


def plain_numbers(roots: Iterable[object]) -> dict[str, float]:
    return _walked(roots).numbers


def _walked(roots: Iterable[object]) -> _Walk:
    walk = _Walk()
    for root in roots:
        walk.add(_name_of(root), root)
    walk.run()
    return walk


def defining_modules(objects: Iterable[object]) -> list[types.ModuleType]:
    """Return the modules that define functions, and other objects' classes, but not Python's, numpy's, torch's."""
    names = dict.fromkeys(_module_name(_unwrapped(value)) for value in objects)
    modules = [_imported(name) for name in names if name.partition(".")[0] not in _LIBRARIES]
    return [module for module in modules if module is not None]


def initial_seed(found: FoundGenerator) -> int:
    """Return a hash, in [0, 2**63), of a generator's present state."""
    return xxhash.xxh3_64_intdigest(encode_state([found.kind, _state_of(found)])) >> 1


def reseed(found: FoundGenerator, seed: int) -> None:
    """Seed a generator from a non-negative integer. Numbers that it kept for its next call are dropped. Takes 30 us
    (MT19937 0.2 ms) for numpy, up to 10 else. Raises UnsupportedStateError if a bit generator takes no seed."""
    generator = found.generator
    if found.kind == "random.Random":
        random.Random.seed(generator, seed)
        return
    if found.kind == "torch.Generator":
        generator.manual_seed(int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0]))
        return
    sequence = np.random.SeedSequence(seed)
    try:
        if found.kind == "numpy.random.Generator":
            bits = generator.bit_generator
            _set_bits(bits, type(bits)(sequence).state, sequence)
        else:
            bits = generator._bit_generator
            np.random.RandomState.set_state(generator, {**type(bits)(sequence).state, "has_gauss": 0, "gauss": 0.0})
    except (TypeError, ValueError) as error:
        what = f"{found.path}: a {found.kind} over {type(bits).__name__}"
        raise UnsupportedStateError(f"{what} cannot be seeded: {error}. Use np.random.default_rng(seed)") from error


def capture(found: list[FoundGenerator]) -> bytes:
    return encode_state([[each.path, each.kind, _state_of(each, seeds=True)] for each in found])


def restore(found: list[FoundGenerator], data: bytes | bytearray | memoryview) -> None:
    """Set generators to what `capture` returned for them. Raises StateMismatchError for others, StateCorruptError."""
    saved: Any = decode_state(data)
    try:
        names = [(path, kind) for path, kind, _ in saved]
    except (TypeError, ValueError) as error:
        raise damaged_state("the saved states of random generators are damaged", error) from error
    for there, here in zip_longest(names, [(each.path, each.kind) for each in found]):
        if there != here:
            raise StateMismatchError(
                f"the state has {_described(there)} where the loader has {_described(here)}. Resume with the code that "
                "saved the state, or load it with strict=False"
            )
    for each, (_, _, state) in zip(found, saved, strict=True):
        try:
            _set_state(each, state)
        except (TypeError, ValueError, KeyError, IndexError, RuntimeError) as error:
            raise damaged_state(f"{each.path}: the saved state of this {each.kind} cannot be loaded", error) from error


def _described(generator: tuple[str, str] | None) -> str:
    return f"{generator[0]} ({generator[1]})" if generator else "no generator"


# the walk


class _Walk:
    def __init__(self) -> None:
        self.found: list[FoundGenerator] = []
        self.numbers: dict[str, float] = {}
        self._next: deque[tuple[str, Any, int, bool]] = deque()
        self._last: deque[tuple[str, Any, int, bool]] = deque()
        self._seen: dict[int, Any] = {}  # the objects too, so that no id is used again
        self._members: dict[int, list[tuple[str, _Get]]] = {}

    def add(self, path: str, value: Any, depth: int = 0, in_module: bool = False) -> None:
        if id(type(value)) not in _ATOMS:
            self._next.append((path, value, depth, in_module))

    def run(self) -> None:
        left = _MAX_OBJECTS
        while left and (self._next or self._last):
            path, value, depth, in_module = (self._next or self._last).popleft()
            if id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            left -= 1
            kind = _kind_of(value)
            if kind is not None:
                self.found.append(FoundGenerator(path, value, kind, in_module))
            elif depth < _MAX_DEPTH and not issubclass(type(value), (*_SKIPPED, *_KINDS)):
                self._add_parts(path, value, depth + 1, in_module)
        self._next.clear()
        self._last.clear()

    def _add_parts(self, path: str, value: Any, depth: int, in_module: bool) -> None:
        for number, step, part in _items(value):
            queue = self._next if number < _FIRST_ITEMS else self._last
            queue.append((path + step, part, depth, in_module))
        for name, part in _parts(value):
            self.add(f"{path}.{name}", part, depth, in_module)
        users = _module_name(value).partition(".")[0] not in (*_LIBRARIES, "penstock", "torchdata")
        for name, part in self._attributes(value):
            if users and type(part) in (int, float, bool):
                self.numbers[f"{path}.{name}"] = part
            self.add(f"{path}.{name}", part, depth, in_module)
        for cls in _mro(value if issubclass(type(value), type) else type(value)):
            if id(cls) not in self._seen or cls is value:
                self._seen[id(cls)] = cls
                if _module_name(cls).partition(".")[0] not in _LIBRARIES:
                    self._add_class(cls, depth, in_module)

    def _attributes(self, value: Any) -> Iterator[tuple[str, Any]]:
        cls: Any = type(value)
        if id(cls) not in self._members:
            self._members[id(cls)] = list(_members_of(cls))
        for name, get in self._members[id(cls)]:
            try:
                part = get(value)
            except AttributeError:
                continue  # this slot is not set
            if name == "__dict__":
                yield from list(dict.items(part))
            else:
                yield name, part

    def _add_class(self, cls: type, depth: int, in_module: bool) -> None:
        for name, part in list(_class_dict(cls).items()):
            if type(part) is types.FunctionType:
                for key, value in _globals_by_value(part):
                    self.add(f"{_class_name(cls)}.{name}.__globals__[{key!r}]", value, depth, in_module=True)
            elif id(type(part)) not in _ATOMS and not _is_descriptor(part):
                self.add(f"{_class_name(cls)}.{name}", part, depth, in_module)


def _kind_of(value: Any) -> str | None:
    cls = type(value)
    for base, kind in _KINDS.items():
        if issubclass(cls, base):
            usable = id(value) not in _GLOBAL and not issubclass(cls, random.SystemRandom)
            return kind if usable and (base is not torch.Generator or value.device.type == "cpu") else None
    return None


def _items(value: Any) -> Iterator[tuple[int, str, Any]]:
    """Yield those of the first items of a container that may hold something: number, step of the path, item."""
    cls = type(value)
    if issubclass(cls, dict):
        for number, (key, item) in enumerate(list(islice(dict.items(value), _MAX_OBJECTS))):
            if id(type(item)) not in _ATOMS:
                plain = type(key) is str or (type(key) is int and abs(key) < 2**64)
                yield number, f"[{key!r}]" if plain else f"[<{_class_name(type(key))}>]", item
    for base in (list, tuple, deque):
        if issubclass(cls, base):
            for number, item in enumerate(list(islice(base.__iter__(value), _MAX_OBJECTS))):
                if id(type(item)) not in _ATOMS:
                    yield number, f"[{number}]", item


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    cls = type(value)
    if issubclass(cls, functools.partial):
        yield "func", _partial["func"].__get__(value)
        yield "args", _partial["args"].__get__(value)
        yield "keywords", _partial["keywords"].__get__(value)
    elif issubclass(cls, _BOUND):
        yield "__self__", value.__self__
        if cls is types.MethodType:
            yield "__func__", value.__func__
    elif cls is types.FunctionType:
        yield from _function_parts(value)


def _members_of(cls: type) -> Iterator[tuple[str, _Get]]:
    """Yield the functions that read what an instance of a class holds: its `__dict__`, and each of its `__slots__`."""
    for base in () if issubclass(cls, type) else _mro(cls):
        members = _class_dict(base)
        for name, member in list(members.items()):
            if issubclass(type(member), (types.GetSetDescriptorType, types.MemberDescriptorType)) and (
                name == "__dict__" or ("__slots__" in members and type(member) is types.MemberDescriptorType)
            ):
                yield name, member.__get__


def _function_parts(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"<closure>.{name}", cell.cell_contents
        except ValueError:
            continue  # the variable is not set
    yield "__defaults__", function.__defaults__
    yield "__kwdefaults__", function.__kwdefaults__
    for name, value in _globals_by_value(function):
        yield f"__globals__[{name!r}]", value


def _globals_by_value(function: types.FunctionType) -> list[tuple[str, Any]]:
    """Globals of a function pickled by value; else none. A wrapper's __module__ may be another's (Hugging Face's
    Dataset has a generator of fingerprints in its globals)."""
    module = _imported(function.__globals__.get("__name__"))
    if module is not None and function.__globals__ is _module_dict(module):
        return []
    return [(name, value) for name, value in list(function.__globals__.items()) if not name.startswith("__")]


def _imported(name: object) -> types.ModuleType | None:
    module = sys.modules.get(name) if type(name) is str else None
    return module if issubclass(type(module), types.ModuleType) else None


def _is_descriptor(value: Any) -> bool:
    return any("__get__" in _class_dict(base) for base in _mro(type(value)))


def _unwrapped(value: Any) -> Any:
    while issubclass(type(value), functools.partial):
        value = _partial["func"].__get__(value)
    return value.__func__ if type(value) is types.MethodType else value


def _name_of(value: Any) -> str:
    value = _unwrapped(value)
    if type(value) is types.FunctionType:
        return value.__name__
    return str(_class_name(value if issubclass(type(value), type) else type(value)))


def _module_name(value: Any) -> str:
    if type(value) is types.FunctionType:
        name: object = value.__module__
    else:
        name = _class_dict(value if issubclass(type(value), type) else type(value)).get("__module__")
    return name if isinstance(name, str) else "builtins"


_LIBRARIES = frozenset((*sys.stdlib_module_names, "numpy", "torch")) - {"__main__"}


# states of generators


def _state_of(found: FoundGenerator, *, seeds: bool = False) -> Any:
    """`seeds`: with what a numpy Generator's spawn() continues from."""
    generator = found.generator
    if found.kind == "random.Random":
        return random.Random.getstate(generator)
    if found.kind == "torch.Generator":
        return torch_rng_state(generator)
    if found.kind == "numpy.random.RandomState":
        return np.random.RandomState.get_state(generator, legacy=False)
    bits = generator.bit_generator
    return [bits.state, _seeds_of(bits)] if seeds else bits.state


def _set_state(found: FoundGenerator, state: Any) -> None:
    generator = found.generator
    if found.kind == "random.Random":
        random.Random.setstate(generator, state)
    elif found.kind == "torch.Generator":
        generator.set_state(state)
    elif found.kind == "numpy.random.RandomState":
        np.random.RandomState.set_state(generator, state)
    else:
        bits, seeds = state
        sequence = None
        if seeds is not None:
            entropy, spawn_key, pool_size, children = seeds
            sequence = np.random.SeedSequence(
                entropy, spawn_key=spawn_key, pool_size=pool_size, n_children_spawned=children
            )
        _set_bits(generator.bit_generator, bits, sequence)


def _seeds_of(bits: np.random.BitGenerator) -> Any:
    sequence = getattr(bits, "seed_seq", None)
    if type(sequence) is not np.random.SeedSequence:
        return None
    return [sequence.entropy, sequence.spawn_key, sequence.pool_size, sequence.n_children_spawned]


def _set_bits(bits: Any, state: Any, sequence: np.random.SeedSequence | None) -> None:
    """From numpy 2 on also set the sequence that spawn() continues from."""
    if sequence is not None and isinstance(bits.__getstate__(), tuple):
        bits.__setstate__((state, sequence))
    else:
        bits.state = state
