"""`make gpu`: its measurements on torch's CPU backend, and its page."""

from __future__ import annotations

from pathlib import Path

import torch
from benchmarks import gpu, gpu_staging, gpu_step


def test_step_and_staging_on_the_cpu_backend(tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    step = gpu_step.measure_steps(gpu_step.SMALL, cpu, 1, 1)
    assert min(step["ratio"], step["resident_ms"], step["penstock_ms"]) > 0
    staging = gpu_staging.measure_staging(cpu, 2, 1 << 16, 1, tmp_path)
    assert staging["stall_ms"] > 0
    row = {"bytes": 1 << 20, "leaves": 0, "way": "penstock", "batches_per_s": 9.0, "gb_per_s": 1.0}
    row |= {"of_plain_copy": 0.95, "of_torch": 3.0, "loop_thread_us": 40.0}
    machine = {"cores": 2, "processor": "x"}
    results = {"gpu": "G", "machine": machine, "torch": "2", "workers": 1, "commit": "c", "tests": "9 passed"}
    text = gpu.page(results | {"transfer": [row], "step": step, "staging": staging})
    assert "| 1024 KiB | penstock | 9 | 1.00 | 0.95 | 3.0 | 40 |" in text
    assert "9 passed" in text
