"""Time for which `AsyncCheckpointer.save` blocks the training loop (its stall) for tensors on a device, compared with a
plain copy of the same bytes to page-locked memory."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from penstock.client.checkpoint import AsyncCheckpointer

__all__ = ["measure_staging"]

TARGET_SHARE = 0.9
"""Target: smallest speed of a save's copy to shared memory (staging), as a share of the plain copy's speed."""


def measure_staging(
    device: torch.device, tensors: int, nbytes: int, rounds: int, folder: Path | None
) -> dict[str, Any]:
    """Measure saves of `tensors` tensors of `nbytes` bytes each. In each of the `rounds` rounds a save and a plain copy
    take turns.

    Args:
        folder: parent of the checkpoints' temporary folder. None: the system's.

    Returns:
        `gib`, the amount; `plain_gb_per_s` and `staging_gb_per_s`, medians; `share`, the median of each round's ratio;
        `stall_ms`, the median time of `save`.
    """
    state = {f"tensor{number}": torch.ones(nbytes // 4, device=device) for number in range(tensors)}
    pinned = [torch.ones(nbytes // 4, pin_memory=device.type == "cuda") for _ in range(tensors)]
    total, found = tensors * nbytes, []

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    with tempfile.TemporaryDirectory(dir=folder) as path, AsyncCheckpointer(path, keep_last=1) as checkpointer:
        checkpointer.prepare(state)
        for number in range(rounds + 1):
            wait()
            began = time.perf_counter()
            for target, source in zip(pinned, state.values(), strict=True):
                target.copy_(source, non_blocking=True)
            wait()
            plain_s = time.perf_counter() - began
            began = time.perf_counter()
            checkpointer.save(number, state)
            stall_s = time.perf_counter() - began
            checkpointer.wait()
            if number:  # the first save, which page-locks the memory, is not counted
                found.append((plain_s, stall_s))
    return {
        "gib": total / (1 << 30),
        "plain_gb_per_s": total / 1e9 / statistics.median(plain for plain, _ in found),
        "staging_gb_per_s": total / 1e9 / statistics.median(stall for _, stall in found),
        "share": statistics.median(plain / stall for plain, stall in found),
        "stall_ms": 1e3 * statistics.median(stall for _, stall in found),
    }
