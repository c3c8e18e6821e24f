"""Small programs that once got wrong batches in silence, a refused save, or a batch late: each is the first of its
kind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from chains import kill_runners, runners
from neighbours import beside
from proof import cases, loaders, memo
from proxy import proxied_lanes
from waiting import until

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.proto.errors import ReplayMismatchError


@pytest.fixture(scope="module")
def appliance() -> Iterator[Appliance]:
    with Appliance(seed=7) as appliance:
        yield appliance


def job(appliance: Appliance, **settings: Any) -> Appliance:
    return beside(appliance, **{"num_workers_per_box": 1, "replay": True, **settings})


def epochs_of_text(appliance: Appliance, resume_at: int | None) -> list[list[int]]:
    """Epoch 0 whole, epoch 1 up to batch 40, epoch 2 whole; the job ends at a batch of epoch 0, and goes on."""
    state = None
    epochs: list[list[int]] = []
    while len(epochs) < 3:
        with job(appliance):
            loader = DataLoader(loaders.keeps_place, 100)
            if state is not None:
                loader.load_state_dict(state)
            while len(epochs) < 3:
                seen: list[int] = []
                for batch in loader:
                    seen.append(int(batch["number"]))
                    if (state is None and not epochs and len(seen) == resume_at) or (len(epochs), len(seen)) == (1, 40):
                        break
                if state is None and not epochs and len(seen) == resume_at:
                    state = loader.state_dict()
                    break
                epochs.append(seen)
    return epochs


@pytest.mark.parametrize("resume_at", [None, 75])
def test_an_epoch_behind_a_break_begins_anew(appliance: Appliance, resume_at: int | None) -> None:
    epochs = epochs_of_text(appliance, resume_at)
    assert epochs == [list(range(resume_at or 0, 100)), list(range(40)), list(range(100))]


def test_all_steps_of_a_long_epoch_are_announced(appliance: Appliance) -> None:
    """A lane holds 4096 announced steps at a time, and a pure loader takes a snapshot only now and then."""
    with job(appliance, replay_s=60):
        loader = DataLoader(loaders.keeps_place, 6000, pause_s=0.0)
        seen = [int(batch["number"]) for batch in DataExecutor(loader, 5000, 1)]
        state = loader.state_dict()
    with job(appliance):
        loader = DataLoader(loaders.keeps_place, 6000, pause_s=0.0)
        loader.load_state_dict(state)
        assert seen + [int(batch["number"]) for batch in loader] == list(range(6000))


@pytest.mark.parametrize("seed", range(2))
def test_what_a_module_remembers_is_made_again(appliance: Appliance, seed: int) -> None:
    with job(appliance, seed=seed):
        loader = DataLoader(memo.memoised)
        for _ in DataExecutor(loader, num_steps=31):
            pass
        state = loader.state_dict()
        whole = [str(batch) for batch in DataExecutor(loader, num_steps=58)]
    with job(appliance, seed=seed):
        loader = DataLoader(memo.memoised)
        loader.load_state_dict(state)
        assert [str(batch) for batch in DataExecutor(loader, num_steps=58)] == whole


def test_small_leaves_between_large_ones_are_made_again(appliance: Appliance) -> None:
    with job(appliance):
        whole = [batch["label"].tolist() for batch in DataExecutor(DataLoader(cases.noisy), num_steps=18)]
    with job(appliance):
        loader = DataLoader(cases.noisy)
        got = [batch["label"].tolist() for batch in DataExecutor(loader, num_steps=9)]
        state = loader.state_dict()
    with job(appliance):
        loader = DataLoader(cases.noisy)
        loader.load_state_dict(state)
        got += [batch["label"].tolist() for batch in DataExecutor(loader, num_steps=9)]
    assert got == whole


def maker(folder: Path) -> int:
    """Return the process that waits inside the held batch."""
    mark = folder / "waits"
    until(lambda: mark.exists() and mark.read_text(), 20, "no runner has come to the held batch")
    return int(mark.read_text())


def vouched(folder: str) -> Any:
    return DataLoader(cases.Held(24, folder), batch_size=8)


def pure(folder: str) -> Any:
    return DataLoader(cases.held, folder)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of a slow worker, and of a lost one
@pytest.mark.parametrize(
    ("lane", "loader", "killed"), [("auto", pure, False), ("tcp", vouched, False), ("tcp", pure, True)]
)
def test_finished_batches_do_not_wait_for_a_later_one(
    appliance: Appliance, tmp_path: Path, lane: str, loader: Any, killed: bool
) -> None:
    """Batch 4 does not get done until the loop has the three before it."""
    with job(appliance, lane=lane, timeout_s=40):
        batches = iter(DataExecutor(loader(str(tmp_path)), num_steps=4))
        got = [next(batches)]
        pid = maker(tmp_path)
        if killed:
            os.kill(pid, signal.SIGKILL)
        got += [next(batches), next(batches)]
        (tmp_path / "go").touch()
        got.append(next(batches))
    assert torch.cat(got).tolist() == list(range(32))


@pytest.mark.filterwarnings("ignore::UserWarning")  # of a slow worker
def test_a_new_connection_does_not_wait_for_a_later_batch(
    appliance: Appliance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connections after the first one come while batch 4 is being made."""
    with proxied_lanes(monkeypatch) as proxies, job(appliance, lane="tcp", timeout_s=40):
        batches = iter(DataExecutor(pure(str(tmp_path)), num_steps=6))
        got = [next(batches)]
        maker(tmp_path)
        for _ in range(2):
            for proxy in proxies():
                proxy.cut()
            got.append(next(batches))
        (tmp_path / "go").touch()
        got += batches
        assert sum(proxy.connections for proxy in proxies()) >= 2
    assert torch.cat(got).tolist() == list(range(48))


@pytest.mark.filterwarnings("ignore::UserWarning")  # of a lost worker
def test_a_save_says_that_the_input_has_failed(appliance: Appliance) -> None:
    """It does not wait for batches that the runner will not make. The other worker's batch is the loop's next one."""
    before = runners()
    with job(appliance, num_workers_per_box=2, timeout_s=40) as own:
        loader = DataLoader(cases.unseeded)
        batches = iter(DataExecutor(loader, 400, 1, appliance=own))
        for _ in range(2):
            next(batches)
        others = {pid for pid in runners() if b"slot 0" in Path(f"/proc/{pid}/cmdline").read_bytes()}
        kill_runners(before | others)
        time.sleep(0.7)
        next(batches)  # the lanes are opened again
        time.sleep(0.7)
        with pytest.raises(ReplayMismatchError, match=r"Unseeded\.rng"):
            loader.state_dict()
