"""Keys that take a few hundred bytes of a pickle and for ever to hash: in the index and in objects of a checkpoint."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from penstock.client.checkpoint.restoring.torch_index import read_index
from penstock.client.checkpoint.values.objects import load_object, load_tensor
from penstock.client.checkpoint.values.pickles import bounded
from penstock.proto.errors import CheckpointCorruptError, CheckpointError

DEPTH = 60


def by_memo() -> bytes:
    """A dict whose key is a pair of one tuple, which is a pair of one tuple, and so on."""
    tuples = b"".join(b"h%ch%c\x86q%c0" % (number, number, number + 1) for number in range(1, DEPTH))
    return b"\x80\x02}K\x01K\x01\x86q\x010" + tuples + b"h%cK\x00s." % DEPTH


def by_copy() -> bytes:
    return b"\x80\x02}K\x01" + b"2\x86" * DEPTH + b"K\x00s."


def by_later() -> bytes:
    """Objects whose parts come behind the references to them."""
    begin = b"".join(b"cm\nC\n)\x81q%c0" % number for number in range(1, DEPTH + 1))
    build = b"".join(b"h%c}X\x01\x00\x00\x00ah%ch%c\x86sb0" % (n, n + 1, n + 1) for n in range(1, DEPTH))
    return b"\x80\x02" + begin + build + b"}h\x01K\x00s."


def in_a_set() -> bytes:
    return b"\x80\x04\x8f(K\x01" + b"2\x86" * DEPTH + b"\x90."


BOMBS = [by_memo, by_copy, by_later, in_a_set]


@pytest.mark.parametrize("bomb", BOMBS)
def test_an_index_is_refused_at_once(bomb: Callable[[], bytes]) -> None:
    with pytest.raises(CheckpointCorruptError, match="very long to hash"):
        read_index(bomb(), Path("x"), {})


@pytest.mark.parametrize("bomb", BOMBS)
@pytest.mark.parametrize("first", ["a/data.pkl", "a/version"])
def test_an_object_is_refused_at_once(bomb: Callable[[], bytes], first: str) -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in sorted(("a/data.pkl", "a/version"), key=lambda name: name != first):
            archive.writestr(name, bomb() if name.endswith("pkl") else b"3\n")
    with pytest.raises(CheckpointError, match=r"very long to hash|is not loaded unasked"):
        load_object(file.getvalue(), "x", "y", unsafe=False)
    with pytest.raises(CheckpointCorruptError, match="very long to hash"):
        load_tensor(file.getvalue(), "x", torch.float32, (1,))


def test_a_key_that_is_in_itself_is_refused() -> None:
    with pytest.raises(pickle.UnpicklingError, match="is in itself"):
        bounded(b"\x80\x02cm\nC\n)\x81q\x01}X\x01\x00\x00\x00ah\x01sb}h\x01K\x00s" + b"N0" * 60 + b".")


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_what_shares_its_parts_is_not(protocol: int) -> None:
    part = ("a", (1, 2, (3, 4)))
    value = {(part, number): [part, {part: frozenset([part, number])}] for number in range(2000)}
    data = pickle.dumps(value, protocol)
    assert bounded(data) == data
