"""The benchmark of the checkpoints: all of it once with few bytes, and what its report says of given figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.checkpoint_report import FLOOR, PENSTOCK, markdown
from benchmarks.modes import ROOT

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


@pytest.mark.timeout(240)  # processes that import torch, one after the other
def test_everybody_has_a_turn(tmp_path: Path) -> None:
    # In a process of its own: the program ends all that its process has started.
    command = [sys.executable, "-c", TINY_RUN, str(tmp_path)]
    results = json.loads(subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout)
    assert results["failures"] == []
    [[save]] = results["saves"][PENSTOCK]
    assert 0 < save["stall"] <= save["total"]
    assert save["first"] > 0
    [[floor]] = results["saves"][FLOOR]
    assert min(floor["copy"], floor["write"]) > 0
    [memory] = results["memory"][PENSTOCK]
    assert memory["samples"] > 2
    assert memory["peak"] - memory["base"] > 8 << 20
    assert "| Penstock |" in markdown(results)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
