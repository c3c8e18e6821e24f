"""Random generators that a user's loader draws from, and their seeds at an epoch's beginning.

Those of the process are seeded by (seed, box, slot, epoch). Those that loader, dataset, samplers and collate_fn hold
keep input_fn's state in epoch 0, and later get (a hash of that state, epoch). Those in the globals of the defining
modules get (seed, box, slot, epoch), because other code may have drawn from them.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from penstock.proto.state.found_generators import capture, find_generators, initial_seed, reseed, restore
from penstock.proto.state.generators import capture_rng, derive_seed, restore_rng, seed_rng

_SIZE = struct.Struct("<I")


def parts_of(loader: Any) -> list[Any]:
    parts = [loader]
    batch_sampler = getattr(loader, "batch_sampler", None)
    for part in (getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)):
        if part is not None:
            parts.append(part)
    for name in ("dataset", "collate_fn"):
        part = getattr(loader, name, None)
        if part is not None:
            parts.append(part)
    return parts


def set_epoch(loader: Any, epoch: int) -> None:
    """Call set_epoch(epoch) once each of the loader, its samplers and its dataset, where they have it."""
    called = set()
    for part in parts_of(loader):
        method = getattr(part, "set_epoch", None)
        if callable(method) and id(part) not in called:
            called.add(id(part))
            method(epoch)


def _modules(parts: list[Any], input_fn: Callable[..., Any] | None) -> list[ModuleType]:
    names = [getattr(part, "__module__", None) or type(part).__module__ for part in (input_fn, *parts)]
    return [sys.modules[name] for name in dict.fromkeys(names) if isinstance(name, str) and name in sys.modules]


class LoaderGenerators:
    def __init__(self, loader: Any, input_fn: Callable[..., Any] | None) -> None:
        parts = parts_of(loader)
        generators = find_generators(parts, _modules(parts, input_fn))
        self._own = [generator for generator in generators if not generator.in_module]
        self.seeds = tuple([initial_seed(generator) for generator in self._own])
        """Hashes of the states in which input_fn left the loader's generators."""
        self._of_modules = [generator for generator in generators if generator.in_module]

    def drawn_by(self, parts: list[Any]) -> tuple[list[str], list[str], int]:
        """Return the names of the generators that `parts` hold, of those among them that were made since input_fn, and
        a hash of the states in which it left the others, unless these are of modules; 0 for none."""
        found = find_generators(parts)
        held = {id(each.generator) for each in found}
        own = [seed for each, seed in zip(self._own, self.seeds, strict=True) if id(each.generator) in held]
        known = {id(each.generator): each.path for each in (*self._own, *self._of_modules)}
        names = [known[id(each.generator)] for each in found if id(each.generator) in known]
        return (
            names,
            [each.path for each in found if id(each.generator) not in known],
            derive_seed(0, *own) if own else 0,
        )

    @property
    def names(self) -> list[str]:
        return [generator.path for generator in (*self._own, *self._of_modules)]

    def others_than(self, seeds: tuple[int, ...]) -> list[str]:
        """Return the names of generators that input_fn had left in other states than `seeds`."""
        if len(seeds) != len(self.seeds):
            return [generator.path for generator in self._own]
        return [generator.path for generator, was, now in zip(self._own, seeds, self.seeds, strict=True) if was != now]

    def begin(self, seed: int, box: int, slot: int, epoch: int, *path: int) -> None:
        """path: further numbers that the seeds depend on."""
        seed_rng(derive_seed(seed, "epoch", box, slot, epoch, *path))
        if epoch or path:
            for generator, initial in zip(self._own, self.seeds, strict=True):
                reseed(generator, derive_seed(initial, "epoch", epoch, *path))
        for number, generator in enumerate(self._of_modules):
            reseed(generator, derive_seed(seed, "module", box, slot, epoch, number, *path))

    def capture(self) -> bytes:
        held = capture([*self._own, *self._of_modules])
        return _SIZE.pack(len(held)) + held + capture_rng()

    def restore(self, data: bytes) -> None:
        (size,) = _SIZE.unpack_from(data)
        end = _SIZE.size + size
        if size:
            restore([*self._own, *self._of_modules], data[_SIZE.size : end])
        restore_rng(data[end:])


def process_generators() -> bytes:
    return _SIZE.pack(0) + capture_rng()
