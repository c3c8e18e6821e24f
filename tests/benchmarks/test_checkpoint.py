"""The benchmark of the checkpoints: all of it once with few bytes, and what its report says of given figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks import checkpoint
from benchmarks.checkpoint_report import FLOOR, MEANWHILE, MODES, PENSTOCK, PLAIN, THREAD, judge, markdown
from benchmarks.modes import ROOT

NBYTES = 1000 << 20
TINY_RUN = """
import json, sys
from pathlib import Path
from benchmarks import checkpoint
from benchmarks.checkpoint import Amounts, memory_turn, run
from benchmarks.processes import adopt_orphans

adopt_orphans()
checkpoint.MODES = ("Penstock",)  # each costs seconds
amounts, folder = Amounts(rounds=1, saves=1, mib=8, memory_rounds=0, step_ms=5.0), Path(sys.argv[1])
results = run(amounts, folder)
results["memory"]["Penstock"] = [memory_turn("Penstock", amounts, folder)]
print(json.dumps({**results, "command": ""}))
"""


# In a process of its own: the program ends all that its process has started.
@pytest.mark.timeout(240)  # four processes that import torch, one after the other
def tiny_run(folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-c", TINY_RUN, str(folder)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    results: dict[str, Any] = json.loads(done.stdout)
    return results


def test_everybody_has_a_turn(tmp_path: Path) -> None:
    results = tiny_run(tmp_path)
    assert results["failures"] == []
    [[save]] = results["saves"][PENSTOCK]
    assert 0 < save["stall"] <= save["total"]
    assert save["first"] > 0
    [[floor]] = results["saves"][FLOOR]
    assert min(floor["copy"], floor["write"]) > 0
    [memory] = results["memory"][PENSTOCK]
    assert memory["samples"] > 2
    assert memory["peak"] - memory["base"] > 8 << 20
    # The writer, if it is there at that moment, has no torch. A process between fork and exec is as large as its
    # parent, and a reading of memory may fall there: then another run counts.
    others = [memory["others"]]
    while others[-1] >= 100 << 20 and len(others) < 3:
        [memory] = tiny_run(tmp_path)["memory"][PENSTOCK]
        others.append(memory["others"])
    assert min(others) < 100 << 20
    assert "| Penstock |" in markdown(results)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_a_turn_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('no torch for this mode')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    turn = checkpoint.Turn(PENSTOCK, checkpoint.QUICK, tmp_path, held=True)
    with pytest.raises(RuntimeError, match=r"exit status 1: .*no torch for this mode"):
        turn.ready()


def _save(stall: float, excess: float, total: float) -> dict[str, float]:
    return {"stall": stall, "excess": excess, "total": total, "usual": 0.05, "steps": 9, "first": 3 * stall}


def _results(**own: float) -> dict[str, Any]:
    """Rounds in which torch's modes take what is given here, and Penstock what the test says."""
    theirs = {PLAIN: (1.0, 0.0, 1.0), THREAD: (0.4, 0.5, 1.5), MEANWHILE: (0.2, 0.5, 2.0)}
    saves = {mode: [[_save(*theirs.get(mode, (0.3, 0.6, 3.0)))] * 2] for mode in MODES}
    ours = {"stall": 0.15, "excess": 0.2, "total": 1.1, **own}
    saves[PENSTOCK] = [[_save(ours["stall"], ours["excess"], ours["total"])] * 2]
    base, writer = 500 << 20, 10 << 20
    peak = base + int(own.get("copies", 1.02) * NBYTES)
    memory = {"base": base, "peak": peak, "files": 0, "others": writer, "samples": 9}
    less = {**memory, "peak": base}
    return {
        "machine": dict.fromkeys(("cores", "processor", "caches", "memory_gib", "kernel", "python"), "?"),
        "noise": {"busy_before": 0.0, "load_before": 0.0, "others": 0.0, "steal": 0.0},
        "settings": {"rounds": 1, "saves": 2, "memory_rounds": 2, "step_ms": 50.0},
        "torch": "2.13.0",
        "filesystem": "ext4 on /dev/test",
        "command": "",
        "date": "",
        "commit": "",
        "took_s": 1.0,
        "nbytes": NBYTES,
        "saves": {**saves, FLOOR: [[{"copy": 0.1, "write": 0.5, "direct": 1.0}]]},
        "memory": {mode: [less, memory, less] for mode in MODES},
        "failures": [],
    }


@pytest.mark.parametrize(
    ("own", "missed"),
    [
        ({}, []),
        ({"stall": 0.2, "excess": 0.25, "total": 1.2, "copies": 1.05}, []),
        ({"stall": 0.25}, [1]),
        ({"stall": 0.31}, [0, 1]),
        ({"excess": 0.26}, [2]),
        ({"excess": -0.01}, []),
        ({"total": 1.21}, [3]),
        ({"copies": 1.06}, [4]),
    ],
)
def test_what_is_missed_is_said(own: dict[str, float], missed: list[int]) -> None:
    verdicts = judge(_results(**own))
    assert [number for number, verdict in enumerate(verdicts) if verdict.met is False] == missed
    assert [verdict.met for verdict in verdicts].count(None) == 0
