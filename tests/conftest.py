"""What all tests share: where their modules are found, and an environment without settings of ours."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import hypothesis

HERE = Path(__file__).parent
# inputs: users' modules, which workers import too. support: what several test modules need.
# simulation: `simulated`, which `make simulate` runs too. fuzz: the targets, which `make fuzz` runs too.
sys.path[:0] = [str(HERE / folder) for folder in ("inputs", "support", "simulation", "fuzz")]

for _name in [name for name in os.environ if name.startswith(("PENSTOCK_", "TORCHELASTIC_"))]:
    del os.environ[_name]

# A deadline of 200 ms for each example is a timed test: it fails on a machine that others use.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")
