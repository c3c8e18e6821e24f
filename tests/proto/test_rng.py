"""Captured random states: every generator goes on exactly where it was, cached gaussians included; damage is named."""

from __future__ import annotations

import gc
import random
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.proto.errors import StateCorruptError, StateVersionError, UnsupportedStateError
from penstock.proto.state.generators import (
    RNG_FORMAT_VERSION,
    capture_rng,
    derive_seed,
    restore_rng,
    seed_rng,
    torch_rng_state,
)


@pytest.fixture(autouse=True)
def _leave_the_generators_alone() -> Iterator[None]:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


DRAWS: dict[str, Any] = {
    "random": random.random,
    "gauss": lambda: random.gauss(0, 1),
    "shuffle": lambda: random.sample(range(100), 5),
    "rand": lambda: np.random.rand(3).tolist(),
    "normal": lambda: np.random.normal(),
    "permutation": lambda: np.random.permutation(7).tolist(),
    "torch": lambda: torch.rand(2).tolist(),
    "randn": lambda: torch.randn(1).tolist(),
    "randn_many": lambda: torch.randn(17).tolist(),
    "randperm": lambda: torch.randperm(9).tolist(),
}


def draw(names: list[str]) -> list[Any]:
    return [DRAWS[name]() for name in names]


def test_a_seed_leaves_other_devices_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave alone also devices that have not been initialized: torch would keep what it is asked for them, a little
    more with each stream."""
    torch.manual_seed(2**64 - 1)
    expected = torch.get_rng_state()
    torch.default_generator.manual_seed(2**64 - 1)
    assert torch.equal(torch.get_rng_state(), expected), "the generator is seeded as by torch.manual_seed()"
    asked: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", asked.append)
    seed_rng(5)
    assert asked == []


def test_no_garbage_collection_under_torchs_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    real, collects = torch.get_rng_state, []

    def state() -> torch.Tensor:
        collects.append(gc.isenabled())
        return real()

    monkeypatch.setattr(torch, "get_rng_state", state)
    assert gc.isenabled()
    capture_rng()
    assert torch.equal(torch_rng_state(), real())
    assert gc.isenabled()
    gc.disable()
    try:
        torch_rng_state()
        assert not gc.isenabled(), "it stays as the caller has it"
    finally:
        gc.enable()
    assert collects == [False] * 3


ALL = [*DRAWS, *reversed(DRAWS)]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**70), st.lists(st.sampled_from(list(DRAWS)), max_size=30), st.integers(0, 700))
@example(0, ["gauss"], 0)
@example(0, ["normal"], 0)
@example(0, ["randn"], 0)
@example(0, ["normal", "normal"], 1)  # a stale cached gaussian
def test_restore_continues_exactly(seed: int, before: list[str], burn: int) -> None:
    seed_rng(seed)
    for _ in range(burn):  # anywhere in a block of 624 words
        random.getrandbits(32)
        np.random.bytes(4)
    draw(before)
    data = capture_rng()
    states = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()
    expected = draw(ALL)
    seed_rng(seed + 1)
    draw(["gauss", "normal", "randn"])
    restore_rng(data)
    assert random.getstate() == states[0]
    now: Any = np.random.get_state(legacy=False)
    assert np.array_equal(now["state"].pop("key"), states[1]["state"].pop("key"))
    assert now == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])
    assert capture_rng() == data
    assert draw(ALL) == expected


# --- damage -----------------------------------------------------------------------------------------------------------


def seal(data: bytes) -> bytes:
    return data[:-8] + xxhash.xxh3_64_digest(data[:-8])


def patched(offset: int, layout: str, value: object) -> bytes:
    data = bytearray(capture_rng())
    struct.pack_into(layout, data, offset, value)
    return seal(bytes(data))


def assert_refused(data: bytes, error: type[Exception] = StateCorruptError, match: str = "random state") -> None:
    before = capture_rng()
    with pytest.raises(error, match=match):
        restore_rng(data)
    assert capture_rng() == before  # all generators or none


def test_damage_and_fields_that_no_generator_has_are_corrupt() -> None:
    captured = capture_rng()
    assert_refused(captured[:-1])
    assert_refused(captured + b"\0")
    assert_refused(captured[:100] + bytes([captured[100] ^ 1]) + captured[101:])
    assert_refused(patched(32, "<I", 625))  # numpy would read behind its block
    assert_refused(patched(40 + 4 * 624, "<I", 625))
    assert_refused(patched(12, "<I", 4))
    assert_refused(patched(8, "<I", 0))
    assert_refused(patched(36, "<I", 5055))
    shorter = capture_rng()[: 5036 + 100] + bytes(8)
    assert_refused(seal(shorter[:36] + struct.pack("<I", 100) + shorter[40:]), match="torch")
    nonsense = bytearray(capture_rng())
    nonsense[5036:-8] = b"\xff" * (len(nonsense) - 5036 - 8)
    assert_refused(seal(bytes(nonsense)), match="torch")


def test_a_newer_format_is_named() -> None:
    newer = patched(8, "<I", RNG_FORMAT_VERSION + 1)
    assert_refused(newer, StateVersionError, rf"format {RNG_FORMAT_VERSION + 1}, above {RNG_FORMAT_VERSION}\b")


def test_a_replaced_numpy_generator_is_named() -> None:
    data = capture_rng()
    mersenne = np.random.get_bit_generator()  # type: ignore[attr-defined]
    np.random.set_bit_generator(np.random.PCG64(1))  # type: ignore[attr-defined]
    try:
        python, tensor = random.getstate(), torch.get_rng_state()
        with pytest.raises(UnsupportedStateError, match="MT19937"):
            capture_rng()
        random.random()
        torch.rand(1)
        changed = random.getstate(), torch.get_rng_state()
        with pytest.raises(UnsupportedStateError, match="MT19937"):
            restore_rng(data)
        assert random.getstate() == changed[0] != python
        assert torch.equal(torch.get_rng_state(), changed[1])
        assert not torch.equal(changed[1], tensor)
    finally:
        np.random.set_bit_generator(mersenne)  # type: ignore[attr-defined]


# --- seeds ------------------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(st.integers(0) | st.integers(0, 2**3000))
def test_seeding_is_deterministic_and_complete(seed: int) -> None:
    seed_rng(seed)
    first = capture_rng()
    draw(["gauss", "normal", "randn"])  # leaves cached gaussians behind
    seed_rng(seed)
    assert capture_rng() == first
    seed_rng(seed + 1)
    other = capture_rng()
    for start, stop in ((40, 2540), (2540, 5036), (5036, None)):
        assert other[start:stop] != first[start:stop]


def test_seeding_is_the_same_for_ever() -> None:
    seed_rng(42)
    assert random.random() == 0.6394267984578837
    assert np.random.rand() == 0.43490647836110086
    assert torch.initial_seed() == 134183728835869882


def test_derived_seeds_differ_by_path() -> None:
    paths: list[tuple[int | str, ...]] = [(), (1,), (-1,), ("1",), ("",), ("", ""), ("ab", "c"), ("a", "bc")]
    paths += [("a", 1), ("a1",), (1, 2), (12,), (2, 1), (2**63,), (2**64,), (2**64 + 1,), ("\ud800",)]
    seeds = {derive_seed(seed, *path) for seed in range(50) for path in paths}
    assert len(seeds) == 50 * len(paths)


def test_derived_seeds_are_the_same_for_ever() -> None:
    assert derive_seed(0) == 3312539894752522705
    assert derive_seed(7, "shuffle", 3) == 6168783246600656821
    assert derive_seed(True, "a") == derive_seed(1, "a")
