"""States of small libraries go on after a restore as after torch.save and torch.load; `make frameworks` has more."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from other_libraries import Case, adapters, goes_on, optimized


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(partial(optimized, "schedulefree.AdamWScheduleFree"), id="schedulefree"),
        pytest.param(partial(adapters, "VeraConfig", r=4), id="peft"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # of the libraries
def test_the_next_steps_are_equal(tmp_path: Path, case: Callable[[], Case]) -> None:
    goes_on(tmp_path, case)
