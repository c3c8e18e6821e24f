"""Checkpoints of a training loop: how long a save stalls the loop, how long it takes until the checkpoint is on the
disk, and how much memory it takes.

    python -m benchmarks.checkpoint [--rounds 5] [--saves 3] [--mib 1024] [--quick] [--json FILE]
        [--write benchmarks/README.md] [--folder DIR]

It compares Penstock's AsyncCheckpointer with torch's own methods to save, and with a floor, the least that any method
must do. Each compared method is a mode. In each round each mode runs once, which is called its turn, in a process of
its own (benchmarks/checkpoint_modes.py). The order rotates from round to round. Medians are over all saves of all
rounds, and ratios are of these medians.

Memory is measured from outside, in separate turns, because reading a process's memory stalls that process.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.checkpoint_report import BEGIN, END, FLOOR, MODES, judge, markdown
from benchmarks.modes import ROOT
from benchmarks.processes import adopt_orphans, busy_cores, cpu_s, kill_tree, machine_s, tree
from benchmarks.report import IDLE_CORES, between

__all__ = ["Amounts", "main", "memory_turn", "run"]

SAMPLE_S = 0.02
"""Seconds between two readings of the memory of the measured processes."""
DEADLINE_S = 600.0
"""Deadline of one turn, the run of one mode, in seconds."""
SETTLED = 5
"""Number of readings of the memory before the first save. Their median is the baseline, which is subtracted from later
readings."""


@dataclass(frozen=True)
class Amounts:
    rounds: int
    saves: int
    """Number of saves in one run of a mode that are measured. The first save is not among them, because it allocates
    memory that later saves use again."""
    mib: int
    memory_rounds: int = 2
    step_ms: float = 50.0
    """Duration of a step of the training loop, in milliseconds."""


FULL = Amounts(rounds=5, saves=3, mib=1024)
QUICK = Amounts(rounds=1, saves=1, mib=64, memory_rounds=1, step_ms=10.0)


class Turn:
    """Turn: one run of a mode in a process of its own, from its start to its result. The process's output goes to
    files, so that no pipe must be read. `held`: True to let the process wait for `go` before its first save."""

    def __init__(self, mode: str, amounts: Amounts, folder: Path, *, held: bool) -> None:
        self._go, self._output, self._errors = folder / "go", folder / "output", folder / "errors"
        self._go.unlink(missing_ok=True)
        self._until = time.monotonic() + DEADLINE_S
        command = [sys.executable, "-m", "benchmarks.checkpoint_modes", "--mode", mode, "--folder", str(folder)]
        command += ["--mib", str(amounts.mib), "--saves", str(amounts.saves), "--step-ms", str(amounts.step_ms)]
        if held:
            command += ["--go", str(self._go)]
        with self._output.open("wb") as output, self._errors.open("wb") as errors:
            self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=errors)

    @property
    def pid(self) -> int:
        return self._process.pid

    def ready(self) -> None:
        """Wait until the process, which was started with `held`, is ready for its first save. Raises RuntimeError if
        the process ends or takes too long."""
        while not _lines(self._output):
            self._check()
            time.sleep(SAMPLE_S)

    def go(self) -> None:
        """Let the process, which was started with `held`, begin to save."""
        self._go.touch()

    def running(self) -> bool:
        """Return True while the process has no result yet. Raises RuntimeError if the process failed or takes too
        long."""
        return self._check()

    def result(self) -> list[dict[str, float]]:
        """Wait for the end of the process, and return its measurements, one dict for each save. Raises RuntimeError as
        `running` does."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(self._until - time.monotonic(), 0.0))
        self._check()
        found: list[dict[str, float]] = json.loads(_lines(self._output)[-1])
        return found

    def _check(self) -> bool:
        """Return True if the process runs, False if it has ended well. Raises RuntimeError if it failed or takes too
        long."""
        status = self._process.poll()
        if status is None and time.monotonic() < self._until:
            return True
        if status == 0:
            return False
        why = f"no result after {DEADLINE_S:.0f} s" if status is None else f"exit status {status}"
        last = _lines(self._errors)[-1:]
        raise RuntimeError(": ".join([f"the process of this mode had {why}", *last]))

    def end(self) -> None:
        """Kill the process and all its descendants. torch's writer process may outlive its parent; it is then a child
        of this process."""
        kill_tree(os.getpid(), itself=False)
        self._process.wait()
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines()


@dataclass(frozen=True)
class Memory:
    """Memory of a process and its descendants at one moment, in bytes. `pss`: all of it; a page that several processes
    share is counted once."""

    pss: int
    files: int
    """Part of the memory that is mapped files, such as libraries, in bytes."""
    others: int
    """Private memory of the descendants, without that of the first process, in bytes."""


def memory_of(first: int) -> Memory:
    """Return the memory of the process `first` and of all other processes that this program has started.

    The processes are read one after the other, and then once more in reverse order. While a writer process maps memory
    of another process, a share of that memory moves from the other process's figure to the writer's. Read in one order
    only, this share could be counted twice or not at all.
    """
    pids = [pid for pid in tree(os.getpid()) if pid != os.getpid()]
    pss = files = others = 0
    for pid in (*pids, *reversed(pids)):
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
        except OSError:
            continue  # the process has ended meanwhile
        sizes = {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith("kB")}
        pss += sizes.get("Pss", 0)
        files += sizes.get("Pss_File", 0)
        if pid != first:
            others += sizes.get("Pss", 0) - sizes.get("Pss_Shmem", 0)
    return Memory(pss // 2, files // 2, others // 2)


def timed(mode: str, amounts: Amounts, folder: Path) -> list[dict[str, float]]:
    """Run a mode once, without reading its memory, which would disturb the times. Return the measurements of each
    save."""
    turn = Turn(mode, amounts, folder, held=False)
    try:
        return turn.result()
    finally:
        turn.end()


def memory_turn(mode: str, amounts: Amounts, folder: Path) -> dict[str, int]:
    """Run a mode once, and read the memory of all its processes from before the first save until its end. Return, in
    bytes, the baseline before the first save, and the peak."""
    turn = Turn(mode, amounts, folder, held=True)
    try:
        turn.ready()
        base = []
        for _ in range(SETTLED):
            time.sleep(SAMPLE_S)
            base.append(memory_of(turn.pid))
        turn.go()
        seen = []
        while turn.running():
            next_at = time.monotonic() + SAMPLE_S
            seen.append(memory_of(turn.pid))
            time.sleep(max(next_at - time.monotonic(), 0.0))
        peak = max(seen, key=lambda memory: memory.pss)
        before = sorted(base, key=lambda memory: memory.pss)[len(base) // 2]
        return {
            "base": before.pss,
            "peak": peak.pss,
            "files": peak.files - before.files,
            "others": peak.others,
            "samples": len(seen),
        }
    finally:
        turn.end()


def filesystem(folder: Path) -> str:
    """Return a text with the type and the device of the file system that a folder is on."""
    found, longest = "unknown", -1
    for line in Path("/proc/mounts").read_text().splitlines():
        device, mount, kind, *_ = line.split()
        if folder.resolve().is_relative_to(mount) and len(mount) >= longest:
            found, longest = f"{kind} on {device}", len(mount)
    return found


def run(amounts: Amounts, folder: Path) -> dict[str, Any]:
    """Run all modes in all rounds. Return the results, which --json writes to a file."""
    busy, load = busy_cores(1.0), os.getloadavg()[0]
    if busy > IDLE_CORES:
        print(f"the machine is not idle: {busy:.2f} cores are busy", file=sys.stderr)
    names = (*MODES, FLOOR)
    saves: dict[str, list[list[dict[str, float]]]] = {name: [] for name in names}
    memory: dict[str, list[dict[str, int]]] = {name: [] for name in MODES}
    failures: list[str] = []
    began, all_s, own_s, steal = time.monotonic(), machine_s(), cpu_s(os.getpid()), machine.steal_s()
    for number in range(amounts.rounds):
        start = number % len(names)
        for name in names[start:] + names[:start]:
            try:
                saves[name].append(timed(name, amounts, folder))
            except RuntimeError as error:
                failures.append(f"{name}, round {number + 1}: {error}")
    for number in range(amounts.memory_rounds):
        for name in MODES:
            try:
                memory[name].append(memory_turn(name, amounts, folder))
            except RuntimeError as error:
                failures.append(f"{name}, memory, round {number + 1}: {error}")
    took = time.monotonic() - began
    ours = cpu_s(os.getpid()) - own_s  # including ended children: all of them were waited for
    return {
        "machine": machine.describe(),
        "torch": importlib.metadata.version("torch"),
        "filesystem": filesystem(folder),
        "date": datetime.date.today().isoformat(),
        "commit": machine.commit(),
        "took_s": took,
        "settings": {
            "rounds": amounts.rounds,
            "saves": amounts.saves,
            "memory_rounds": amounts.memory_rounds,
            "step_ms": amounts.step_ms,
        },
        "nbytes": amounts.mib << 20,
        "noise": {
            "busy_before": busy,
            "load_before": load,
            "others": max(0.0, (machine_s() - all_s - ours) / took),
            "steal": (machine.steal_s() - steal) / (took * (os.cpu_count() or 1)),
        },
        "saves": saves,
        "memory": memory,
        "failures": failures,
    }


def main(given: list[str] | None = None) -> int:
    """Run the benchmark. Return the exit status: 1 if a measurement failed or, without --quick, a target was missed;
    else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, help=f"{FULL.rounds}")
    parser.add_argument("--saves", type=int, help=f"saves of a turn, besides its first one; {FULL.saves}")
    parser.add_argument("--mib", type=int, help=f"MiB that are saved; {FULL.mib}")
    parser.add_argument("--quick", action="store_true", help="small amounts, to see that it runs")
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--write", type=Path, help="document whose tables are replaced")
    parser.add_argument("--folder", type=Path, default=ROOT / "benchmarks/out", help="folder on the disk to measure")
    options = parser.parse_args(given)
    usual = QUICK if options.quick else FULL
    given_ones = {name: value for name in ("rounds", "saves", "mib") if (value := getattr(options, name))}
    amounts = replace(usual, **given_ones)
    adopt_orphans()
    options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=options.folder) as folder:
        results = run(amounts, Path(folder))
    shown = " --quick" * options.quick
    shown += "".join(f" --{name} {getattr(amounts, name)}" for name in ("rounds", "saves", "mib"))
    results["command"] = f"python -m benchmarks.checkpoint{shown}"
    text = markdown(results)
    print(text)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    if options.write:
        options.write.write_text(between(options.write.read_text(), text, BEGIN, END))
    missed = any(verdict.met is False for verdict in judge(results))
    return 1 if results["failures"] or (missed and not options.quick) else 0


if __name__ == "__main__":
    raise SystemExit(main())
