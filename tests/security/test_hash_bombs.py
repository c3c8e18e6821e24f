"""Keys that take a few hundred bytes of a pickle and for ever to hash: in the index and in objects of a checkpoint."""

from __future__ import annotations

import io
import pickle
import pickletools
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from penstock.client.checkpoint.restoring.torch_index import read_index
from penstock.client.checkpoint.saving.index_description import described
from penstock.client.checkpoint.values import pickle_hashing
from penstock.client.checkpoint.values.objects import load_object, load_tensor
from penstock.client.checkpoint.values.pickles import bounded
from penstock.client.checkpoint.values.torch_private import StorageInfo
from penstock.proto.errors import CheckpointCorruptError, CheckpointError
from penstock.proto.state.checkpoint_index import DescribedIndex

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
    with pytest.raises(CheckpointError, match=r"^'x' of y cannot be loaded: .*very long to hash"):
        load_object(file.getvalue(), "x", "y", unsafe=False)
    with pytest.raises(CheckpointCorruptError, match="very long to hash"):
        load_tensor(file.getvalue(), "x", torch.float32, (1,))


def test_a_key_that_is_in_itself_is_refused() -> None:
    with pytest.raises(pickle.UnpicklingError, match="contains itself"):
        bounded(b"\x80\x02cm\nC\n)\x81q\x01}X\x01\x00\x00\x00ah\x01sb}h\x01K\x00s" + b"N0" * 60 + b".")


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_what_shares_its_parts_is_not(protocol: int) -> None:
    part = ("a", (1, 2, (3, 4)))
    value = {(part, number): [part, {part: frozenset([part, number])}] for number in range(2000)}
    data = pickle.dumps(value, protocol)
    assert bounded(data) == data


# ---- the index that Penstock writes: its tail is not replayed

DUPLICATED = b"K\x01" + b"2\x86" * DEPTH


def nested() -> tuple[object, ...]:
    key: tuple[object, ...] = (1, 1)
    for _ in range(DEPTH):
        key = (key, key)
    return key


def remembered(place: int) -> bytes:
    """Return opcodes for a tuple of tuples, each of which holds the one before it twice."""
    gets = (b"j" + number.to_bytes(4, "little") for number in range(place, place + DEPTH))
    return b"(K\x01K\x01\x86\x94" + b"".join(get + get + b"\x86\x94" for get in gets) + b"t"


def written(entries: int = 1, offset: object = None) -> bytes:
    names = [f"entry-{number}" for number in range(entries)]
    paths = {name: (name, 7) for name in names}
    metadata = Metadata(dict.fromkeys(names, BytesStorageMetadata()), paths, {}, StorageMeta(), "1.0.0")
    stored: list[Any] = [((name, offset), 201, number, 1) for number, name in enumerate(names)]
    return DescribedIndex.decode(described(metadata, [("file", stored)])).pickle()


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The opcodes that were replayed."""
    found: list[str] = []
    step = pickle_hashing._Play.step

    def counted(play: pickle_hashing._Play, name: str, argument: object) -> None:
        found.append(name)
        step(play, name, argument)

    monkeypatch.setattr(pickle_hashing._Play, "step", counted)
    return found


def test_only_the_head_of_an_index_is_replayed(steps: list[str]) -> None:
    for entries in (5, 3000):
        steps.clear()
        metadata = read_index(written(entries), Path("x"), {"file": 5000})
        assert metadata.storage_data[MetadataIndex("entry-4", None, 201)] == StorageInfo("file", 4, 1)
        assert len(steps) < 120


@pytest.mark.parametrize("how", ["duplicated", "remembered"])
def test_a_bomb_in_an_index_tail_is_refused(how: str) -> None:
    data = written()
    before, behind = data.split(b"K\xc9")
    place = sum("PUT" in opcode.name or opcode.name == "MEMOIZE" for opcode, _, _ in pickletools.genops(before + b"."))
    bomb = DUPLICATED if how == "duplicated" else remembered(place)
    with pytest.raises(CheckpointCorruptError, match="very long to hash"):
        read_index(before + bomb + behind, Path("x"), {"file": 5000})


def test_bomb_among_shared_values_is_refused() -> None:
    with pytest.raises(CheckpointCorruptError, match="very long to hash"):
        read_index(written(offset=nested()), Path("x"), {"file": 5000})


@pytest.mark.parametrize("where", ["relative_path", "path", "dtype"])
def test_a_bomb_that_is_not_a_key_is_refused(where: str) -> None:
    metadata = pickle.loads(written())
    index, info = next(iter(metadata.storage_data.items()))
    if where == "relative_path":
        metadata.storage_data[index] = StorageInfo(nested(), info.offset, info.length)  # type: ignore[arg-type]
    elif where == "path":
        metadata.planner_data[index.fqn] = (nested(),)
    else:
        size = torch.Size([1])
        properties = TensorProperties(nested())  # type: ignore[arg-type]
        chunk = ChunkStorageMetadata(torch.Size([0]), size)
        metadata.state_dict_metadata[index.fqn] = TensorStorageMetadata(properties, size, [chunk])
    with pytest.raises(CheckpointCorruptError, match=r"file that the checkpoint|must be str and int|torch\.dtype"):
        read_index(pickle.dumps(metadata, 2), Path("x"), {"file": 5000})
