"""Time of `import penstock.client` beyond `import torch`: the target is half a second.

    python -m benchmarks.import_time --rounds 7

Each round is a new interpreter that imports torch and then penstock.client, and measures each by the clock and in
processor time, which other programs disturb less. The first round may write bytecode, and is not counted. With
--costliest N the N costliest modules by themselves follow (from one run under `-X importtime`, whose overhead slows all
of them).
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys

from benchmarks.machine import commit, describe

__all__ = ["costs", "measure"]

TARGET_S = 0.5
PROBE = """
import json, time
marks = [(time.perf_counter(), time.process_time())]
for name in ("torch", "penstock.client"):
    __import__(name)
    marks.append((time.perf_counter(), time.process_time()))
print(json.dumps([[b - a for a, b in zip(*pair)] for pair in zip(marks, marks[1:])]))
"""
_LINE = re.compile(r"import time:\s+(\d+) \|\s+(\d+) \| (\s*)(\S+)")


def measure(rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Measure the import of torch, and that of penstock.client after it. Return (seconds by the clock, processor
    seconds) of each round, by the name of the import."""
    found: dict[str, list[tuple[float, float]]] = {"torch": [], "penstock.client": []}
    for number in range(rounds + 1):
        done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True, timeout=300)
        if number > 0:
            for name, (clock_s, processor_s) in zip(found, json.loads(done.stdout), strict=True):
                found[name].append((clock_s, processor_s))
    return found


def costs(report: str) -> list[tuple[str, float]]:
    """Return the modules that are imported after torch, each with the milliseconds of its own import, without those of
    modules that it imports. `report`: output of `-X importtime`."""
    rows = [_LINE.fullmatch(line) for line in report.splitlines()]
    names = [(row[4], int(row[1]) / 1000) for row in rows if row]
    behind = next((place for place, (name, _) in enumerate(names) if name == "torch"), -1) + 1
    return sorted(names[behind:], key=lambda row: -row[1])


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the import of penstock.client beyond torch.")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--costliest", type=int, default=0, metavar="N", help="also show the N costliest modules")
    options = parser.parse_args()
    found = measure(options.rounds)
    machine = describe()
    print(f"{machine['cores']} cores of {machine['processor']}, Python {machine['python']}, commit {commit()}")
    print(f"{'median of ' + str(options.rounds):<22}{'clock':>9}{'processor':>12}")
    for name, rows in found.items():
        clock_s, processor_s = (statistics.median(column) for column in zip(*rows, strict=True))
        print(f"{name:<22}{clock_s:>7.2f} s{processor_s:>10.2f} s")
    print(f"aim: penstock.client below {TARGET_S} s, by the clock of an idle machine")
    if options.costliest:
        command = [sys.executable, "-X", "importtime", "-c", "import torch, penstock.client"]
        report = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stderr
        for name, cost_ms in costs(report)[: options.costliest]:
            print(f"{cost_ms:>9.1f} ms  {name}")


if __name__ == "__main__":
    main()
