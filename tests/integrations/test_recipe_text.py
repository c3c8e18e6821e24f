"""The recipe docs/recipe_text.md: killed in mid-run and resumed, it has the losses of a run without a kill; and then
it goes on with longer lines."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from documented import REPO, blocks
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from penstock.client.testing import FakeAppliance

BLOCKS = [block for block in blocks(REPO / "docs/recipe_text.md") if block.language == "python"]
FILES = dict(zip(("text.py", "train.py"), (block.text for block in BLOCKS), strict=True))
STEPS, MORE = 30, 45
IMPORTS = ["torch._dynamo", "penstock.client.integrations.transformers", "penstock.data", "transformers.trainer"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "recipe"
    texts = [path.read_text() for path in sorted((REPO / "docs").glob("*.md"))[:12]]
    (folder / "texts").mkdir(parents=True)
    paragraphs = [{"text": part} for text in texts for part in text.split("\n\n")]
    for number in range(4):
        lines = "".join(json.dumps(record) + "\n" for record in paragraphs[number::4])
        (folder / f"texts/{number}.jsonl").write_text(lines)
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel()
    tokenizer.train_from_iterator(
        texts[:3],
        BpeTrainer(vocab_size=512, special_tokens=["</s>"], initial_alphabet=ByteLevel.alphabet(), show_progress=False),
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return folder


def started(folder: Path) -> warm.Forked:
    alone = {"OMP_NUM_THREADS": "1"}  # so that sums are made in one order, and wait for no other core
    return warm.fork("scripts:run", str(folder), "train.py", imports=IMPORTS, environment=alone)


def losses(folder: Path, step: int) -> list[float]:
    log = json.loads((folder / f"run/checkpoint-{step}/trainer_state.json").read_text())["log_history"]
    return [line["loss"] for line in log if "loss" in line]


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    """Run the program here. Its Appliance is this process."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(sys, "argv", ["train.py", *options])
    module: Any = importlib.import_module("train")
    monkeypatch.setattr(module, "Appliance", FakeAppliance)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        module.main()
    finally:
        torch.set_num_threads(threads)
        del sys.modules["train"], sys.modules["text"]


def test_kill_resume_and_longer_lines(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = folder.parent / "whole"
    shutil.copytree(folder, whole)
    killed, deadline = started(folder), time.monotonic() + 100
    try:
        while not list(folder.glob("run/checkpoint-*/trainer_state.json")) and time.monotonic() < deadline:
            assert not killed.is_over, (folder / "train.py.log").read_text()
            time.sleep(0.005)
    finally:
        killed.kill()
    assert not (folder / f"run/checkpoint-{STEPS}").exists()
    run(folder, monkeypatch)
    run(whole, monkeypatch)
    assert len(losses(whole, STEPS)) == STEPS
    assert losses(folder, STEPS) == losses(whole, STEPS)

    with pytest.raises(Exception, match="layers='restart'"):
        run(folder, monkeypatch, "--steps", str(MORE), "--length", "128")
    run(folder, monkeypatch, "--steps", str(MORE), "--length", "128", "--layers", "restart")
    assert losses(folder, MORE)[:STEPS] == losses(whole, STEPS)
    assert len(losses(folder, MORE)) == MORE
