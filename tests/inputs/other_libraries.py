"""States of other libraries that are trained, saved and restored: those of `make frameworks`, and the small ones of the
tests. Each case is a function that returns a state and a step of its training."""

from __future__ import annotations

import hashlib
import importlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from penstock.client.checkpoint import AsyncCheckpointer

__all__ = ["adapters", "averaged", "goes_on", "optimized", "sharded", "vision"]

Case = tuple[dict[str, Any], Callable[[int], None]]
"""A state, and a step with random values by their seed."""


def goes_on(folder: Path, case: Callable[[], Case]) -> None:
    """Compare three steps after a restore with those after torch's save and load, and with those without either."""
    torch.manual_seed(1)
    present = case()
    torch.manual_seed(2)
    ours, theirs = case(), case()
    for seed in range(3):
        present[1](seed)
    with AsyncCheckpointer(folder) as checkpointer:
        assert checkpointer.check(present[0]) == []
        file = io.BytesIO()
        torch.save({name: value.state_dict() for name, value in present[0].items()}, file)
        checkpointer.save(1, present[0])
        checkpointer.restore(ours[0])
    file.seek(0)
    for name, state in torch.load(file, weights_only=False).items():
        theirs[0][name].load_state_dict(state)
    for seed in range(3, 6):
        for _, step in (present, ours, theirs):
            step(seed)
    expected = described(present[0])
    assert described(theirs[0]) == expected, "torch's own save and load lose something"
    assert described(ours[0]) == expected


def described(state: dict[str, Any]) -> dict[str, str]:
    """Return what there is to compare of each value: two that are equal have equal texts."""
    found: dict[str, str] = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, dict | list | tuple):
            for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
                add(f"{name}.{key}", inner)
        elif hasattr(value, "__tensor_flatten__"):
            found[name] = type(value).__name__
            for inner in value.__tensor_flatten__()[0]:
                add(f"{name}.{inner}", getattr(value, inner))
        elif isinstance(value, torch.Tensor):
            content = hashlib.sha256(
                value.detach().contiguous().view(torch.uint8).numpy().tobytes()
                if value.dim()
                else repr(value.item()).encode()
            )
            found[name] = f"{type(value).__name__} {value.dtype} {list(value.shape)} {content.hexdigest()}"
        else:
            found[name] = repr(value)

    for name, value in state.items():
        add(name, value.state_dict())
    return found


def stepping(optimizer: Any, loss: Callable[[], torch.Tensor]) -> Callable[[int], None]:
    def step(seed: int) -> None:
        torch.manual_seed(seed)
        if hasattr(optimizer, "train"):
            optimizer.train()
        optimizer.zero_grad()
        torch.autograd.backward(loss())
        optimizer.step()

    return step


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 64))


def optimized(name: str) -> Case:
    """An optimizer, "module.Class"."""
    package, _, kind = name.rpartition(".")
    made = getattr(importlib.import_module(package), kind)
    module = network()
    if package == "pytorch_optimizer":  # wrappers
        optimizer = made(torch.optim.AdamW(module.parameters(), lr=1e-2))
    else:
        optimizer = made(module.parameters(), lr=1e-2)
    step = stepping(optimizer, lambda: module(torch.randn(8, 128)).square().mean())
    return {"model": module, "optimizer": optimizer}, step


def adapters(kind: str, **options: Any) -> Case:
    """Two of peft's adapters. A state_dict has VeRA's common matrices under several names."""
    peft: Any = importlib.import_module("peft")
    config = getattr(peft, kind)(target_modules=["0", "2"], **options)
    module = peft.get_peft_model(network(), config)
    module.add_adapter("second", getattr(peft, kind)(target_modules=["0"], **options))
    optimizer = torch.optim.AdamW([one for one in module.parameters() if one.requires_grad], lr=1e-2)
    step = stepping(optimizer, lambda: module(torch.randn(8, 128)).square().mean())
    return {"model": module, "optimizer": optimizer}, step


def vision() -> Case:
    """timm's modules, their moving averages, its schedule, and its optimizer that wraps another one."""
    timm: Any = importlib.import_module("timm")
    for part in ("optim", "scheduler", "utils"):
        importlib.import_module(f"timm.{part}")
    module = timm.create_model("resnet10t", num_classes=4)
    optimizer = timm.optim.create_optimizer_v2(module, opt="lookahead_adamw", lr=1e-2, layer_decay=0.7)
    averages = timm.utils.ModelEmaV3(module, decay=0.9, use_warmup=True)
    schedule = timm.scheduler.CosineLRScheduler(optimizer, t_initial=10, warmup_t=3, warmup_lr_init=1e-3)
    train = stepping(optimizer, lambda: module(torch.randn(2, 3, 32, 32)).square().mean())

    def step(seed: int) -> None:
        train(seed)
        averages.update(module, step=seed)
        schedule.step(seed + 1)

    return {"model": module, "optimizer": optimizer, "averages": averages, "schedule": schedule}, step


def averaged() -> Case:
    """A denoiser of diffusers, and the moving averages of its parameters, which are no module."""
    diffusers: Any = importlib.import_module("diffusers")
    training: Any = importlib.import_module("diffusers.training_utils")
    optimization: Any = importlib.import_module("diffusers.optimization")
    module = diffusers.UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    averages = training.EMAModel(module.parameters(), decay=0.9, use_ema_warmup=True)
    schedule = optimization.get_scheduler("cosine", optimizer, num_warmup_steps=2, num_training_steps=20)
    times = torch.tensor([3, 5])
    train = stepping(optimizer, lambda: module(torch.randn(2, 1, 8, 8), times).sample.square().mean())

    def step(seed: int) -> None:
        train(seed)
        schedule.step()
        averages.step(module.parameters())

    return {"model": module, "optimizer": optimizer, "averages": averages, "schedule": schedule}, step


def sharded(folder: str, kind: str, restore: bool) -> list[str]:
    """Save, or restore, a module that is split over the ranks, and take three steps more. Returns the classes of the
    optimizer's state, and the hashes of the whole parameters."""
    import torch._dynamo

    torch._dynamo.config.disable = True  # torchao compiles its steps, which takes minutes here
    torch.manual_seed(2 if restore else 1)
    module: Any = network()
    fully_shard(module)
    optimizer = getattr(importlib.import_module("torchao.optim"), kind)(module.parameters(), lr=1e-2)
    # All ranks have the same batch, so that the mean of their gradients is exact on any number of them.
    step = stepping(optimizer, lambda: module(torch.randn(8, 128)).square().mean())
    state = {"model": module, "optimizer": optimizer}
    with AsyncCheckpointer(folder) as checkpointer:
        if restore:
            assert checkpointer.restore(state) == 3
        else:
            for seed in range(3):
                step(seed)
            assert checkpointer.check(state) == []
            checkpointer.save(3, state)
    kinds = {
        type(value.to_local()).__name__
        for moments in optimizer.state.values()
        for value in moments.values()
        if hasattr(value, "to_local")
    }
    for seed in range(3, 6):
        step(seed)
    whole = [one.full_tensor().detach().numpy().tobytes() for one in module.parameters()]
    return [*sorted(kinds), *(hashlib.sha256(one).hexdigest() for one in whole)]
