"""Output of a training script whose user code fails: once, with the user's frames and the line of the loop."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from main_script import outcome

from penstock.client import DataLoader

SCRIPT = """
import ctypes
import sys
import torch
import traceback
from torch.utils import data
from penstock.client import Appliance, DataLoader

def fails():
    raise ValueError("no such image")

def crashes():
    ctypes.string_at(0)

class Rows(data.Dataset):
    def __init__(self, fault):
        self.fault = fault
    def __len__(self):
        return 8
    def __getitem__(self, number):
        if number == 5:
            self.fault()
        return torch.tensor(number)

def failing():
    return data.DataLoader(Rows(fails), batch_size=2, num_workers=1)

def crashing():
    return data.DataLoader(Rows(crashes), batch_size=2)

if __name__ == "__main__":
    with Appliance(num_workers_per_box=1, seed=1):
        try:
            for batch in DataLoader(failing):
                print(batch.tolist(), flush=True)
        except Exception:
            traceback.print_exc()
            print("caught", file=sys.stderr, flush=True)
        for batch in DataLoader(crashing):
            print(batch.tolist(), flush=True)
"""
LOOP = 1 + SCRIPT[: SCRIPT.index("        for batch in DataLoader(crashing)")].count("\n")
"""Line of the loop that crashes."""


def test_a_failing_sample_is_shown_once_and_a_crash_is_short(tmp_path: Path) -> None:
    """First an exception of one of torch's worker processes; then a crash, which kills four runners: one warning at the
    loop's line and the error. It was 181 lines."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    status, output, error = outcome(script, os.environ)
    assert status == 1, error
    assert output.splitlines() == 2 * ["[0, 1]", "[2, 3]"]
    said = [line for line in error.splitlines() if not line.startswith("penstock: ")]
    lines, crash = said[: said.index("caught")], said[said.index("caught") + 1 :]
    assert [line for line in lines if line.startswith("Traceback")]
    assert sum("in __getitem__" in line for line in lines) == 1
    assert not [line for line in lines if "/worker/penstock/" in line]
    assert [line for line in lines if "InputFnError: " in line and "raised ValueError: no such image" in line]
    assert len([line for line in lines if "/client/penstock/" in line]) == 1
    assert len([line for line in crash if f"train.py:{LOOP}: UserWarning: " in line]) == 1
    assert sum("SIGSEGV" in line for line in crash) == 2
    assert sum("__getitem__" in line for line in crash) == 2
    assert len(crash) <= 21  # with the frames of torch


def supplies_start(function: Any) -> Any:
    """A decorator like those of configuration libraries: callers leave an argument out."""

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        return function(7, *args)

    return call


@supplies_start
def supplied(start: int, count: int) -> list[torch.Tensor]:
    return [torch.tensor(number) for number in range(start, start + count)]


def test_arguments_are_checked_before_a_start() -> None:
    def rows(count: int, *, start: int = 0) -> list[torch.Tensor]:
        return []

    assert DataLoader(rows, 3).step == 0
    with pytest.raises(
        TypeError, match=r"rows\(count: .*\).* cannot be called .*: missing a required argument: 'count'"
    ):
        DataLoader(rows)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="unexpected keyword argument 'end'"):
        DataLoader(rows, 3, end=1)  # type: ignore[call-arg]
    assert DataLoader(supplied, 3).step == 0, "the decorator supplies the other argument"
    DataLoader(int, "3")
    DataLoader(dict, a=1)
