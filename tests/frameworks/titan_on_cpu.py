"""torchtitan's launcher on a machine without accelerators: `torchrun titan_on_cpu.py --module ... --config ...`.

torchtitan looks for an accelerator, takes CUDA if there is none, and reads the device's name and memory. Here it is
given the CPU instead. The attention of context parallelism, which needs CUDA, is replaced: each rank attends within its
part of the sequence, which is another model with the same batches. Everything else is torchtitan's own. Each rank
writes its process id to the folder TITAN_LOGS.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import torch
import torch._utils
import torch.distributed as dist

_cpu = SimpleNamespace(
    current_device=lambda: 0,
    device_count=torch.cpu.device_count,
    empty_cache=lambda: None,
    get_device_name=lambda device=None: "CPU",
    get_device_properties=lambda device=None: SimpleNamespace(total_memory=1 << 30),
    memory_stats=lambda device=None: {},
    reset_peak_memory_stats=lambda: None,
    set_device=torch.cpu.set_device,
    synchronize=torch.cpu.synchronize,
)


def main() -> None:
    Path(os.environ["TITAN_LOGS"], f"{os.environ['RANK']}.pid").write_text(str(os.getpid()))
    torch.set_num_threads(1)
    vars(torch._utils).update(_get_available_device_type=lambda: "cpu", _get_device_module=lambda device_type: _cpu)
    if not hasattr(dist, "set_timeout"):  # newer than torch 2.13; torchtitan 0.3.0 calls it after the first step
        vars(dist)["set_timeout"] = dist.distributed_c10d._set_pg_timeout
    from torchtitan.models.llama3 import parallelize
    from torchtitan.train import main as train

    vars(parallelize)["apply_cp_to_forward"] = lambda attention_modules, mesh: None

    train()


if __name__ == "__main__":
    main()
