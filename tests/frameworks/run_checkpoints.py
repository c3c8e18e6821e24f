"""Optimizers, modules and tensors of other libraries go on after a restore as after torch.save and torch.load."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from other_libraries import Case, adapters, averaged, goes_on, optimized, vision
from ranked import run
from torch import nn

from penstock.client.checkpoint import AsyncCheckpointer

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries

OPTIMIZERS = (
    *(f"torchao.optim.{name}" for name in ("AdamW8bit", "AdamW4bit", "AdamWFp8")),
    *(f"bitsandbytes.optim.{name}" for name in ("AdamW8bit", "Lion8bit", "AdEMAMix8bit")),
    *(f"pytorch_optimizer.{name}" for name in ("Lookahead", "ScheduleFreeWrapper")),
    "schedulefree.AdamWScheduleFree",
)
CASES: dict[str, Callable[[], Case]] = {
    **{name: partial(optimized, name) for name in OPTIMIZERS},
    "peft LoRA": partial(adapters, "LoraConfig", use_dora=True, lora_dropout=0.1),
    "peft VeRA": partial(adapters, "VeraConfig", r=4),
    "timm": vision,
    "diffusers": averaged,
}


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao compiles its steps, which takes minutes here."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")


@pytest.mark.parametrize("name", CASES)
def test_the_next_steps_are_equal(tmp_path: Path, name: str) -> None:
    if name == "timm":
        try:
            importlib.import_module("torchvision")
        except RuntimeError as error:
            pytest.skip(f"timm needs a torchvision that was compiled for this torch: {error}")
    goes_on(tmp_path, CASES[name])


@pytest.mark.parametrize("kind", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_quantised_weights_come_back(tmp_path: Path, kind: str) -> None:
    quantization = importlib.import_module("torchao.quantization")

    def quantised(seed: int) -> nn.Sequential:
        torch.manual_seed(seed)
        module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32)).to(torch.bfloat16)
        quantization.quantize_(module, getattr(quantization, kind)())
        return module

    saved, again = quantised(1), quantised(2)
    with AsyncCheckpointer(tmp_path) as checkpointer:
        assert checkpointer.check({"model": saved}) == []
        checkpointer.save(1, {"model": saved})
        checkpointer.restore({"model": again})
    values = torch.randn(4, 64, dtype=torch.bfloat16)
    assert type(again[0].weight) is type(saved[0].weight)
    assert torch.equal(again(values), saved(values))


def test_quantised_moments_are_exported(tmp_path: Path) -> None:
    """By a program that imports their class; another one names it."""
    state, step = optimized("torchao.optim.AdamW8bit")
    step(1)
    with AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
    file = tmp_path / "state.pt"

    def export(imported: str, *options: str) -> subprocess.CompletedProcess[str]:
        program = f"import {imported}\nfrom penstock.deploy.__main__ import main\nmain()"
        command = [sys.executable, "-W", "ignore", "-c", program, "checkpoint", "export", str(tmp_path)]
        return subprocess.run([*command, "--to", str(file), *options], text=True, stderr=subprocess.PIPE, check=False)

    named = export("torch")
    assert named.returncode == 23, named.stderr
    assert "does not know here, torchao.optim.subclass_8bit.OptimState8bit: import the package" in named.stderr
    assert export("torch", "--key", "model").returncode == 0
    whole = export("torchao.optim")
    assert whole.returncode == 0, whole.stderr
    again = torch.load(file, weights_only=True)["optimizer"]["state"]["0.weight"]["exp_avg"]
    moments = state["optimizer"].state[state["model"][0].weight]["exp_avg"]
    assert type(again) is type(moments)
    assert all(torch.equal(getattr(again, name), getattr(moments, name)) for name in ("codes", "scale", "qmap"))


def test_quantised_moments_go_on_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    """Of a module that is split by rows (FSDP2)."""

    def ranks(count: int, restore: bool) -> Any:
        outcomes = run(count, "other_libraries:sharded", str(tmp_path), "AdamW8bit", restore)
        assert not [one for one in outcomes if one.raised], outcomes
        assert all(one.value == outcomes[0].value for one in outcomes)
        return outcomes[0].value

    saved = ranks(2, restore=False)
    assert "OptimState8bit" in saved
    for count in (1, 2, 4):
        assert ranks(count, restore=True) == saved
