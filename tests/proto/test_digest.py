"""The fingerprint of a batch: the same everywhere, and another for another batch."""

from __future__ import annotations

import mmap
import time
import tracemalloc
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.proto.batch.digest import (
    EDGES,
    FEW_LEAVES,
    FULL_BELOW,
    SMALL_LEAF,
    WORDS,
    ShapesCache,
    batch_digest,
    plan_digest,
    region_digest,
    rows_digests,
    sampling_of,
)
from penstock.proto.batch.flatten import Flattener, wrap_buffer
from penstock.proto.batch.structure import MAX_LEAVES, Leaf, Node, Structure
from penstock.proto.lane.frames import pack_shapes

KIB, MIB = 1 << 10, 1 << 20
KNOWN = {
    (): 16590437233705701221,
    (64,): 9756458822665867802,
    (300 * KIB,): 10806254905057323483,
    (200 * KIB, 32, 200 * KIB): 6695094524729367416,
    (20 * KIB, 5) * 20: 5871712210237299832,
    (2 * MIB, 100 * KIB, 100 * KIB, 8): 16844195953405490738,  # those of 100 KiB are cheap together
}


class Region:
    """Batch of bytes in memory, with one leaf of each size."""

    def __init__(self, sizes: Sequence[int], seed: int = 0) -> None:
        self.structure = Structure.of(Node("u", (Leaf("t", "uint8", 1),) * len(sizes)))
        self.shapes = list(sizes)
        self.starts = np.cumsum([0, *(-size % 64 + size for size in sizes)]).tolist()
        self.nbytes = self.starts.pop()
        self.data = np.zeros(self.nbytes, np.uint8)
        self.rng = np.random.default_rng(seed)
        for leaf in range(len(sizes)):
            self.fill(leaf)

    def leaf(self, number: int) -> Any:
        return self.data[self.starts[number] :][: self.shapes[number]]

    def fill(self, number: int) -> None:
        self.leaf(number)[:] = self.rng.integers(0, 256, self.shapes[number], np.uint8)

    def digest(self, full: bool = False) -> int:
        return batch_digest(self.structure, self.data, 0, self.nbytes, self.shapes, full)


KINDS = [(), (64,), (FULL_BELOW,), (FULL_BELOW + 1,), (70_001,) * 5, (20 * KIB, 7) * 20]
"""Sizes of leaves: batches that are covered in full; one sampled leaf; few; many."""


@pytest.mark.parametrize("sizes", KINDS)
def test_it_is_one_function_of_the_bytes(sizes: tuple[int, ...]) -> None:
    region = Region(sizes)
    structure, size, shapes, wanted = region.structure, region.nbytes, region.shapes, region.digest()
    assert 0 <= wanted < 1 << 64
    ring = mmap.mmap(-1, size + 4096)
    ring[64 : 64 + size] = region.data.tobytes()
    for buffer in (ring, memoryview(ring), wrap_buffer(ring), np.frombuffer(ring, np.int32), bytearray(ring[:])):
        assert batch_digest(structure, buffer, 64, size, shapes) == wanted
    cache, dims = ShapesCache(structure), pack_shapes(shapes)
    for _ in range(4):  # a first batch of these shapes is read in another way than the next
        _, seed, sampling = cache.find(size, dims)
        assert region_digest(seed, memoryview(ring), 64, size, sampling) == wanted
    other = Structure.of(Node("l", structure.tree.children))  # type: ignore[union-attr]
    assert batch_digest(other, ring, 64, size, shapes) != wanted
    if sizes:
        # as many bytes with the gap
        assert batch_digest(structure, ring, 64, size, [shapes[0] ^ 1, *shapes[1:]]) != wanted


def test_known_values() -> None:
    """Digests lie in records: they may not change from one version to the next."""
    assert {sizes: Region(sizes, seed=7).digest() for sizes in KNOWN} == KNOWN


@settings(max_examples=60, deadline=None)
@given(st.binary(min_size=1, max_size=2000), st.data())
def test_every_bit_counts_in_a_small_batch(data: bytes, draw: st.DataObject) -> None:
    region = Region([len(data)])
    region.leaf(0)[:] = np.frombuffer(data, np.uint8)
    wanted, bit = region.digest(), draw.draw(st.integers(0, 8 * len(data) - 1))
    region.data[bit // 8] ^= 1 << bit % 8
    assert region.digest() != wanted


def random_sizes(rng: np.random.Generator) -> list[int]:
    """1 to 40 leaves of together 128 KiB to 4 MiB, about a third of them small."""
    count = int(rng.integers(1, 41))
    weights = rng.exponential(size=count) ** 2 + 1e-9
    sizes = (weights / weights.sum() * rng.integers(128 * KIB, 4 * MIB)).astype(int)
    small = rng.random(count) < 0.3
    sizes[small] = rng.integers(1, SMALL_LEAF + 1, small.sum())
    sizes[rng.integers(count)] += 128 * KIB
    return [int(size) for size in np.maximum(sizes, 1)]


@pytest.mark.parametrize("seed", range(6))
def test_no_leaf_is_left_out(seed: int) -> None:
    """Every byte of a leaf of up to 16 KiB counts, and every larger leaf."""
    rng = np.random.default_rng(seed)
    region = Region(random_sizes(rng), seed)
    wanted = region.digest()
    for number, size in enumerate(region.shapes):
        leaf = region.leaf(number)
        kept = leaf.copy()
        region.fill(number)
        if not np.array_equal(leaf, kept):
            assert region.digest() != wanted, (region.shapes, number)
        leaf[:] = kept
        for at in {0, size - 1, *rng.integers(0, size, 8 * (size <= SMALL_LEAF)).tolist()}:
            bit = 1 << int(rng.integers(8))
            leaf[at] ^= bit
            assert region.digest() != wanted, (region.shapes, number, at)
            leaf[at] ^= bit
    assert region.digest() == wanted


@pytest.mark.parametrize("count", [1, FEW_LEAVES, FEW_LEAVES + 1])
def test_large_leaves_are_sampled_throughout(count: int) -> None:
    """The ends of each count in full, and no long stretch of the rest escapes notice."""
    region = Region([300 * KIB + 17 * number for number in range(count)])
    wanted = region.digest()
    edge, stretches = (EDGES // count & -64, WORDS // 2) if count <= FEW_LEAVES else (256, 4)
    for number in range(count):
        leaf = region.leaf(number)
        for at in (0, edge - 1, -1, -edge + 64):
            leaf[at] ^= 1
            assert region.digest() != wanted
            leaf[at] ^= 1
        inner = leaf[edge : -edge + 64]
        stretch = len(inner) // stretches
        for start in range(0, len(inner) - stretch, stretch // 2):
            inner[start : start + stretch] ^= 1
            assert region.digest() != wanted, (number, start)
            inner[start : start + stretch] ^= 1


@pytest.mark.parametrize("sizes", [(MIB, 32), (20 * KIB,) * 20])
def test_in_full_every_byte_counts_at_any_size(sizes: tuple[int, ...]) -> None:
    region = Region(sizes)
    wanted = region.digest(full=True)
    assert wanted != region.digest()
    for at in region.rng.integers(0, region.nbytes, 200):
        region.data[at] ^= 1
        assert region.digest(full=True) != wanted
        region.data[at] ^= 1


# ---- what a faulty peer may announce


def test_sampling_of_the_most_leaves_takes_linear_time() -> None:
    """65,536 leaves, of which each must be sampled, in 1 GiB."""
    structure = Structure.of(Node("u", (Leaf("t", "uint8", 1),) * MAX_LEAVES))
    size = SMALL_LEAF + 64
    started = time.process_time()
    sampling = sampling_of(structure, size * MAX_LEAVES, [size] * MAX_LEAVES)
    assert time.process_time() - started < 2
    assert sampling is not None
    assert sampling.leaves == MAX_LEAVES


def test_cache_of_samplings_is_bounded() -> None:
    """A peer that sends other shapes each time, of a few and of many leaves."""
    count = 100
    structure = Region([1] * count).structure
    cache, memory = ShapesCache(structure), memoryview(bytes(count * 21 * KIB))
    tracemalloc.start()
    for number in range(30):
        size = SMALL_LEAF + 64 * number + 64
        for _ in range(3):
            _, seed, sampling = cache.find(size * count, pack_shapes([size] * count))
            assert sampling is not None
            region_digest(seed, memory, 0, size * count, sampling)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 1.2 * MIB


def test_rows_digest_sums_over_any_split() -> None:
    def digests(batch: Any) -> tuple[int, int]:
        flat = Flattener().flatten(batch)
        region = np.zeros(flat.nbytes, np.uint8)
        flat.write_to(region.ctypes.data)
        seed, _, _ = plan_digest(flat.structure, flat.nbytes, flat.shapes)
        return rows_digests(seed, flat.structure, flat.shapes, region, 0, flat.nbytes)

    def digest(batch: Any) -> int:
        return digests(batch)[0]

    images, labels = torch.arange(7 * 5 * 3).reshape(7, 5, 3), np.arange(7)

    def rows(begin: int, end: int) -> dict[str, Any]:
        own = {"image": images[begin:end].clone(), "label": labels[begin:end].copy()}
        return {**own, "epoch": 3, "scale": torch.ones(2, 2)}

    whole = digest(rows(0, 7))
    assert (digest(rows(0, 3)) + digest(rows(3, 4)) + digest(rows(4, 7))) % 2**64 == whole
    assert digest(rows(2, 2)) == 0
    turned = {**rows(0, 7), "image": images.flip(0).clone(), "label": np.arange(7)[::-1].copy()}
    for other in ({**rows(0, 7), "epoch": 4}, {**rows(0, 7), "scale": torch.zeros(2, 2)}, turned):
        assert digest(other) == whole, "no row, and no order"
        assert digests(other)[1] != digests(rows(0, 7))[1], "what replays compare"
    for column, place in (("image", (6, 4, 2)), ("label", (3,))):
        other = rows(0, 7)
        other[column][place] += 1
        assert digest(other) != whole
    swapped = rows(0, 7)
    swapped["label"][:2] = swapped["label"][1::-1].copy()
    assert digest(swapped) != whole, "a label belongs to its image"
    flat = Flattener().flatten(rows(0, 7))
    with pytest.raises(ValueError, match="dimensions in shapes"):
        rows_digests(0, flat.structure, flat.shapes[1:], bytes(flat.nbytes), 0, flat.nbytes)
    with pytest.raises(ValueError, match="a tensor must end within"):
        rows_digests(0, flat.structure, [1 << 40, *flat.shapes[1:]], bytes(flat.nbytes), 0, flat.nbytes)
    with pytest.raises(ValueError, match="must lie within"):
        rows_digests(0, flat.structure, flat.shapes, bytes(8), 0, flat.nbytes)
