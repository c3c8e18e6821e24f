"""Signals that a whole job gets at once, as from a scheduler, and daemons that die below it."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from census import descendants
from interpreters import Forked, start
from waiting import PATIENCE, until

HERE = Path(__file__).parent.parent
PROGRAM = HERE / "inputs" / "signalled.py"
INSTANTS = 100
SEED = 46


def launch(ranks: int, what: str, folder: Path, *more: str) -> Forked:
    """Start the program, with torchrun if it has several ranks."""
    arguments = [what, str(folder), *more]
    environment = {**os.environ, "PYTHONPATH": str(PROGRAM.parent), "OMP_NUM_THREADS": "1"}
    if ranks == 1:
        return start("signalled", arguments, environment, imports=[])
    command = ["--standalone", f"--nproc-per-node={ranks}", str(PROGRAM), *arguments]
    return start("torch.distributed.run", command, environment, imports=[])


def told(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    log = folder / f"rank-{rank}"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def names(job: Forked) -> list[str]:
    found = []
    for pid in descendants(job.pid):
        with suppress(OSError):
            found.append(Path(f"/proc/{pid}/comm").read_text())
    return found


def signal_all(job: Forked, chance: random.Random) -> None:
    """Send SIGTERM to every process of a job, in any order."""
    everyone = [job.pid, *descendants(job.pid)]
    chance.shuffle(everyone)
    for pid in everyone:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


@pytest.mark.timeout(PATIENCE * 300)
def test_the_step_of_any_signal_to_all_processes_restores(tmp_path: Path) -> None:
    chance = random.Random(SEED)
    job = launch(1, "instants", tmp_path, str(INSTANTS))
    until(lambda: told(tmp_path) or (tmp_path / "saved").exists(), 60)
    for number in range(INSTANTS):
        time.sleep(0.02 + 0.1 * chance.random())
        signal_all(job, chance)
        until(lambda number=number: len(told(tmp_path)) > number, 60, lambda: str(job.poll()))  # type: ignore[misc]
    assert job.wait(PATIENCE * 120) == 0
    assert told(tmp_path)[-1]["checked"] == INSTANTS


@pytest.mark.filterwarnings("ignore:.*was recovered:UserWarning")
def test_a_loader_whose_own_processes_the_signal_ends_is_made_again(tmp_path: Path) -> None:
    """The loop, which is faster than its input, gets the batches that are missing then."""
    chance = random.Random(SEED)
    job = launch(1, "instants", tmp_path, "3", "1")
    until(lambda: any("pt_data_worker" in name for name in names(job)), 60)
    time.sleep(0.5)
    for number in range(3):
        signal_all(job, chance)
        until(lambda number=number: len(told(tmp_path)) > number, 60, lambda: str(job.poll()))  # type: ignore[misc]
        until(lambda: any("pt_data_worker" in name for name in names(job)) or job.poll() is not None, 60)
        time.sleep(chance.random())
    assert job.wait(PATIENCE * 120) == 0
    assert told(tmp_path)[-1]["checked"] == 3


@pytest.mark.parametrize(("ranks", "lives"), [(1, 4), (2, 2)])
def test_a_job_continues_at_the_step_of_the_signal(tmp_path: Path, ranks: int, lives: int) -> None:
    """Send signals again and again, as Slurm's scripts do; to torchrun only once, which passes its own on to the ranks,
    and would not wait for them after a second."""
    chance = random.Random(SEED)
    for _ in range(lives):
        began = len(told(tmp_path))
        job = launch(ranks, "lives", tmp_path)
        until(lambda began=began: any("step" in line for line in told(tmp_path)[began:]), 60)  # type: ignore[misc]
        time.sleep(0.3 * chance.random())
        deadline = time.monotonic() + PATIENCE * 30
        signal_all(job, chance)
        while job.poll() is None:
            time.sleep(0.2)
            if ranks == 1:
                signal_all(job, chance)
            assert time.monotonic() < deadline, "the save after the signal does not end"
    for rank in range(ranks):
        lines = told(tmp_path, rank)
        assert [line["restored"] for line in lines if "restored" in line][1:] == [
            line["saved"] for line in lines if "saved" in line
        ][:-1]
        steps = [line["step"] for line in lines if "step" in line]
        assert steps == [*range(1, len(steps) + 1)], "no step is missing, and none came twice"
        rows = [line["row"][0] for line in lines if "step" in line]
        of_two_workers = [2 * ranks * (step // 2) + 2 * rank + step % 2 for step in range(len(rows))]
        assert rows == of_two_workers, "the rows of a run without signals"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_call_ends_with_the_daemons_that_it_waits_for(tmp_path: Path, ranks: int) -> None:
    job = launch(ranks, "bereaved", tmp_path)
    assert job.wait(PATIENCE * 60) == 0
    for rank in range(ranks):
        error, closed = told(tmp_path, rank)
        assert ("was killed by SIGKILL" if rank == 0 else "of local rank 0 has ended") in error["error"]
        assert error["seconds"] < PATIENCE * 10
        assert closed["closed"] < PATIENCE * 15
