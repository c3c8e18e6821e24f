"""Checkpoints that somebody else has made, to harm whoever restores them."""

from __future__ import annotations

import copy
import os
import pickle
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from torch import nn

from penstock.client.checkpoint import AsyncCheckpointer
from penstock.client.checkpoint.restoring.restore import load
from penstock.client.checkpoint.values.pickles import bounded
from penstock.proto.errors import CheckpointCorruptError, CheckpointError
from penstock.proto.state.checkpoint_files import MANIFEST, METADATA, CheckpointFile, read_manifest

DATA = "__0_0.distcp"


def state(value: float = -1.0) -> dict[str, Any]:
    return {"model": nn.Linear(4, 2), "x": torch.full((1000,), value), "it": {"n": value, (1, 2): [value]}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folder of checkpoints, with one of step 1."""
    with AsyncCheckpointer(tmp_path / "saved", fsync=False, threads=1) as checkpointer:
        checkpointer.save(1, state(5.0))
    return tmp_path / "saved"


def restored(folder: Path, **options: Any) -> int | None:
    with AsyncCheckpointer(folder) as checkpointer:
        return checkpointer.restore(state(), **options)


def rewritten(path: Path, change: Callable[[CheckpointFile], CheckpointFile]) -> None:
    """The manifest, with its own checksum: whoever writes the files writes it too."""
    manifest = read_manifest(path)
    (path / MANIFEST).write_bytes(replace(manifest, files=tuple(map(change, manifest.files))).encode())


def with_index(path: Path, data: bytes) -> None:
    (path / METADATA).write_bytes(data)
    digest = xxhash.xxh3_128_hexdigest(data)
    rewritten(path, lambda file: replace(file, nbytes=len(data), xxh3=digest) if file.name == METADATA else file)


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("name", ["../other", "/etc/hostname", "a/b", "..", ".", "", "x\0"])
def test_a_file_outside_the_folder_is_not_read(folder: Path, name: str, verify: bool) -> None:
    rewritten(folder / "step-1", lambda file: replace(file, name=name) if file.name == DATA else file)
    with pytest.raises(CheckpointCorruptError, match="is no plain file name in its folder"):
        restored(folder, step=1, verify=verify)


@pytest.mark.parametrize("name", [METADATA, MANIFEST])
def test_a_fifo_is_not_waited_for(folder: Path, name: str) -> None:
    path = folder / "step-1"
    (path / name).unlink()
    os.mkfifo(path / name)
    if name == METADATA:  # whoever writes a checkpoint can say that a file is empty, as a FIFO seems to be
        rewritten(path, lambda file: replace(file, nbytes=0) if file.name == name else file)
    with pytest.raises(CheckpointCorruptError, match=f"{name}.* cannot be read: it is not a regular file"):
        restored(folder, step=1)


def test_a_lock_that_is_a_link_cuts_nothing(folder: Path, tmp_path: Path) -> None:
    victim = tmp_path / "thesis"
    victim.write_text("years of work")
    (folder / ".lock").unlink(missing_ok=True)
    (folder / ".lock").symlink_to(victim)
    with pytest.raises(CheckpointError, match=r"\.lock cannot be locked: it is a symbolic link \(to .*/thesis\)"):
        restored(folder)
    with AsyncCheckpointer(folder) as checkpointer:
        checkpointer.save(2, state())
        with pytest.raises(CheckpointError, match="it is a symbolic link"):
            checkpointer.wait()
    assert victim.read_text() == "years of work"


# ---- the index


@pytest.mark.parametrize(
    "data",
    [
        b"N\x72\xff\xff\xff\x7f.",  # LONG_BINPUT: place 2,147,483,647 of the memo
        b"\x96" + (1 << 40).to_bytes(8, "little") + b".",  # BYTEARRAY8
        b"Np99999999999\n.",
        b"X\xff\xff\xff\xffabc.",
        b"cno end",
        b"",
        b"N",
    ],
)
def test_a_pickle_beyond_its_length_is_refused(data: bytes) -> None:
    with pytest.raises(pickle.UnpicklingError):
        bounded(data)


@pytest.mark.parametrize("protocol", range(1, pickle.HIGHEST_PROTOCOL + 1))
def test_what_python_pickles_is_within_its_bounds(protocol: int) -> None:
    many = {number: (str(number), [number, float(number)]) for number in range(1000)}
    for value in (None, 2.5, -5, 10**3000, "x" * 300, b"y" * 70_000, bytearray(b"z" * 300), {1}, frozenset([2]), many):
        data = pickle.dumps(value, protocol) + b"what comes after it"
        assert bounded(data) == data


def changed(metadata: Any, how: str) -> Any:
    index, info = next((index, info) for index, info in metadata.storage_data.items() if index.fqn == "x")
    saved = metadata.state_dict_metadata["x"]
    chunk = saved.chunks[0]
    match how:
        case "a file that is not there":
            metadata.storage_data[index] = replace(info, relative_path="../x")
        case "bytes that are not there":
            metadata.storage_data[index] = replace(info, length=1 << 50)
        case "bytes before the first":
            metadata.storage_data[index] = replace(info, offset=-64)
        case "a tensor of more than was written":
            huge = torch.Size([1 << 50])
            metadata.state_dict_metadata["x"] = replace(saved, size=huge, chunks=[replace(chunk, sizes=huge)])
        case "parts that leave values out":
            metadata.state_dict_metadata["x"] = replace(saved, chunks=[replace(chunk, sizes=torch.Size([999]))])
        case "no place":
            del metadata.storage_data[index]
        case "no path":
            metadata.planner_data["x"] = ()
        case "no dtype":
            saved.properties.dtype = "float32"
    return metadata


@pytest.mark.parametrize(
    "how",
    [
        "a file that is not there",
        "bytes that are not there",
        "bytes before the first",
        "a tensor of more than was written",
        "parts that leave values out",
        "no place",
        "no path",
        "no dtype",
    ],
)
def test_an_index_of_other_files_is_refused(folder: Path, how: str) -> None:
    path = folder / "step-1"
    with_index(path, pickle.dumps(changed(pickle.loads((path / METADATA).read_bytes()), how)))
    with pytest.raises(CheckpointCorruptError, match=r"\.metadata cannot be read: '(x|it.*)' "):
        restored(folder)


def test_random_damage_is_read_or_refused(folder: Path) -> None:
    path = folder / "step-1"
    save, good = read_manifest(path).save, (path / METADATA).read_bytes()
    into, dice, refused = state(), random.Random(7), 0
    for _ in range(300):
        bad = bytearray(good)
        for _ in range(dice.choice([1, 1, 1, 2, 5])):
            bad[dice.randrange(len(bad))] = dice.randrange(256)
        if dice.random() < 0.2:
            bad = bad[: dice.randrange(len(bad))]
        with_index(path, bytes(bad))
        try:
            load(path, save, copy.deepcopy(into), 0, 1, allow_unsafe_types=False)
        except CheckpointError:
            refused += 1
    assert refused > 100
