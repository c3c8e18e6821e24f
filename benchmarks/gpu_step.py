"""Training steps of a ViT-B/16 fed by Penstock, beside the same steps on one batch that stays on the device.

The model is that of Dosovitskiy et al., "An Image is Worth 16x16 Words" (2021), table 1: 12 layers of width 768 with 12
heads, 86 million parameters. Images travel as uint8 and are normalised on the device, as torchvision's references do.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
from torch import nn

from penstock.client import Appliance, DataExecutor, DataLoader

__all__ = ["SMALL", "VIT_B_16", "StepCase", "measure_steps"]

TARGET_RATIO = 1.01
"""Target: largest time of a training step fed by Penstock, as a multiple of the time of a step on data that stays on
the device."""
POOL = 8
"""Number of distinct batches that a worker repeats."""


@dataclass(frozen=True)
class StepCase:
    """Sizes of the model and of a batch, and numbers of steps."""

    image: int = 224
    patch: int = 16
    width: int = 768
    heads: int = 12
    depth: int = 12
    batch: int = 128
    warm: int = 10
    """Number of steps before the clock starts."""
    steps: int = 50


VIT_B_16 = StepCase()
SMALL = StepCase(image=32, patch=16, width=32, heads=2, depth=1, batch=4, warm=2, steps=5)


class VisionTransformer(nn.Module):
    """Vision transformer: uint8 images of shape (batch, 3, image, image) to logits of shape (batch, 1000)."""

    def __init__(self, case: StepCase) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, case.width, case.patch, case.patch)
        self.token = nn.Parameter(torch.zeros(1, 1, case.width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, (case.image // case.patch) ** 2 + 1, case.width))
        layer = nn.TransformerEncoderLayer(
            case.width, case.heads, 4 * case.width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, case.depth, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(case.width)
        self.head = nn.Linear(case.width, 1000)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        inputs = self.patches(images.to(self.head.weight.dtype).div_(127.5).sub_(1.0)).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(inputs), -1, -1), inputs], 1) + self.positions
        logits: torch.Tensor = self.head(self.norm(self.layers(tokens))[:, 0])
        return logits


class ImageBatches:
    """Iterable over batches of random images and labels: what the input_fn returns."""

    def __init__(self, case: StepCase, batches: int) -> None:
        self.case = case
        self.batches = batches

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        shape = (self.case.batch, 3, self.case.image, self.case.image)
        pool = [torch.randint(0, 256, shape, dtype=torch.uint8) for _ in range(POOL)]
        for number in range(self.batches):
            yield {"image": pool[number % POOL].clone(), "label": torch.randint(0, 1000, (self.case.batch,))}


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _step_s(case: StepCase, device: torch.device, model: nn.Module, optimizer: Any, batches: Iterator[Any]) -> float:
    """Return the seconds of a training step, as the mean over all steps after the first `case.warm`."""
    began = 0.0
    for number in range(case.warm + case.steps):
        if number == case.warm:
            _wait_for(device)
            began = time.perf_counter()
        batch = next(batches)
        with torch.autocast(device.type, torch.bfloat16):
            loss = nn.functional.cross_entropy(model(batch["image"]), batch["label"])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    _wait_for(device)
    return (time.perf_counter() - began) / case.steps


def measure_steps(case: StepCase, device: torch.device, workers: int, rounds: int) -> dict[str, Any]:
    """Measure training steps on a batch that stays on the device, and steps fed by Penstock, which take turns in each
    round.

    Returns:
        Medians of the rounds: `resident_ms` and `penstock_ms` of a step, and their `ratio`, the median of the ratios
        of each round.
    """
    torch.manual_seed(0)
    model = VisionTransformer(case).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    resident = {name: leaf.to(device) for name, leaf in next(iter(ImageBatches(case, 1))).items()}
    batches = case.warm + case.steps
    found: list[tuple[float, float]] = []
    with Appliance(num_workers_per_box=workers, timeout_s=120, device=str(device)) as appliance:
        for _ in range(rounds):
            alone_s = _step_s(case, device, model, optimizer, repeat(resident))
            loader = DataLoader(ImageBatches, case, batches)
            try:
                executor = DataExecutor(loader, num_steps=batches, appliance=appliance)
                found.append((alone_s, _step_s(case, device, model, optimizer, iter(executor))))
            finally:
                loader.close()
    return {
        "resident_ms": 1e3 * statistics.median(alone for alone, _ in found),
        "penstock_ms": 1e3 * statistics.median(fed for _, fed in found),
        "ratio": statistics.median(fed / alone for alone, fed in found),
        "batch": case.batch,
        "parameters": sum(each.numel() for each in model.parameters()),
    }
