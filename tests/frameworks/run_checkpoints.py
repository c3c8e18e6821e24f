"""Optimizers and tensors of other libraries go on after a restore as after torch.save and torch.load."""

from __future__ import annotations

import importlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from penstock.client.checkpoint import AsyncCheckpointer

OPTIMIZERS = (
    *(f"torchao {name}" for name in ("AdamW8bit", "AdamW4bit", "AdamWFp8")),
    *(f"bitsandbytes {name}" for name in ("AdamW8bit", "Lion8bit", "AdEMAMix8bit")),
    *(f"pytorch_optimizer {name}" for name in ("Lookahead", "ScheduleFreeWrapper")),
    "schedulefree AdamWScheduleFree",
)
MODULES = {"torchao": "torchao.optim", "bitsandbytes": "bitsandbytes.optim"}


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao compiles its steps, which takes minutes here."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")


def trained(kind: str) -> tuple[nn.Sequential, Any]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 64))
    package, _, name = kind.partition(" ")
    made = getattr(importlib.import_module(MODULES.get(package, package)), name)
    if package == "pytorch_optimizer":  # wrappers
        return module, made(torch.optim.AdamW(module.parameters(), lr=1e-2))
    return module, made(module.parameters(), lr=1e-2)


def step(module: nn.Module, optimizer: Any, seed: int) -> None:
    if hasattr(optimizer, "train"):
        optimizer.train()
    optimizer.zero_grad()
    values = torch.randn(8, 128, generator=torch.Generator().manual_seed(seed))
    torch.autograd.backward(module(values).square().mean())
    optimizer.step()


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.filterwarnings("ignore")
def test_the_next_steps_are_equal(tmp_path: Path, kind: str) -> None:
    module, optimizer = trained(kind)
    for seed in range(3):
        step(module, optimizer, seed)
    file = io.BytesIO()
    torch.save([module.state_dict(), optimizer.state_dict()], file)
    ours, theirs = trained(kind), trained(kind)
    with AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": module, "optimizer": optimizer})
        checkpointer.restore({"model": ours[0], "optimizer": ours[1]})
    file.seek(0)
    for value, state in zip(theirs, torch.load(file, weights_only=False), strict=True):
        value.load_state_dict(state)
    for seed in range(5):
        for pair in ((module, optimizer), ours, theirs):
            step(*pair, 10 + seed)
    parameters = (pair[0].parameters() for pair in (ours, theirs, (module, optimizer)))
    for one, by_torch, present in zip(*parameters, strict=True):
        assert torch.equal(one, by_torch)
        assert torch.equal(one, present)


@pytest.mark.parametrize("kind", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
@pytest.mark.filterwarnings("ignore")
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
