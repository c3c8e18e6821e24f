"""The recipe docs/recipe_images.md: each program trains, is killed in mid-run, and goes on; all batches together are
those of a run without a kill."""

from __future__ import annotations

import importlib
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import warm
from documented import REPO, blocks
from PIL import Image

from penstock.client import DataExecutor, DataLoader
from penstock.client.testing import FakeAppliance

BLOCKS = [block for block in blocks(REPO / "docs/recipe_images.md") if block.language == "python"]
TRAIN, PACKED = (block.text for block in BLOCKS)
FOLDER = 'DataLoader(ImageFolder("photos/train", augment), batch_size=32, shuffle=True)'
STEPS, EVERY = 100, 20
STAND_INS = Path(__file__).parents[1] / "support/stand_ins"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipe")
    try:
        importlib.import_module("torchvision")
    except Exception:
        shutil.copytree(STAND_INS, folder, dirs_exist_ok=True)
    noise = np.random.default_rng(1)
    for number in range(90):
        path = folder / "photos/train" / ("cat", "dog", "owl")[number % 3] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise.integers(0, 255, (24 + number % 5, 24, 3), np.uint8)).save(path)
    (folder / "train.py").write_text(TRAIN)
    (folder / "packed.py").write_text(PACKED)
    assert FOLDER in TRAIN
    packed = TRAIN.replace(FOLDER, "DataLoader(input_fn, 32)").replace('"checkpoints"', '"others"')
    (folder / "train_packed.py").write_text(f"from packed import input_fn\n{packed}")
    return folder


def started(folder: Path, script: str) -> warm.Forked:
    imports = ["torch._dynamo", "penstock.client.checkpoint", "penstock.data"]
    return warm.fork("scripts:run", str(folder), script, imports=imports)


def finished(folder: Path, script: str) -> str:
    process = started(folder, script)
    try:
        ended, log = process.outcome(time.monotonic() + 100), (folder / f"{script}.log").read_text()
    finally:
        process.kill()
    assert not ended.raised, f"{ended}: {log}"
    return log


def kill_in_mid_run(folder: Path, script: str, checkpoints: Path) -> None:
    killed, deadline = started(folder, script), time.monotonic() + 100
    try:
        while not list(checkpoints.glob("step-*")) and time.monotonic() < deadline:
            assert not killed.is_over, (folder / f"{script}.log").read_text()
            time.sleep(0.005)
    finally:
        killed.kill()


@pytest.fixture
def imported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Import a program of the folder. Its Appliance is this process."""

    def here(name: str) -> Any:
        module = importlib.import_module(name)
        monkeypatch.setattr(module, "Appliance", FakeAppliance, raising=False)
        return module

    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    yield here
    for name in [
        name for name in sys.modules if name.partition(".")[0] in ("train", "train_packed", "packed", "torchvision")
    ]:
        del sys.modules[name]


def digest_of(said: str) -> int:
    """Return the digest of all batches, of a run that was killed before its end."""
    found = re.search(rf"steps (\d+) to {STEPS}: loss .*, digest (\d+)", said)
    assert found is not None
    assert int(found[1]) in range(EVERY + 1, STEPS, EVERY)
    return int(found[2])


def whole(loader: DataLoader) -> int | None:
    with FakeAppliance(num_workers_per_box=1, seed=1):
        executor = DataExecutor(loader, num_steps=STEPS)
        for _ in executor:
            pass
    return executor.digest


def test_a_folder_of_images(folder: Path, imported: Callable[[str], Any]) -> None:
    kill_in_mid_run(folder, "train.py", folder / "checkpoints")
    digest = digest_of(finished(folder, "train.py"))
    module = imported("train")
    images = module.ImageFolder("photos/train", module.augment)
    assert whole(DataLoader(images, batch_size=32, shuffle=True)) == digest


def test_packed_images(folder: Path, imported: Callable[[str], Any], capsys: pytest.CaptureFixture[str]) -> None:
    finished(folder, "packed.py")
    kill_in_mid_run(folder, "train_packed.py", folder / "others")
    imported("train_packed").main()
    assert whole(DataLoader(imported("packed").input_fn, 32)) == digest_of(capsys.readouterr().out)
