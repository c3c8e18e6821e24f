"""Checkpoints that somebody else has made, to harm whoever restores them."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from saved_states import save_of
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save

from penstock.client.checkpoint import AsyncCheckpointer, AsyncFileSystemWriter
from penstock.client.checkpoint.restoring import index
from penstock.client.checkpoint.restoring.places import FolderPlace, PinnedCheckpoint
from penstock.client.checkpoint.restoring.restore import load
from penstock.client.checkpoint.saving import folder_save
from penstock.client.checkpoint.saving.save_job import WriteFailed
from penstock.client.checkpoint.values.objects import bounded
from penstock.proto.errors import CheckpointCorruptError, CheckpointError
from penstock.proto.state.checkpoint_files import (
    INDEX,
    MANIFEST,
    METADATA,
    CheckpointFile,
    checkpoints,
    read_manifest,
)

DATA = "__0_0.distcp"


def state(value: float = -1.0) -> dict[str, Any]:
    return {"model": nn.Linear(4, 2), "x": torch.full((1000,), value), "it": {"n": value, (1, 2): [value]}}


@pytest.fixture(scope="module")
def checkpointer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncCheckpointer]:
    """Yield one checkpointer for all tests, whose writer is a process. A copy of its checkpoint of step 1 is kept."""
    with AsyncCheckpointer(tmp_path_factory.mktemp("hostile") / "saved", fsync=False, threads=1) as checkpointer:
        checkpointer.save(1, state(5.0))
        checkpointer.wait()
        shutil.copytree(checkpointer.folder, checkpointer.folder.with_name("good"))
        yield checkpointer


@pytest.fixture
def folder(checkpointer: AsyncCheckpointer) -> Path:
    """Folder of checkpoints, with one of step 1."""
    shutil.rmtree(checkpointer.folder)
    return Path(shutil.copytree(checkpointer.folder.with_name("good"), checkpointer.folder))


def rewritten(path: Path, change: Callable[[CheckpointFile], CheckpointFile]) -> None:
    """The manifest, with its own checksum: whoever writes the files writes it too."""
    manifest = read_manifest(path)
    (path / MANIFEST).write_bytes(replace(manifest, files=tuple(map(change, manifest.files))).encode())


def with_index(path: Path, data: bytes) -> None:
    (path / INDEX).write_bytes(data)
    digest = xxhash.xxh3_128_hexdigest(data)
    rewritten(path, lambda file: replace(file, nbytes=len(data), xxh3=digest) if file.name == INDEX else file)


@pytest.mark.parametrize("name", ["../other", "/etc/hostname", ".."])
def test_a_file_outside_the_folder_is_not_read(folder: Path, checkpointer: AsyncCheckpointer, name: str) -> None:
    rewritten(folder / "step-1", lambda file: replace(file, name=name) if file.name == DATA else file)
    with pytest.raises(CheckpointCorruptError, match="a file must have a plain name"):
        checkpointer.restore(state(), step=1)


def test_a_fifo_is_not_waited_for(folder: Path, checkpointer: AsyncCheckpointer) -> None:
    """Whoever writes a checkpoint can say that a file is empty, as a FIFO seems to be."""
    path = folder / "step-1"
    (path / INDEX).unlink()
    os.mkfifo(path / INDEX)
    rewritten(path, lambda file: replace(file, nbytes=0) if file.name == INDEX else file)
    with pytest.raises(CheckpointCorruptError, match=f"{INDEX}.* cannot be read: the path must be a regular file"):
        checkpointer.restore(state(), step=1)


def test_a_lock_that_is_a_link_cuts_nothing(folder: Path, checkpointer: AsyncCheckpointer, tmp_path: Path) -> None:
    victim = tmp_path / "thesis"
    victim.write_text("years of work")
    (folder / ".lock").unlink(missing_ok=True)
    (folder / ".lock").symlink_to(victim)
    with pytest.raises(
        CheckpointError, match=r"\.lock cannot be locked: the path must not be a symbolic link \(to .*/thesis\)"
    ):
        checkpointer.restore(state())
    checkpointer.save(2, state())
    with pytest.raises(CheckpointError, match="the path must not be a symbolic link"):
        checkpointer.wait()
    assert victim.read_text() == "years of work"


def test_small_files_are_read_within_bounds(folder: Path, checkpointer: AsyncCheckpointer) -> None:
    """Each was waited for without end, or read until the memory was full."""
    latest, manifest, report = (
        folder / name for name in ("latest", "step-1/penstock.json", "step-2.tmp-0/rank-1.json")
    )
    report.parent.mkdir()
    os.mkfifo(report)
    assert save_of(folder, 0)._read(report) is None
    latest.unlink()
    os.mkfifo(latest)
    assert checkpointer.restore(state()) == 1
    os.truncate(manifest, 1 << 40)
    with pytest.raises(CheckpointCorruptError, match=r"penstock\.json cannot be read: the file must"):
        checkpointer.restore(state())
    manifest.unlink()
    manifest.symlink_to("/dev/zero")
    with pytest.raises(CheckpointCorruptError, match=r"penstock\.json cannot be read: the path must"):
        checkpointer.restore(state())


def test_second_name_of_a_file_is_not_written(folder: Path, checkpointer: AsyncCheckpointer, tmp_path: Path) -> None:
    victim = tmp_path / "thesis"
    victim.write_text("years of work")
    (folder / ".lock").unlink(missing_ok=True)
    (folder / ".lock").hardlink_to(victim)
    checkpointer.save(2, state())
    checkpointer.wait()
    assert victim.read_text() == "years of work"


@pytest.mark.parametrize(
    "change",
    [
        {"step": float("inf")},
        {"parts": "0:0123456789abcdef 9000000000000000000:0123456789abcdef"},
        {"parts": "64:0123456789abcdef 0:0123456789abcdef"},
        {"bytes": 10**300},
        {"deep": True},
    ],
)
def test_manifest_of_impossible_values_is_refused(
    folder: Path, checkpointer: AsyncCheckpointer, change: dict[str, Any]
) -> None:
    path = folder / "step-1" / MANIFEST
    body = json.loads(path.read_text())["checkpoint"]
    for part in [body, *body["files"]]:
        part.update({key: value for key, value in change.items() if key in part})
    digest = xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True).encode())
    text = json.dumps({"checkpoint": body, "xxh3": digest})
    path.write_text("[" * 200_000 if "deep" in change else text)
    with pytest.raises(CheckpointCorruptError, match=r"penstock\.json is damaged: "):
        checkpointer.restore(state())
    checkpointer.save(2, state(6.0))
    checkpointer.wait()
    assert checkpointer.restore(state()) == 2


# ---- a folder whose names another process changes during a save


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    """A folder of ours elsewhere, in which nothing may change."""
    victim = tmp_path / "victim"
    victim.mkdir()
    for name in ("thesis", MANIFEST, METADATA, "rank-1.json", "failed.json"):
        (victim / name).write_text("years of work")
    before = sorted(victim.iterdir())
    yield victim
    assert sorted(victim.iterdir()) == before
    assert {path.read_text() for path in before} == {"years of work"}


def swap(path: Path, victim: Path) -> None:
    path.rename(path.with_name("away"))
    path.symlink_to(victim)


def test_folder_swapped_after_commit_empties_none(folder: Path, victim: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sync(path: Path) -> None:
        if (folder / "step-2").is_dir() and not (folder / "step-2").is_symlink():
            swap(folder / "step-2", victim)

    monkeypatch.setattr(folder_save, "sync_folder", sync)
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(save_of(folder, rank).run) for rank in (0, 1)]:
            with contextlib.suppress(WriteFailed):
                done.result()
    assert (folder / "step-2").is_symlink()


def test_folder_swapped_before_commit_is_an_error(folder: Path, victim: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def listed(path: Path, **options: Any) -> list[Any]:
        swap(folder / "step-2.tmp-0abc", victim)
        return checkpoints(path, **options)

    monkeypatch.setattr(folder_save, "checkpoints", listed)
    with ThreadPoolExecutor(2) as pool:
        first, _ = [pool.submit(save_of(folder, rank, timeout_s=2).run) for rank in (0, 1)]
        with pytest.raises(WriteFailed, match=r"step-2\.tmp-0abc was replaced by another process during the save"):
            first.result()


def test_folder_that_is_a_link_is_not_written(folder: Path, victim: Path) -> None:
    (folder / "step-2.tmp-0abc").symlink_to(victim)
    save = save_of(folder, 1)
    with pytest.raises(WriteFailed, match=r"step-2\.tmp-0abc: the path must be a folder, got a link or a file"):
        save.run()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make another user's link")
def test_link_of_another_user_in_tmp_is_refused(folder: Path, tmp_path: Path) -> None:
    """The checkpoints of another run, which it led to, were surplus."""
    shared = tmp_path / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    (shared / "run").symlink_to(folder)
    os.lchown(shared / "run", 12_345, 12_345)
    with AsyncCheckpointer(shared / "run", keep_last=1) as checkpointer:
        checkpointer.save(2, state())
        with pytest.raises(CheckpointError, match=r"/tmp/run: the path must not contain a link of another user"):
            checkpointer.wait()
    assert (folder / "step-1").is_dir()


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_torch_s_writer_writes_through_no_link(tmp_path: Path, victim: Path) -> None:
    (tmp_path / "saved").mkdir()
    for name in (DATA, "__0_1.distcp", ".metadata.tmp"):
        (tmp_path / "saved" / name).symlink_to(victim / "thesis")
    save({"x": torch.ones(3)}, storage_writer=AsyncFileSystemWriter(tmp_path / "saved", sync_files=False))
    found = {"x": torch.zeros(3)}
    dcp_load(found, storage_reader=FileSystemReader(tmp_path / "saved"))
    assert found["x"].eq(1).all()


# ---- the index


def changed(index: dict[str, Any], how: str) -> dict[str, Any]:
    value, tensor = index["values"]["x"], index["tensors"][index["values"]["x"][0]]
    match how:
        case "a file that is not there":
            index["files"][0] = "../x"
        case "bytes that are not there":
            value[5] = 1 << 50
        case "bytes before the first":
            value[4] = -64
        case "a tensor of more than was written":
            tensor[1:] = [[1 << 50], [[[0], [1 << 50]]]]
        case "parts that leave values out":
            tensor[2][0][1] = [999]
        case "a part beyond the tensor":
            tensor[2] = [[[500], [1000]]]
        case "two places":
            value += value[2:]
        case "a path of lists":
            value[1] = [[["x"]]]
        case "no dtype":
            tensor[0] = "save"
        case "a newer format":
            index["format"] = 9
    return index


@pytest.mark.parametrize(
    "how",
    [
        "a file that is not there",
        "bytes that are not there",
        "bytes before the first",
        "a tensor of more than was written",
        "parts that leave values out",
        "a part beyond the tensor",
        "two places",
        "a path of lists",
        "no dtype",
        "a newer format",
    ],
)
def test_an_index_of_other_files_is_refused(folder: Path, checkpointer: AsyncCheckpointer, how: str) -> None:
    path = folder / "step-1"
    with_index(path, json.dumps(changed(json.loads((path / INDEX).read_text()), how)).encode())
    with pytest.raises(CheckpointCorruptError, match=r"index\.json (cannot be read|is in format 9)"):
        checkpointer.restore(state())


def test_random_damage_is_read_or_refused(folder: Path) -> None:
    path = folder / "step-1"
    pinned, good = PinnedCheckpoint(1, str(path), read_manifest(path).save), (path / INDEX).read_bytes()
    into, dice, refused = state(), random.Random(7), 0
    for _ in range(300):
        bad = bytearray(good)
        for _ in range(dice.choice([1, 1, 1, 2, 5])):
            bad[dice.randrange(len(bad))] = dice.randrange(256)
        if dice.random() < 0.2:
            bad = bad[: dice.randrange(len(bad))]
        with_index(path, bytes(bad))
        try:
            load(FolderPlace(path.parent), pinned, copy.deepcopy(into), 0, 1, allow_unsafe_types=False)
        except CheckpointError:
            refused += 1
    assert refused > 100


# ---- the index of a checkpoint of an earlier Penstock, a pickle


def getattr_of(*names: str) -> bytes:
    """Pickle that gets these attributes, one of the other, from a class that is allowed."""
    data = b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n"
    for name in names:
        data = b"cbuiltins\ngetattr\n(" + data + f"V{name}\n".encode() + b"tR"
    return data


def hash_bomb() -> bytes:
    """A dict whose key is a pair of one tuple, which is a pair of one tuple, and so on."""
    return b"}K\x01" + b"2\x86" * 60 + b"K\x00s"


@pytest.mark.parametrize(
    ("pickled", "words"),
    [
        (b"cposix\nsystem\n(Vtouch {marker}\ntR", r"names posix\.system, which no index of torch contains"),
        (getattr_of("__init__", "__globals__"), "no attribute"),
        (b"X\xff\xff\xff\xff", "(truncated|MemoryError|exceeds)"),
        (b"N\x72\xff\xff\xff\x7f", "(MemoryError|ended with|no attribute)"),
        (hash_bomb(), r"takes longer than 1\.5 s"),
        (pickle.dumps([]), "no attribute"),
    ],
)
def test_a_metadata_that_harms_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pickled: bytes, words: str
) -> None:
    monkeypatch.setattr(index, "READER_S", 1.5)
    marker = tmp_path / "ran"
    data = pickled.replace(b"{marker}", str(marker).encode()) + b"."
    with pytest.raises(CheckpointCorruptError, match=rf"^x/\.metadata cannot be read: .*{words}"):
        index.converted(data, "x/.metadata")
    assert not marker.exists()


# ---- pickles of objects


@pytest.mark.parametrize(
    "data",
    [
        b"N\x72\xff\xff\xff\x7f.",  # LONG_BINPUT: place 2,147,483,647 of the memo
        b"\x96" + (1 << 40).to_bytes(8, "little") + b".",  # BYTEARRAY8
        b"X\xff\xff\xff\xffabc.",
        b"",
    ],
)
def test_a_pickle_beyond_its_length_is_refused(data: bytes) -> None:
    with pytest.raises(pickle.UnpicklingError):
        bounded(data)
