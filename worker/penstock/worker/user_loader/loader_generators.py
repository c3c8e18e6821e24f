"""States of the random generators that a loader draws from, as bytes: the process's own generators (Python, numpy,
torch), and those that the loader got as `generator=`."""

from __future__ import annotations

import struct
from typing import Any

import torch

from penstock.proto.state.generators import capture_rng, restore_rng

__all__ = ["captured", "given_to", "restore"]

_COUNT = struct.Struct("<I")


def given_to(loader: Any) -> list[torch.Generator]:
    """Return the random generators that a torch loader or its samplers got as `generator=`, each once."""
    holders = [loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)]
    holders.append(getattr(holders[-1], "sampler", None))
    found = {id(g): g for h in holders if isinstance(g := getattr(h, "generator", None), torch.Generator)}
    return list(found.values())


def captured(loader: Any) -> bytes:
    """Return the states of the process's random generators and of the loader's own (`given_to`), as bytes."""
    states = [generator.get_state().numpy().tobytes() for generator in given_to(loader)]
    return b"".join([_COUNT.pack(len(states)), *(_COUNT.pack(len(s)) + s for s in states), capture_rng()])


def restore(loader: Any, data: bytes) -> None:
    """Set the random generators of the process and of the loader to the states that `captured` returned."""
    (count,) = _COUNT.unpack_from(data)
    at = _COUNT.size
    states = []
    for _ in range(count):
        (size,) = _COUNT.unpack_from(data, at)
        states.append(data[at + _COUNT.size : at + _COUNT.size + size])
        at += _COUNT.size + size
    for generator, state in zip(given_to(loader), states, strict=False):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    restore_rng(data[at:])
