"""`num_workers_per_box=0`: batches are made in the training process and thread, so that it can be debugged."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import threading
import traceback
from bdb import BdbQuit
from pathlib import Path
from typing import Any

import mapped
import pytest
import torch
from appliances import made
from census import children

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.proto.errors import InputFnError, InvalidArgumentError, PenstockError

STOPS = """
from typing import Any
import torch
from penstock.client import DataExecutor, DataLoader

{}

if __name__ == "__main__":
    for batch in DataExecutor(DataLoader(stops)):
        print("batch", int(batch))
"""


def numbers(count: int) -> list[torch.Tensor]:
    return [torch.tensor(number) for number in range(count)]


def interrupted() -> Any:
    yield torch.tensor(0)
    raise BdbQuit


def stops() -> Any:
    for number in range(4):
        if number == 2:
            breakpoint()
        yield torch.tensor(number)


def test_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start no process, not even with an address, so that a job is debugged by one variable."""
    monkeypatch.setenv("PENSTOCK_COORDINATOR", "nowhere.invalid:1")
    monkeypatch.setenv("PENSTOCK_NUM_WORKERS_PER_BOX", "0")
    before = children(os.getpid()), threading.active_count()
    with Appliance() as appliance:
        assert repr(appliance) == "<Appliance in this process, box 0 of 1, 0 workers each>"
        assert appliance.job
        assert [int(batch) for batch in DataExecutor(DataLoader(numbers, 3))] == [0, 1, 2]
        assert (children(os.getpid()), threading.active_count()) == before
    with pytest.raises(PenstockError, match="this Appliance is closed"):
        next(iter(DataExecutor(DataLoader(numbers, 3), appliance=appliance)))


def test_a_breakpoint_stops_in_the_users_frame(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(STOPS.format(inspect.getsource(stops)))
    environment = os.environ | {"PENSTOCK_NUM_WORKERS_PER_BOX": "0"}
    options: dict[str, Any] = {"env": environment, "capture_output": True, "text": True, "timeout": 60}
    run = subprocess.run([sys.executable, script], input="p number + 40\nc\n", **options)
    assert "(Pdb) 42" in run.stdout
    assert run.stdout.count("batch") == 4
    assert run.returncode == 0


@pytest.mark.filterwarnings("ignore:.*no worker read its assignment")
def test_a_worker_says_where_a_breakpoint_works(appliance: Appliance) -> None:
    says = r"batch 3 raised BdbQuit: breakpoint\(\) needs a terminal, and workers have none. Set num_"
    with pytest.raises(InputFnError, match=says) as caught:
        list(DataExecutor(DataLoader(lambda: stops()), appliance=appliance))
    assert "PENSTOCK_NUM_WORKERS_PER_BOX=0" in str(caught.value)


def test_the_users_own_stop_is_raised_as_it_is() -> None:
    with Appliance(num_workers_per_box=0) as appliance:
        executor = DataExecutor(DataLoader(interrupted), num_steps=2, appliance=appliance)
        with pytest.raises(BdbQuit):
            list(executor)


def test_a_traceback_has_the_users_frames_once() -> None:
    with Appliance(num_workers_per_box=0) as appliance, pytest.raises(InputFnError) as caught:
        list(DataExecutor(DataLoader(mapped.mapped, broken=0, batch_size=2), appliance=appliance))
    assert caught.value.__cause__ is not None
    text = "".join(traceback.format_exception(caught.value))
    assert text.count("remote traceback") == 0
    assert text.count("direct cause") == 1


def test_several_boxes_need_a_seed() -> None:
    """No coordinator gives them the same one."""
    error = pytest.raises(InvalidArgumentError, match=r"seed must be given with .* num_boxes=2.*Appliance\(seed=")
    with Appliance(num_workers_per_box=0, num_boxes=2, box=1) as appliance, error:
        next(iter(DataExecutor(DataLoader(numbers, 3), appliance=appliance)))


def test_synthetic_batches_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"synthetic \(from PENSTOCK_SYNTHETIC\) must be False with"):
        made(num_workers_per_box=0, synthetic=True)
