"""Leaves are views of the ring: their slot comes back exactly once, and a hostile peer gets a ProtocolError."""

from __future__ import annotations

import gc
import io
import mmap
import os
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from batch_memory import SIZE, Ring, received

from penstock.proto.batch.flatten import Assembler, Flattener
from penstock.proto.errors import ProtocolError


class Slot:
    """Batch assembled as views, and the deque to which its permit is returned."""

    def __init__(self, batch: Any, copy: bool = False) -> None:
        self.released: deque[int] = deque()
        flat = Flattener().flatten(batch)
        self.ring = Ring()
        self.ring.write(flat)
        self.batch = Assembler(received(flat)).assemble(
            flat.shapes, self.ring.view, 128, flat.nbytes, self.released, 7, copy
        )

    def tokens(self) -> list[int]:
        gc.collect()
        return list(self.released)


def test_views_are_the_ring_and_writable() -> None:
    slot = Slot({"t": torch.zeros(4, dtype=torch.uint8), "a": np.zeros(4, np.uint8), "h": torch.zeros(4).bfloat16()})
    slot.batch["t"][0] = 7
    slot.batch["a"][0] = 8
    slot.batch["h"].add_(1)
    assert slot.ring.mmap[128] == 7
    assert slot.ring.mmap[128 + 64] == 8
    assert slot.ring.mmap[128 + 129] == 0x3F


def test_the_slot_returns_with_the_last_leaf() -> None:
    slot = Slot([torch.ones(3), np.ones(3), torch.ones(2).bfloat16()])
    leaves = dict(enumerate(slot.batch))
    slot.batch = None
    for index in (1, 2, 0):
        assert slot.tokens() == []
        del leaves[index]
    assert slot.tokens() == [7]


@pytest.mark.parametrize(
    "derive",
    [
        lambda t, a, h: t[1:][0].view(-1),
        lambda t, a, h: t.numpy()[0],
        lambda t, a, h: t.untyped_storage(),
        lambda t, a, h: memoryview(t.numpy()),
        lambda t, a, h: a[0][1:][:1],
        lambda t, a, h: a.base[3:],
        lambda t, a, h: torch.from_numpy(a)[0],
        lambda t, a, h: h.view(torch.int16).numpy(),
        lambda t, a, h: (t * torch.ones(2, 2, requires_grad=True)).sum().grad_fn,
    ],
)
def test_a_view_of_a_view_keeps_the_slot(derive: Callable[[Any, Any, Any], Any]) -> None:
    slot = Slot([torch.ones(2, 2), np.ones((2, 2)), torch.ones(2, 2).bfloat16()])
    derived = derive(*slot.batch)
    slot.batch = None
    assert slot.tokens() == []
    del derived
    assert slot.tokens() == [7]


@pytest.mark.parametrize(
    "derive",
    [
        lambda t, a: t.clone(),
        lambda t, a: a.copy(),
        lambda t, a: torch.load(_saved(t)),
    ],
)
def test_copies_do_not_keep_the_slot(derive: Callable[[Any, Any], Any]) -> None:
    slot = Slot([torch.ones(2, 2), np.ones((2, 2))])
    derived = derive(*slot.batch)
    slot.batch = None
    assert slot.tokens() == [7]
    del derived
    assert slot.tokens() == [7]


def _saved(tensor: torch.Tensor) -> io.BytesIO:
    out = io.BytesIO()
    torch.save(tensor, out)
    out.seek(0)
    return out


def test_values_are_copied_out() -> None:
    slot = Slot(
        [np.float32(3), "text", b"bytes", 5, np.datetime64(3, "D"), np.str_("s"), np.ones((0, 2)), torch.ones(0)]
    )
    assert list(slot.released) == [7], "nothing in it is a view"
    slot.ring.mmap[:] = bytes(SIZE)
    assert slot.batch[:6] == [np.float32(3), "text", b"bytes", 5, np.datetime64(3, "D"), "s"]
    assert [type(value) for value in slot.batch[:6]] == [np.float32, str, bytes, int, np.datetime64, np.str_]


def test_copies_are_independent() -> None:
    source = {
        "t": torch.arange(5),
        "a": np.arange(5),
        "h": torch.ones(3, dtype=torch.bfloat16),
        "e": torch.ones(0),
        "s": "x",
    }
    slot = Slot(source, copy=True)
    assert list(slot.released) == [7]
    slot.ring.mmap[:] = bytes(SIZE)
    assert slot.batch["t"].tolist() == slot.batch["a"].tolist() == [0, 1, 2, 3, 4]
    assert slot.batch["h"].tolist() == [1, 1, 1]
    assert slot.batch["e"].shape == (0,)
    assert slot.batch["s"] == "x"
    slot.batch["t"][0] = 9
    assert slot.ring.mmap[128] == 0
    assert slot.batch["t"].data_ptr() % 64 == 0
    assert slot.batch["h"].data_ptr() % 64 == 0
    slot.batch = None
    assert slot.tokens() == [7]


@pytest.mark.parametrize("copy", [False, True])
def test_each_leaf_has_a_storage_of_its_own(copy: bool) -> None:
    slot = Slot(
        {
            "small": torch.ones(16),
            "big": torch.ones(100_000),
            "half": torch.ones(8).half(),
            "b": torch.ones(4).bfloat16(),
        },
        copy,
    )
    assert slot.batch["small"].untyped_storage().nbytes() == 64
    assert slot.batch["half"].untyped_storage().nbytes() == 16
    assert slot.batch["b"].untyped_storage().nbytes() == 8
    assert slot.batch["b"].storage_offset() == 0
    assert len(_saved(slot.batch["small"]).getvalue()) < 4096
    assert len(_saved(slot.batch["b"]).getvalue()) < 4096
    assert torch.equal(torch.load(_saved(slot.batch["big"])), torch.ones(100_000))


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_child_releases_nothing() -> None:
    slot = Slot([torch.ones(2), np.ones(2)])
    child = os.fork()
    if child == 0:  # the child's deque is its own copy; still nothing may be appended
        slot.batch = None
        gc.collect()
        own = Slot([torch.ones(2)])  # but what the child assembles itself comes back to it
        own.batch = None
        gc.collect()
        os._exit(0 if not slot.released and list(own.released) == [7] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert slot.tokens() == []
    assert slot.batch[0].tolist() == [1, 1]
    slot.batch = None
    assert slot.tokens() == [7]


def test_the_ring_cannot_be_unmapped_under_views() -> None:
    memory = mmap.mmap(-1, 4096)
    flat = Flattener().flatten(np.ones(3))
    flat.write_to(np.frombuffer(memory, np.uint8).ctypes.data)
    leaf = Assembler(flat.structure).assemble(flat.shapes, memory, 0, flat.nbytes)  # the plain mmap is taken, too
    gc.collect()
    with pytest.raises(BufferError):
        memory.close()
    assert leaf.tolist() == [1, 1, 1]
    del leaf
    gc.collect()
    memory.close()


def test_leaves_can_be_replaced_by_move() -> None:
    flat = Flattener().flatten({"x": torch.tensor([1, 2]), "rest": ["text", None, np.arange(3)]})
    ring = Ring()
    ring.write(flat)
    seen: list[list[Any]] = []

    def move(leaves: list[Any]) -> list[Any]:
        seen.append([type(leaf) for leaf in leaves])
        return [leaf * 10 if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    assembler = Assembler(received(flat))
    batch = assembler.assemble(flat.shapes, ring.view, 128, flat.nbytes, move=move)
    assert seen == [[torch.Tensor, str, np.ndarray]]
    assert batch["x"].tolist() == [10, 20]
    assert batch["rest"][:2] == ["text", None]
    with pytest.raises(ProtocolError):
        assembler.assemble(flat.shapes, ring.view, 128, flat.nbytes + 64, move=move)
    assert len(seen) == 1, "what does not fit is moved nowhere"


@pytest.mark.parametrize(
    ("batch", "shapes", "nbytes", "match"),
    [
        (torch.ones(4), [4, 1], 64, "needs 1 dimensions >= 0, got 2"),
        (torch.ones(4), [-4], 64, "dimensions >= 0"),
        (torch.ones(4), [17], 64, "must end within its batch of 64 bytes, got 68"),
        (torch.ones(2, 2), [1 << 40, 1 << 40], 64, "must end within"),
        (torch.ones(4), [4], 128, "must fill its 128 bytes, got leaves of 64 bytes"),
        (torch.ones(4), [4], 2 * SIZE, "must lie within its buffer of"),
        (torch.ones(2, 2), [0, 1 << 64], 0, "cannot make an array with the dimensions"),
        (5, [0], 0, "an int must have 1 to 1048576 bytes, got 0"),
    ],
)
def test_what_does_not_fit_is_said(batch: Any, shapes: list[int], nbytes: int, match: str) -> None:
    flat = Flattener().flatten(batch)
    released: deque[int] = deque()
    ring = Ring()
    with pytest.raises(ProtocolError, match=match):
        Assembler(flat.structure).assemble(shapes, ring.view, 128, nbytes, released, 1)
    gc.collect()
    assert not released


def test_bad_bytes_of_values() -> None:
    ring = Ring(4 << 20, fill=0xFF)
    with pytest.raises(ProtocolError, match="utf-8"):
        Assembler(Flattener().flatten("abc").structure).assemble([3], ring.view, 0, 64)
    with pytest.raises(ProtocolError, match="a bool in a batch must be the byte 0 or 1, got 255"):
        Assembler(Flattener().flatten(True).structure).assemble([], ring.view, 0, 64)
    with pytest.raises(ProtocolError, match="an int must have 1 to 1048576 bytes, got 1048577"):
        Assembler(Flattener().flatten(1).structure).assemble([(1 << 20) + 1], ring.view, 0, (1 << 20) + 64)
