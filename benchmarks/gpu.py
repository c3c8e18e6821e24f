"""All checks that need a CUDA device, and their figures in benchmarks/gpu.md: what `make gpu` runs.

    python -m benchmarks.gpu [--quick] [--device cpu] [--page FILE]

    tests           the tests that are skipped where torch finds no CUDA device transfer batches to the device beside a
    plain copy of page-locked memory: benchmarks/device.py step            training steps of a ViT-B/16 beside steps on
    data that stays on the device: gpu_step.py staging         the stall of `AsyncCheckpointer.save` beside a plain copy
    to page-locked memory: gpu_staging.py

`--device cpu` runs the measurements without a GPU, to try the program; it writes no page.

Exit codes: 0 measured; 1 a test failed; 3 nothing was measured, because there is no such device here.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from benchmarks import device as transfer
from benchmarks import gpu_staging, gpu_step
from benchmarks.machine import commit, describe
from benchmarks.modes import ROOT

__all__ = ["page"]

TESTS = ("tests/client/test_device.py", "tests/client/test_device_streams.py", "tests/checkpoint/test_cuda_staging.py")
HEAD = """# On a GPU

`make gpu` runs every check that needs a CUDA device and writes this page. A figure is comparable only with the others
of its run.
"""


def page(results: dict[str, Any]) -> str:
    """Return the text of benchmarks/gpu.md, of what `measure` returned."""
    step, staging = results["step"], results["staging"]
    rows = "\n".join(
        f"| {_size(row)} | {row['way']} | {row['batches_per_s']:,.0f} | {row['gb_per_s']:.2f} "
        f"| {row['of_plain_copy']:.2f} | {row['of_torch']:.1f} | {row['loop_thread_us']:.0f} |"
        for row in results["transfer"]
    )
    return f"""{HEAD}
{results["gpu"]}, {results["machine"]["cores"]} cores of {results["machine"]["processor"]}, torch {results["torch"]},
{results["workers"]} workers, commit {results["commit"]}.

Tests that need a device: {results["tests"]}.

## Batches to the device

Target: at least {transfer.TARGET} of the plain copy.

| batch | way | batches/s | GB/s | of plain copy | of torch's DataLoader | loop us |
|---|---|---|---|---|---|---|
{rows}

## A training step

ViT of {step["parameters"] / 1e6:.0f} million parameters, {step["batch"]} images, bfloat16 autocast, AdamW.

| data | step | ratio |
|---|---|---|
| stays on the device | {step["resident_ms"]:.2f} ms | 1 |
| from Penstock | {step["penstock_ms"]:.2f} ms | {step["ratio"]:.3f} (target: at most {gpu_step.TARGET_RATIO}) |

## Staging of a checkpoint of {staging["gib"]:.1f} GiB

| way | rate | share |
|---|---|---|
| plain copy to page-locked memory | {staging["plain_gb_per_s"]:.1f} GB/s | 1 |
| `AsyncCheckpointer.save` | {staging["staging_gb_per_s"]:.1f} GB/s | {staging["share"]:.2f} (target: at least \
{gpu_staging.TARGET_SHARE}) |

The loop waits {staging["stall_ms"]:.0f} ms.
"""


def _size(row: dict[str, Any]) -> str:
    if row["leaves"]:
        return f"{row['leaves']} x {transfer.LEAF >> 10} KiB"
    return f"{row['bytes'] >> 10} KiB"


def run_tests() -> tuple[bool, str]:
    """Run the tests that need a CUDA device. Return True if they passed, and the last line of pytest's output."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", *TESTS]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    print(done.stdout)
    return done.returncode == 0, done.stdout.strip().splitlines()[-1].strip("= ")


def measure(device: torch.device, workers: int, quick: bool) -> dict[str, Any]:
    """Run all measurements, print the figures of each when it ends, and return all results by name. `quick`: True for a
    short run, without meaningful figures."""
    rounds = 1 if quick else 3
    rows = transfer.measure(device, workers, rounds, 1 << 20 if quick else max(transfer.SIZES))
    transfer.show(rows)
    step = gpu_step.measure_steps(gpu_step.SMALL if quick else gpu_step.VIT_B_16, device, workers, rounds)
    print("step:", step)
    tensors, nbytes = (4, 1 << 20) if quick else (64, 64 << 20)
    staging = gpu_staging.measure_staging(device, tensors, nbytes, rounds, None)
    print("staging:", staging)
    return {
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "machine": describe(),
        "torch": torch.__version__,
        "workers": workers,
        "commit": commit(),
        "transfer": rows,
        "step": step,
        "staging": staging,
    }


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run all checks that need a CUDA device.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--quick", action="store_true", help="small sizes and one round: a try of the program")
    parser.add_argument("--page", type=Path, default=ROOT / "benchmarks" / "gpu.md", help="file to write")
    options = parser.parse_args(given)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("nothing was run: torch finds no CUDA device here", file=sys.stderr)
        return transfer.NO_DEVICE
    torch.set_num_threads(1)
    passed, said = run_tests() if device.type == "cuda" else (True, "not run")
    results = measure(device, options.workers, options.quick) | {"tests": said}
    if device.type == "cuda" and not options.quick:
        options.page.write_text(page(results))
        print(f"wrote {options.page}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
