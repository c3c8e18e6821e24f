"""Checkpoints in a bucket of a real S3 server, and copies of their files on the local disk."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranked import run
from s3_server import S3Server
from small_disk import small_disk_at
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from penstock.client.checkpoint import AsyncCheckpointer
from penstock.data.remote.bucket import Bucket
from penstock.proto.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    InvalidArgumentError,
)
from penstock.proto.state.checkpoint_catalog import folder_name
from penstock.proto.state.checkpoint_files import MANIFEST

for needed in ("moto", "s3fs"):
    pytest.importorskip(needed)

RUN = "s3://bucket/a/run"


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture
def store(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """The server with an empty bucket."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    server.make_bucket("bucket")
    yield server
    server.remove_bucket("bucket")


def x(value: float, count: int = 3_000_000) -> dict[str, torch.Tensor]:
    return {"x": torch.full((count,), value)}


def back(checkpointer: AsyncCheckpointer, step: int | None = None, **options: Any) -> tuple[int | None, float]:
    into = x(-1.0)
    found = checkpointer.restore(into, step, **options)
    value = float(into["x"][0])
    assert into["x"].eq(value).all()
    return found, value


def test_the_newest_ones_are_kept(store: S3Server) -> None:
    """A save of a step again replaces it, and nothing else stays behind than the list before."""
    with AsyncCheckpointer(f"{RUN}/", keep_last=2, keep_every=4) as checkpointer:
        assert (checkpointer.newest(), checkpointer.latest(), checkpointer.restore(x(0))) == (None, None, None)
        for step in (4, 7, 5, 7):
            checkpointer.save(step, x(step))
        address = checkpointer.result()
        assert str(address).startswith(f"{RUN}/step-7-")
        assert (checkpointer.newest(), checkpointer.latest()) == (7, 7)
        assert back(checkpointer) == (7, 7.0)
        assert back(checkpointer, 5, verify=True) == (5, 5.0)
        assert back(checkpointer, 4) == (4, 4.0)
        with pytest.raises(CheckpointNotFoundError, match="no checkpoint of step 3; it has steps: 7, 5, 4"):
            back(checkpointer, 3)
    names = [key.removeprefix("a/run/") for key in store.objects("bucket")]
    folders = {name.partition("/")[0] for name in names}
    assert sorted(name.rpartition("-")[0] for name in folders) == ["catalog", "catalog", "step-4", "step-5", "step-7"]
    assert {name.rpartition("/")[2] for name in names if "/" in name} == {
        *("__0_0.distcp", ".metadata", "index.json", "penstock.json")
    }


@pytest.mark.slow
def test_one_that_is_copied_is_a_folder_of_ours_and_of_torch(store: S3Server, tmp_path: Path) -> None:
    with AsyncCheckpointer(RUN) as checkpointer:
        checkpointer.save(2, x(2.0))
        folder = str(checkpointer.result()).removeprefix("s3://bucket/")
    (tmp_path / "step-2").mkdir()
    for key in store.objects("bucket"):
        if key.startswith(folder):
            (tmp_path / "step-2" / key.rpartition("/")[2]).write_bytes(store.read("bucket", key))
    into = x(0.0)
    with pytest.warns(UserWarning, match="single process"):
        dcp_load(into, checkpoint_id=tmp_path / "step-2", no_dist=True)
    assert into["x"].eq(2).all()
    with AsyncCheckpointer(tmp_path) as checkpointer:
        assert back(checkpointer, verify=True) == (2, 2.0)


@pytest.mark.slow
def test_shards_go_on_on_any_number_of_ranks(store: S3Server) -> None:
    outcomes = run(2, "ranked_saves:surrounded", store.environment, "fsdp_save", RUN)
    assert not [one for one in outcomes if one.raised], outcomes
    for then in (3, 1):
        after = run(then, "ranked_saves:surrounded", store.environment, "fsdp_restore", RUN)
        assert [one.value for one in after] == [outcomes[0].value] * then
    assert not [key for key in store.objects("bucket") if "rank-" in key or "begun" in key]


@pytest.mark.slow
def test_check(store: S3Server) -> None:
    network = nn.Linear(20, 30)
    with AsyncCheckpointer(RUN) as checkpointer:
        assert checkpointer.check({"model": network, "note": [1, {"a": "b"}]}) == []
    assert not store.objects("bucket")


SLOW = [pytest.param(one, marks=pytest.mark.slow) for one in ("gone", "short", "manifest")]


@pytest.mark.parametrize("damage", ["none", "flipped", *SLOW])
def test_what_is_undamaged_on_the_local_disk_is_read_there(store: S3Server, tmp_path: Path, damage: str) -> None:
    """Else the bucket is read: the values are equal to the bit, and the restore says nothing."""
    local = tmp_path / "local"
    with AsyncCheckpointer(RUN, local=local) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, x(step))
            checkpointer.wait()
    kept = sorted(local.iterdir())
    assert [path.name.rpartition("-")[0] for path in kept] == ["step-2", "step-3"]
    (file,) = kept[-1].glob("*.distcp")
    if damage == "gone":
        shutil.rmtree(local)
    elif damage == "short":
        os.truncate(file, file.stat().st_size // 2)
    elif damage == "flipped":
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    elif damage == "manifest":  # the bucket alone says what there is
        (file.parent / MANIFEST).write_text("{}")
        (local / folder_name(9, "abcd")).mkdir()
    store.requests()
    with AsyncCheckpointer(RUN, local=local) as checkpointer:
        assert back(checkpointer) == (3, 3.0)
        read = {one.path for one in store.requests() if one.method == "GET" and one.path.endswith(".distcp")}
        assert bool(read) == (damage in ("gone", "short", "flipped"))
        assert back(checkpointer, 2) == (2, 2.0)


@pytest.mark.slow
def test_a_full_local_disk_costs_the_copy_alone(
    store: S3Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        small_disk_at(tmp_path / "disk", 20 << 20) as disk,
        caplog.at_level(logging.WARNING),
        AsyncCheckpointer(RUN, local=disk / "local") as checkpointer,
    ):
        for step in (1, 2, 3):  # two of them fit
            checkpointer.save(step, x(step))
            checkpointer.wait()
        assert back(checkpointer) == (3, 3.0)
        assert "has no copy on the local disk" in caplog.text
        assert "No space left on device. Free space there" in caplog.text


def test_a_flipped_byte_in_the_bucket_is_found(store: S3Server) -> None:
    with AsyncCheckpointer(RUN) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, x(step))
            checkpointer.wait()
        (key,) = (key for key in store.objects("bucket") if "step-2" in key and key.endswith("distcp"))
        data = bytearray(store.read("bucket", key))
        data[len(data) // 2] ^= 1
        Bucket("s3://bucket", store.options).put(key, bytes(data), deadline_s=9, passed=lambda nbytes: None)
        for options in ({}, {"verify": True}):
            with pytest.raises(CheckpointCorruptError, match=r"step-2-\w+ is damaged: .*undamaged one is step=1"):
                back(checkpointer, **options)
        assert back(checkpointer, 1) == (1, 1.0)


TRAIN = """
import os, sys, time, torch
from penstock.client.checkpoint import AsyncCheckpointer
checkpointer = AsyncCheckpointer(sys.argv[1])
checkpointer.save(1, {"x": torch.full((3_000_000,), 1.0)})
checkpointer.wait()
checkpointer.save(2, {"x": torch.full((3_000_000,), 2.0)})
print("saved", flush=True)
time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.parametrize("lives", [True, False], ids=["its writer lives", "its writer is lost"])
def test_a_restarted_job_waits_for_a_save_in_flight(store: S3Server, lives: bool) -> None:
    """The job is killed, and its writer finishes the save, after it was stopped for a while."""
    with subprocess.Popen([sys.executable, "-c", TRAIN, RUN], stdout=subprocess.PIPE) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == b"saved\n"
        while not any("step-2" in key and key.endswith("begun.json") for key in store.objects("bucket")):
            time.sleep(0.01)
        writer = int(Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()[0])
        os.kill(writer, signal.SIGSTOP)
        job.kill()
    assert len([key for key in store.objects("bucket") if "catalog" in key]) == 2
    later = threading.Timer(4.0, os.kill, (writer, signal.SIGCONT if lives else signal.SIGKILL))
    later.start()
    began = time.monotonic()
    with AsyncCheckpointer(RUN) as checkpointer:
        assert back(checkpointer) == ((2, 2.0) if lives else (1, 1.0))
        assert time.monotonic() - began < 60
        checkpointer.save(3, x(3.0))
        checkpointer.wait()
        assert back(checkpointer) == (3, 3.0)
    assert not [key for key in store.objects("bucket") if "step-2" in key and not lives]


@pytest.mark.slow
def test_commands(store: S3Server, tmp_path: Path) -> None:
    with AsyncCheckpointer(RUN) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, x(step, 1000))
            checkpointer.wait()

    def penstock(*arguments: str) -> str:
        command = [sys.executable, "-m", "penstock.deploy", "checkpoint", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    listed = json.loads(penstock("ls", RUN, "--json"))
    assert [one["step"] for one in listed["checkpoints"]] == [2, 1]
    assert listed["ok"]
    assert len(json.loads(penstock("verify", RUN, "--json"))["checkpoints"]) == 2
    penstock("export", f"{RUN}/step-1", "--to", str(tmp_path / "x.pt"))
    assert torch.load(tmp_path / "x.pt")["x"].eq(1).all()


@pytest.mark.parametrize(
    ("folder", "options", "words"),
    [
        ("gs://bucket/run", {}, "s3://BUCKET/RUN"),
        ("s3:///run", {}, "s3://BUCKET/RUN"),
        (Path("s3://bucket/run"), {}, "by a text, no Path: s3://BUCKET/RUN"),
        ("s3://bucket/../run", {}, "s3://BUCKET/RUN"),
        ("folder", {"local": "other"}, "for a bucket"),
        ("folder", {"storage_options": {}}, "for a bucket"),
        (RUN, {"storage_options": {"session": object()}}, "values of JSON"),
    ],
)
def test_wrong_arguments(folder: str | Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        AsyncCheckpointer(folder, **options)


def test_a_bucket_is_no_folder(store: S3Server) -> None:
    with AsyncCheckpointer(RUN) as checkpointer:
        assert checkpointer.address == RUN
        with pytest.raises(CheckpointError, match="which is no folder: use 's3://bucket/a/run'"):
            checkpointer.folder  # noqa: B018
