"""Output of a training script whose user code fails: once, with the user's frames and the line of the loop."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from main_script import outcome

from penstock.client import DataExecutor, DataLoader
from penstock.data import MapLoader

SCRIPT = """
import ctypes
import torch
from torch.utils import data
from penstock.client import Appliance, DataLoader

class Rows(data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, number):
        if number == 5:
            {fault}
        return torch.tensor(number)

def make(**options):
    return data.DataLoader(Rows(), batch_size=2, **options)

if __name__ == "__main__":
    with Appliance(num_workers_per_box=1, seed=1):
        for batch in DataLoader(make{options}):
            print(batch.tolist(), flush=True)
"""


def said(folder: Path, fault: str, options: str = "") -> list[str]:
    """Lines of standard error of a script in which a sample fails."""
    script = folder / "train.py"
    script.write_text(SCRIPT.format(fault=fault, options=options))
    status, output, error = outcome(script, os.environ)
    assert status == 1, error
    assert output.splitlines() == ["[0, 1]", "[2, 3]"]
    return [line for line in error.splitlines() if not line.startswith("penstock: waiting for ")]


def test_an_exception_is_shown_once(tmp_path: Path) -> None:
    """Of one of torch's worker processes."""
    lines = said(tmp_path, 'raise ValueError("no such image")', ", num_workers=1")
    assert [line for line in lines if line.startswith("Traceback")]
    assert sum("in __getitem__" in line for line in lines) == 1
    assert not [line for line in lines if "/worker/penstock/" in line]
    assert [line for line in lines if "InputFnError: " in line and "raised ValueError: no such image" in line]
    assert len([line for line in lines if "/client/penstock/" in line]) == 1


def test_a_crash_of_a_sample_is_short(tmp_path: Path) -> None:
    """Print one warning at the loop's line and the error, for four deaths. It was 181 lines."""
    lines = said(tmp_path, "ctypes.string_at(0)")
    assert len([line for line in lines if "train.py:20: UserWarning: " in line]) == 1
    assert sum("SIGSEGV" in line for line in lines) == 2
    assert sum("__getitem__" in line for line in lines) == 2
    assert len(lines) <= 20  # with the frames of torch


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


def test_loaders_have_a_readable_repr() -> None:
    loader = DataLoader(MapLoader, range(4), batch_size=2)
    assert repr(loader) == "<DataLoader of penstock.data.loading.map_loader:MapLoader, step 0>"
    assert repr(DataExecutor(loader, num_steps=3)) == f"<DataExecutor of {loader!r}: 3 steps, 0 done>"
    assert repr(MapLoader(range(4), batch_size=2)) == (
        "<MapLoader over range: 4 samples, 2 in a global batch, epoch 0, 0 batches done>"
    )
