"""The fingerprint of a batch: the same everywhere, and another for another batch."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.proto.batch.digest import EDGE, FULL_BELOW, WORDS, batch_digest, rows_digest
from penstock.proto.batch.flatten import Flattener, wrap_buffer

KNOWN = (0xFFCA8C0BF9AE2DD, 0x59319B0FE32F1CFC, 0xF5C2140065FE99A1)


def digest_of(data: bytes, key: int = 1, shapes: tuple[int, ...] = (3,), offset: int = 64) -> int:
    return batch_digest(key, bytes(offset) + data + b"rest", offset, len(data), shapes)


@pytest.mark.parametrize("size", [0, 64, FULL_BELOW - 64, FULL_BELOW, FULL_BELOW + 64, 20_032, 100_032, 1 << 20])
def test_it_is_one_function_of_the_bytes(size: int) -> None:
    data = np.random.default_rng(0).bytes(size)
    wanted = digest_of(data)
    assert 0 <= wanted < 1 << 64
    assert digest_of(data, offset=0) == digest_of(data, offset=4096) == wanted
    ring = mmap.mmap(-1, size + 4096)
    ring[64 : 64 + size] = data
    for buffer in (ring, memoryview(ring), wrap_buffer(ring), np.frombuffer(ring, np.int32), bytearray(ring[:])):
        assert batch_digest(1, buffer, 64, size, [3]) == wanted
    assert digest_of(data, key=2) != wanted
    assert digest_of(data, shapes=(3, 1)) != wanted
    assert digest_of(data, shapes=(4,)) != wanted
    assert digest_of(data, shapes=()) != wanted


def test_known_values() -> None:
    """Digests lie in records: they may not change from one version to the next."""
    assert digest_of(b"") == KNOWN[0]
    assert digest_of(bytes(range(64))) == KNOWN[1]
    assert digest_of(bytes(range(256)) * 4000, key=(1 << 64) - 1, shapes=(1 << 40, 0)) == KNOWN[2]


def test_it_is_the_same_in_every_process() -> None:
    code = (
        "from penstock.proto.batch.digest import batch_digest; d = bytes(range(256)) * 4000; "
        "print(batch_digest(7, d, 0, len(d), [1, 2]))"
    )
    data = bytes(range(256)) * 4000
    for seed in ("0", "77"):
        out = subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, env={**os.environ, "PYTHONHASHSEED": seed}
        )
        assert int(out.stdout) == batch_digest(7, data, 0, len(data), [1, 2])


@settings(max_examples=200, deadline=None)
@given(st.binary(min_size=1, max_size=2000), st.data())
def test_every_bit_counts_in_a_small_batch(data: bytes, draw: st.DataObject) -> None:
    bit = draw.draw(st.integers(0, 8 * len(data) - 1))
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    assert digest_of(bytes(changed)) != digest_of(data)


@pytest.mark.parametrize("size", [FULL_BELOW + 64, 70_001, 100_032, (1 << 20) - 64, 1 << 20, 5_000_000, 8 << 20])
def test_a_large_batch_is_sampled_throughout(size: int) -> None:
    """Both ends count in full, and no stretch longer than a few percent of the rest escapes notice."""
    data = np.random.default_rng(1).integers(0, 256, size, np.uint8)
    wanted = batch_digest(1, data, 0, size, [])
    for at in (0, 1, EDGE - 1, size - EDGE, size - 1):
        data[at] ^= 1
        assert batch_digest(1, data, 0, size, []) != wanted
        data[at] ^= 1
    assert batch_digest(1, data, 0, size, []) == wanted
    stretch = (size - 2 * EDGE) // (WORDS // 2)
    for start in range(0, size - stretch, stretch // 2):
        data[start : start + stretch] ^= 1
        assert batch_digest(1, data, 0, size, []) != wanted, start
        data[start : start + stretch] ^= 1


@pytest.mark.parametrize("row", [128, 512, 1024, 4096, 65_536])
def test_samples_do_not_fall_on_one_column(row: int) -> None:
    """Rows of padded sequences: a batch that differs in one 64-byte column out of two is another."""
    data = np.zeros(((2 << 20) // row, row // 64, 64), np.uint8)
    wanted = batch_digest(1, data.reshape(-1), 0, data.size, [])
    middle = slice(-(-EDGE // row), -EDGE // row)
    for column in range(2):
        data[middle, column::2] = 1
        assert batch_digest(1, data.reshape(-1), 0, data.size, []) != wanted
        data[:] = 0


def test_in_full_every_byte_counts_at_any_size() -> None:
    data = np.random.default_rng(2).integers(0, 256, 1 << 20, np.uint8)
    wanted = batch_digest(1, data, 0, data.size, [], full=True)
    assert wanted != batch_digest(1, data, 0, data.size, [])
    for at in np.random.default_rng(3).integers(0, data.size, 200):
        data[at] ^= 1
        assert batch_digest(1, data, 0, data.size, [], full=True) != wanted
        data[at] ^= 1


def test_it_covers_the_gaps_that_write_to_clears() -> None:
    flat = Flattener().flatten({"x": torch.ones(3), "y": torch.ones(5000)})
    digests = set()
    for fill in (0x00, 0xFF):
        ring = mmap.mmap(-1, flat.nbytes)
        ring[:] = bytes([fill]) * flat.nbytes
        flat.write_to(wrap_buffer(ring).ctypes.data)
        digests.add(batch_digest(flat.structure.key, ring, 0, flat.nbytes, flat.shapes))
    assert len(digests) == 1


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 4), (0, -1), (0, 101), (100, 1), (1 << 64, 1)])
def test_a_region_outside_the_buffer(offset: int, nbytes: int) -> None:
    with pytest.raises(ValueError, match="within its buffer of 100"):
        batch_digest(1, bytes(100), offset, nbytes, [])


def test_rows_digest_sums_over_any_split() -> None:
    def digest(batch: Any) -> int:
        flat = Flattener().flatten(batch)
        region = np.zeros(flat.nbytes, np.uint8)
        flat.write_to(region.ctypes.data)
        return rows_digest(flat.structure, flat.shapes, region, 0, flat.nbytes)

    images, labels = torch.arange(7 * 5 * 3).reshape(7, 5, 3), np.arange(7)

    def rows(begin: int, end: int) -> dict[str, Any]:
        own = {"image": images[begin:end].clone(), "label": labels[begin:end].copy()}
        return {**own, "epoch": 3, "scale": torch.ones(2, 2)}

    whole = digest(rows(0, 7))
    assert (digest(rows(0, 3)) + digest(rows(3, 4)) + digest(rows(4, 7))) % 2**64 == whole
    assert digest(rows(2, 2)) == 0
    assert digest({**rows(0, 7), "epoch": 4}) == whole, "no row"
    for column, place in (("image", (6, 4, 2)), ("label", (3,))):
        other = rows(0, 7)
        other[column][place] += 1
        assert digest(other) != whole
    swapped = rows(0, 7)
    swapped["label"][:2] = swapped["label"][1::-1].copy()
    assert digest(swapped) != whole, "a label belongs to its image"
    flat = Flattener().flatten(rows(0, 7))
    with pytest.raises(ValueError, match="dimensions in shapes"):
        rows_digest(flat.structure, flat.shapes[1:], bytes(flat.nbytes), 0, flat.nbytes)
    with pytest.raises(ValueError, match="the shapes of a batch must fit"):
        rows_digest(flat.structure, [1 << 40, *flat.shapes[1:]], bytes(flat.nbytes), 0, flat.nbytes)
    with pytest.raises(ValueError, match="a batch must lie within"):
        rows_digest(flat.structure, flat.shapes, bytes(8), 0, flat.nbytes)
