"""The appliance that is shipped for tests: what it does besides the contract, and the faults that it injects."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dealt
import pytest
import streams
import torch
import torch.utils.data
from appliances import made

from penstock.client import DataExecutor, DataLoader
from penstock.client.testing import FakeAppliance, InputError, LostWorker, SlowBatch
from penstock.proto.errors import (
    ForkedProcessError,
    InputFnError,
    InvalidArgumentError,
    StateUnavailableError,
    WorkerLostError,
)

INPUTS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "two methods": (streams.counter, {}),
    "four methods and noise": (streams.shared_noisy, {}),
    "shards of ours": (dealt.listed, {"lengths": [9, 4, 11, 6, 8], "batch_size": 3}),
}


def numbers(batch: Any) -> Any:
    return {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in batch.items()}


def loader_of(name: str) -> DataLoader:
    input_fn, kwargs = INPUTS[name]
    return DataLoader(input_fn, **kwargs)


def take(appliance: FakeAppliance, steps: int, name: str = "two methods", **options: Any) -> tuple[list[Any], Any]:
    executor = DataExecutor(loader_of(name), num_steps=steps, appliance=appliance, **options)
    return [numbers(batch) for batch in executor], executor.digest


def fake(**settings: Any) -> FakeAppliance:
    return FakeAppliance(**{"num_workers_per_box": 2, "seed": 7, **settings})


def test_rest_of_an_ended_epoch_is_nothing() -> None:
    """From a state of its last batch, saved before the loop has seen the end; then comes the next epoch."""

    def rests(state: Any, workers: int = 2, times: int = 1) -> list[int]:
        with fake(num_workers_per_box=workers) as appliance:
            again = loader_of("shards of ours")
            again.load_state_dict(state)
            return [len(list(DataExecutor(again, appliance=appliance, rest_only=True))) for _ in range(times)]

    with fake() as appliance:
        loader = loader_of("shards of ours")
        states = [loader.state_dict() for _ in DataExecutor(loader, appliance=appliance)]
        ended = states[-1]
    assert rests(ended, times=2) == [0, len(states)]
    assert rests(states[-2]) == [1]
    assert rests(ended, workers=3) == [len(states)]  # as documented


# ---- faults


def test_a_slow_batch_is_waited_for() -> None:
    step = 2
    with fake(faults=[SlowBatch(step, seconds=0.2)]) as appliance:
        executor = DataExecutor(DataLoader(streams.counter), num_steps=7, appliance=appliance)
        waits = [executor.last_wait_seconds for _ in executor]
    assert waits[step - 1] >= 0.2
    assert executor.stats.waited_s >= 0.2
    assert sum(executor.stats.waited_by_worker.values()) == pytest.approx(executor.stats.waited_s)


def test_an_input_error_ends_the_run() -> None:
    whole, digest = take(fake(), 6)
    with fake(faults=[InputError(5, OSError("no such shard"))]) as appliance:
        loader = DataLoader(streams.counter)
        states = (loader.state_dict() for _ in DataExecutor(loader, num_steps=6, appliance=appliance))
        kept: deque[dict[str, Any]] = deque(maxlen=1)
        with pytest.raises(InputFnError, match=r"batch 3 raised .*no such shard.*slot 0, step 5\]") as raised:
            kept.extend(states)
        assert isinstance(raised.value.__cause__, OSError)
        with pytest.raises(InputFnError):
            next(iter(DataExecutor(loader, appliance=appliance)))
    loader.load_state_dict(kept.pop())
    assert loader.step == 4
    executor = DataExecutor(loader, num_steps=2, appliance=fake())
    assert ([numbers(batch) for batch in executor], executor.digest) == (whole[4:], digest)


def test_a_lost_worker_is_replaced() -> None:
    steps, whole = (1, 4, 5, 9), take(fake(), 11)
    with fake(faults=[*map(LostWorker, steps)]) as appliance:
        executor = DataExecutor(DataLoader(streams.counter), num_steps=11, appliance=appliance)
        with pytest.warns(UserWarning, match="worker slot . of box 0 was recovered: its worker was lost") as told:
            got = [numbers(batch) for batch in executor]
    assert (got, executor.digest) == whole
    assert executor.stats.recoveries == len(told) == len(steps)


def test_a_worker_is_lost_for_good() -> None:
    with fake(faults=[LostWorker(3, for_good=True)]) as appliance:
        loader = DataLoader(streams.counter)
        with pytest.raises(WorkerLostError, match=r"its worker was lost .*slot 0, step 3\]"):
            list(DataExecutor(loader, num_steps=4, appliance=appliance))
        assert loader.step == 2


def test_a_fault_needs_a_step() -> None:
    with pytest.raises(InvalidArgumentError, match="must be >= 1, got 0"):
        FakeAppliance(faults=[LostWorker(0)])


# ---- in this process and thread


class InterruptedOnce(torch.utils.data.Dataset[torch.Tensor]):
    """Ctrl-C comes while it reads a row."""

    pressed: list[int] = []  # noqa: RUF012

    def __len__(self) -> int:
        return 8

    def __getitem__(self, number: int) -> torch.Tensor:
        if number == 5 and not self.pressed:
            self.pressed.append(number)
            raise KeyboardInterrupt
        return torch.tensor([number]) + torch.rand(1)


def rows() -> Any:
    return torch.utils.data.DataLoader(InterruptedOnce(), shuffle=True)


def test_ctrl_c_is_the_loops() -> None:
    """Raise KeyboardInterrupt in the loop and not as an error of the input. The batches after it are those that would
    have come anyway."""
    InterruptedOnce.pressed[:] = [0]
    with fake(num_workers_per_box=1, replay=True) as appliance:
        whole = [batch.tolist() for batch in DataExecutor(DataLoader(rows), num_steps=12, appliance=appliance)]
    InterruptedOnce.pressed.clear()
    with fake(num_workers_per_box=1, replay=True) as appliance:
        got: list[Any] = []
        loader = DataLoader(rows)
        with pytest.raises(KeyboardInterrupt):
            got.extend(batch.tolist() for batch in DataExecutor(loader, num_steps=12, appliance=appliance))
        state, done = loader.state_dict(), loader.step
        left = 12 - done
        rest = [batch.tolist() for batch in DataExecutor(loader, num_steps=left, appliance=appliance)]
        loader.load_state_dict(state)
        again = [batch.tolist() for batch in DataExecutor(loader, num_steps=left, appliance=appliance)]
    assert got + rest == got + again == whole


def test_a_forked_child_has_no_part_in_it() -> None:
    with fake() as appliance:
        loader = DataLoader(streams.counter)
        batches = iter(DataExecutor(loader, appliance=appliance))
        next(batches)
        read, write = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                next(batches)
            except ForkedProcessError:
                os.write(write, b"refused")
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        assert os.read(read, 100) == b"refused"
        os.close(read)
        os.close(write)
        assert numbers(next(batches))["number"] == 1001


# ---- the appliance


def test_the_surroundings_are_not_looked_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "penstock.toml"
    file.write_text("[client]\nseed = 5\n[cluster]\ncoordinator = 'elsewhere:1'\n")
    monkeypatch.setenv("PENSTOCK_CONFIG", str(file))
    for name, value in {"PENSTOCK_COORDINATOR": "elsewhere:1", "PENSTOCK_SEED": "9", "RANK": "3"}.items():
        monkeypatch.setenv(name, value)
    settings = FakeAppliance().settings
    assert (settings.address, settings.seed, settings.box, settings.num_boxes) == ("", None, 0, 1)


def test_a_fresh_seed_is_kept_for_the_loader() -> None:
    with fake(seed=None) as appliance:
        loader = DataLoader(streams.shared_noisy)
        state = loader.state_dict()
        first = [numbers(batch) for batch in DataExecutor(loader, num_steps=3, appliance=appliance)]
        loader.load_state_dict(state)
        assert [numbers(batch) for batch in DataExecutor(loader, num_steps=3, appliance=appliance)] == first
        assert take(appliance, 3, "four methods and noise")[0] != first


def test_states_are_kept_as_long_as_asked() -> None:
    with made(num_workers_per_box=0, seed=7, retention_steps=3) as appliance:
        loader = DataLoader(streams.shared_noisy)
        list(DataExecutor(loader, num_steps=8, appliance=appliance))
        assert loader.state_at(5)["__penstock__"]["step"] == 5
        with pytest.raises(StateUnavailableError, match=r"step 4 is not kept any more"):
            loader.state_at(4)


def test_a_shorter_box_is_saved_at_its_end() -> None:
    """Box 1's epoch is over when box 0 saves: it stays there, as in a real run."""
    with fake(num_workers_per_box=1, num_boxes=2) as appliance:
        loader = DataLoader(streams.uneven, [6, 3])
        assert len([*DataExecutor(loader, appliance=appliance)]) == 6
        state = loader.state_dict()
    for box, first in ((0, 1), (1, 1001)):
        with fake(num_workers_per_box=1, num_boxes=2, box=box) as appliance:
            again = DataLoader(streams.uneven, [6, 3])
            again.load_state_dict(state)
            assert numbers(next(iter(DataExecutor(again, appliance=appliance))))["number"] == first
