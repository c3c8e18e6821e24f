"""The example for Megatron-core, without CUDA.

Its schedules and models request their memory of "cuda" whatever the groups are. Here such a request gets memory of the
CPU. Random states of devices are not kept, so models must be without dropout. Megatron's own attention refuses context
parallelism, which needs Transformer Engine; here each rank attends within its part of the sequence: another model, and
the same batches.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
from typing import Any

import torch
from integrations import megatron_loop
from torch.overrides import TorchFunctionMode


class OnCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def patch() -> None:
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_: None
    random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    random.CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()
    backends: Any = importlib.import_module("megatron.core.models.backends")

    class Local(backends.DotProductAttention):  # type: ignore[misc]
        def __init__(self, config: Any, *arguments: Any, **named: Any) -> None:
            config = copy.copy(config)
            config.context_parallel_size = 1
            super().__init__(config, *arguments, **named)

    backends.DotProductAttention = Local


def main() -> None:
    patch()
    with OnCpu():
        megatron_loop.main()
