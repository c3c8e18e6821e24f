"""Embedded mode as scripts use it: whole programs, started as a user starts them."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import pytest
from interpreters import start
from main_script import start_script

TESTS = Path(__file__).parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(TESTS / "inputs")}

ENDLESS = """
import torch
from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.worker import current_assignment

def data(batches):
    me = current_assignment()
    return [torch.tensor(n) for n in range(me.global_worker_id, batches, me.total_num_workers)]

if __name__ == "__main__":
    with Appliance(num_workers_per_box=2) as appliance:
        for batch in DataExecutor(DataLoader(data, 6), num_steps=10**9, appliance=appliance):
            print("step", flush=True)
"""


def run(*command: str, **extra: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env={**ENVIRONMENT, **extra}, capture_output=True, text=True, timeout=100)


def marked(mark: str) -> dict[int, str]:
    """Processes that descend from a program started with this mark in its environment."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if f"TEST_MARK={mark}".encode() in (entry / "environ").read_bytes():
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
    return found


@pytest.fixture
def mark() -> str:
    """Inherited by everything that the program under test starts, and by nothing else."""
    return uuid.uuid4().hex


def left_after(mark: str, seconds: float) -> dict[int, str]:
    """Return the processes that are still there after `seconds`."""
    until = time.monotonic() + seconds
    while (left := marked(mark)) and time.monotonic() < until:
        for pid in left:
            try:
                fd = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            select.select([fd], [], [], max(0.0, until - time.monotonic()))
            os.close(fd)
    return left


def test_python_minus_c() -> None:
    """Run a program with importable input_fns, one of which prints, and with an input_fn of its own, which is sent by
    value."""
    program = """
import streams
from penstock.client import DataLoader
talking = DataLoader(streams.talks)  # as long as it is there, the others use its appliance
print(len(list(talking)))
print([b["number"] for b in DataLoader(streams.counter, 3)], flush=True)
def data(batches):
    return range(batches)
print(list(DataLoader(data, 3)))
"""
    done = run(sys.executable, "-c", program, PENSTOCK_JOB="chatter")
    assert done.stdout.splitlines() == ["4", "[1, 2, 3]", "[0, 1, 2]"], done.stderr
    assert "[chatter/0 box 0 slot 0] hello from the input" in done.stderr, "what user code prints, with its place"
    assert done.returncode == 0


def test_killed_trainer_leaves_nothing(tmp_path: Path, mark: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(ENDLESS)
    with tempfile.TemporaryDirectory() as temporary:  # other tests leave things in the common one meanwhile
        trainer = start_script(script, {**ENVIRONMENT, "TEST_MARK": mark, "TMPDIR": temporary})
        assert trainer.stdout is not None
        with trainer.stdout as said:
            assert said.readline() == b"step\n"
            assert len(marked(mark)) >= 3, "its daemons and runners"
            trainer.kill()
            trainer.wait(30)
        assert not left_after(mark, 15)
        assert not list(Path(temporary).rglob("*"))


RANKS = """
import os
import streams
import torch.distributed as dist
from penstock.client import Appliance, DataExecutor, DataLoader

def main():
    dist.init_process_group("gloo")
    with Appliance(num_workers_per_box=2) as appliance:
        loader = DataLoader(streams.shared, 40)
        executor = DataExecutor(loader, num_steps=6, appliance=appliance)
        got = [batch["number"] for batch in executor]
        states = [None, None]
        dist.all_gather_object(states, loader.state_dict())
        line = f"{dist.get_rank()} {got} {states[0] == states[1]} {states[0]['done']}\\n"
        os.write(1, line.encode())  # in one piece: two ranks write here
        dist.barrier()
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
"""


def test_local_rank_0_embeds_and_others_join(tmp_path: Path, mark: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(RANKS)
    launch, environment = ["--standalone", "--nproc-per-node=2", str(script)], {**ENVIRONMENT, "TEST_MARK": mark}
    torchrun = start("torch.distributed.run", launch, environment, imports=[], stdout=subprocess.PIPE)
    assert torchrun.stdout is not None
    with torchrun.stdout:
        said = torchrun.stdout.readall().decode()
        assert torchrun.wait(60) == 0
    assert sorted(said.split("\n"))[-2:] == [
        "0 [0, 1, 4, 5, 8, 9] True [3, 3, 3, 3]",
        "1 [2, 3, 6, 7, 10, 11] True [3, 3, 3, 3]",
    ]
    assert not left_after(mark, 15)
