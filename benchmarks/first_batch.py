"""Time from `Appliance()` to the first batch, in embedded mode with two worker slots and trivial data; compared with
torch, and with the floor, the least that any such loader must do.

    python -m benchmarks.first_batch --rounds 5

    cold        the loop begins right after `Appliance()`
    warmed      the loop begins WARM_S after `Appliance()`, as in a script that builds its model meanwhile
    second      a second loader of the same appliance, to its first batch
    torch       a torch DataLoader with two workers, which fork from the process that has imported torch already
    floor       a fresh interpreter that imports torch and forks one child, to that child's first byte: without a copy
                of the training process, which may hold CUDA and threads, no loader is sooner than that

Each figure is of a new process. Processor seconds are of the whole process tree up to the first batch, without the
import of torch and penstock.client in the training process; other programs disturb them less than the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.machine import commit, describe

__all__ = ["table"]

WARM_S = 2.0
TARGETS_S = {"cold": 0.9, "warmed": 0.3, "second": 0.2}
FLOOR = """
import gc, os
gc.disable()
import torch
if os.fork() == 0:
    os.write(1, b"x")
    os._exit(0)
os.wait()
"""


def data() -> list[int]:
    """Return the batches of the benchmark, a list of ints: the input_fn."""
    return list(range(100))


def ours(pause_s: float) -> dict[str, Any]:
    """Measure an embedded appliance: the time until the first batch of a loader, whose loop begins `pause_s` seconds
    after `Appliance()`, and of a second loader. Return the figures by name."""
    from benchmarks.penstock_path import ROLES
    from benchmarks.processes import CONSUMER, adopt_orphans, cpu_by_role

    from penstock.client import Appliance, DataExecutor, DataLoader

    adopt_orphans()
    before, began = cpu_by_role(os.getpid(), ROLES)[CONSUMER], time.perf_counter()
    with Appliance(num_workers_per_box=2, timeout_s=60) as appliance:
        if pause_s:
            time.sleep(pause_s)
            began = time.perf_counter()
        first = iter(DataExecutor(DataLoader(data), num_steps=10, appliance=appliance))
        next(first)  # its loop stays open, as a training loop beside an evaluation
        first_s, used = time.perf_counter() - began, cpu_by_role(os.getpid(), ROLES)
        time.sleep(1.0)  # what follows the first batch is no part of the second loader
        began = time.perf_counter()
        next(iter(DataExecutor(DataLoader(data), num_steps=10, appliance=appliance)))
        second_s = time.perf_counter() - began
    used[CONSUMER] -= before
    return {"first_s": first_s, "second_s": second_s, "cpu_s": used}


def torch_loader() -> dict[str, Any]:
    """Measure the time until the first batch of a torch DataLoader with two workers. Return the figures by name."""
    from torch.utils.data import DataLoader

    began = time.perf_counter()
    next(iter(DataLoader(data(), num_workers=2)))  # type: ignore[arg-type]
    return {"first_s": time.perf_counter() - began, "cpu_s": {}}


def floor() -> dict[str, Any]:
    """Measure the floor: the time in which a fresh interpreter imports torch, forks a child, and gets a byte from the
    child. Return the figures by name."""
    began = time.perf_counter()
    with subprocess.Popen([sys.executable, "-P", "-c", FLOOR], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        took = time.perf_counter() - began
    times = os.times()
    return {"first_s": took, "cpu_s": {"interpreter": times.children_user + times.children_system}}


PLAYERS: dict[str, Callable[[], dict[str, Any]]] = {
    "cold": lambda: ours(0.0),
    "warmed": lambda: ours(WARM_S),
    "torch": torch_loader,
    "floor": floor,
}


def table(found: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Return the lines of the report. `found`: figures of each round, by what was measured."""
    firsts = {name: [each["first_s"] for each in rows] for name, rows in found.items()}
    firsts["second"] = [each["second_s"] for rows in found.values() for each in rows if "second_s" in each]
    lines = [f"{'':<10}{'median':>9}{'best':>9}{'worst':>9}{'target':>10}   processor seconds"]
    for name in ("cold", "warmed", "second", "torch", "floor"):
        if not firsts.get(name):
            continue
        values, aim = firsts[name], TARGETS_S.get(name)
        used = [each["cpu_s"] for each in found.get(name, [])]
        roles = {role: statistics.median(each.get(role, 0.0) for each in used) for role in (used[0] if used else ())}
        told = f"{sum(roles.values()):.2f}: " + ", ".join(f"{role} {s:.2f}" for role, s in roles.items())
        lines.append(
            f"{name:<10}{statistics.median(values):>7.2f} s{min(values):>7.2f} s{max(values):>7.2f} s"
            f"{f'{aim:.1f} s' if aim else '-':>10}   {told if roles else '-'}"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the time to the first batch in embedded mode.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--player", choices=PLAYERS, help="measure one once, in this process, and print JSON")
    options = parser.parse_args()
    if options.player:
        print(json.dumps(PLAYERS[options.player]()))
        return
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in PLAYERS}
    for _ in range(options.rounds):
        for name, rows in found.items():
            command = [sys.executable, "-W", "ignore", "-m", "benchmarks.first_batch", "--player", name]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
            rows.append(json.loads(done.stdout))
    machine = describe()
    print(f"{machine['cores']} cores of {machine['processor']}, Python {machine['python']}, commit {commit()}")
    print("\n".join(table(found)))


if __name__ == "__main__":
    main()
