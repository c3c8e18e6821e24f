"""Configurations of torchtitan's trainer for run_torchtitan.py: its smallest Llama 3, smaller, on the CPU.

What differs from torchtitan's own are settings only. Each rank logs its batches, and rank 0 the losses, to the folder
of the variable TITAN_LOGS, one line of JSON each.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from integrations.titan.config_registry import llama3_debugmodel
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.validate import Validator
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.trainer import Trainer

from penstock.client.integrations.torchtitan import PenstockDataLoader

__all__ = ["ours", "their_checkpoints", "validated"]


def ours() -> Trainer.Config:
    """The example's configuration: our loader, our checkpoints."""
    return _on_cpu(llama3_debugmodel())


def their_checkpoints() -> Trainer.Config:
    """Our loader, their checkpoints."""
    config = ours()
    config.checkpoint = CheckpointManager.Config(enable=True, last_save_model_only=False)
    return config


def validated() -> Trainer.Config:
    """Validation after steps 1, 6 and 12, with our loader."""
    config = their_checkpoints()
    loader = config.dataloader
    assert isinstance(loader, LoggedLoader.Config)
    config.validator = Validator.Config(
        enable=True, freq=6, steps=2, dataloader=ValidationLoader.Config(input_fn=loader.input_fn)
    )
    return config


class LoggedLosses(MetricsProcessor):
    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        log_freq: int = 1

    def log(self, step: int, global_avg_loss: float, *values: Any, **more: Any) -> None:
        super().log(step, global_avg_loss, *values, **more)
        if dist.get_rank() == 0:
            _write(_log("losses"), {"step": step, "loss": global_avg_loss.hex()})


class LoggedLoader(PenstockDataLoader):
    @dataclass(kw_only=True, slots=True)
    class Config(PenstockDataLoader.Config):
        pass

    name = "rank"

    def __iter__(self) -> Iterator[Any]:
        log = _log(f"{self.name}{dist.get_rank()}")
        for inputs, labels in super().__iter__():
            assert (labels.dtype, labels.shape) == (torch.int64, inputs["input"].shape)
            rows = zip(inputs["input"], inputs["positions"], labels, strict=True)
            _write(log, {"rows": [_digest(*row) for row in rows]})
            yield inputs, labels


class ValidationLoader(LoggedLoader):
    @dataclass(kw_only=True, slots=True)
    class Config(LoggedLoader.Config):
        pass

    name = "validation"

    def __iter__(self) -> Iterator[Any]:
        _write(_log(f"{self.name}{dist.get_rank()}"), {"begins": True})
        return super().__iter__()


def _on_cpu(config: Trainer.Config) -> Trainer.Config:
    spec = config.model_spec
    assert spec is not None
    del spec.model.layers[2:]
    for _, _, layer, name in [*spec.model.traverse(FlexAttention.Config)]:  # which has no backward pass on the CPU
        setattr(layer, str(name), ScaledDotProductAttention.Config())
    spec.post_optimizer_build_fn = _sum
    config.parallelism.spmd_backend = "partial_dtensor"
    config.optimizer.implementation = "foreach"
    config.activation_checkpoint = None
    config.metrics = LoggedLosses.Config()
    training = config.training
    training.disable_cuda_graphs = True
    training.mixed_precision_param = "float32"
    training.seq_len, training.local_batch_size, training.global_batch_size = 64, 4, 8
    loader = config.dataloader
    assert isinstance(loader, PenstockDataLoader.Config)
    config.dataloader = LoggedLoader.Config(input_fn=loader.input_fn, num_workers=loader.num_workers)
    return config


def _sum(optimizers: Any, model_parts: list[torch.nn.Module], parallel_dims: Any) -> None:
    """Let FSDP only sum: gloo cannot scale within a collective."""
    for part in model_parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)


def _log(name: str) -> Path:
    return Path(os.environ["TITAN_LOGS"]) / f"{name}.jsonl"


def _write(path: Path, line: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def _digest(*row: torch.Tensor) -> str:
    return hashlib.blake2b(b"".join(one.numpy().tobytes() for one in row), digest_size=8).hexdigest()
