"""What all tests share: the users' modules of tests/inputs, and an environment without settings of ours."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

INPUTS = str(Path(__file__).parent / "inputs")
sys.path.insert(0, INPUTS)

for _name in [name for name in os.environ if name.startswith(("PENSTOCK_", "TORCHELASTIC_"))]:
    del os.environ[_name]


@pytest.fixture
def worker_environment() -> dict[str, str]:
    """For daemons that tests start by hand: the users' modules can be imported there too."""
    return {**os.environ, "PYTHONPATH": INPUTS, "PENSTOCK_TOKEN": "a-token-for-tests-only-0123456789"}
