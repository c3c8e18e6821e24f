"""Training jobs that save when a signal comes, as programs: with an embedded appliance, under torchrun or alone."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.client.checkpoint import AsyncCheckpointer
from penstock.proto.errors import PenstockError
from penstock.proto.state.checkpoint_files import checkpoints
from penstock.worker import current_assignment

SAVE_EVERY = 7
"""Steps between two saves: a signal finds one in flight more often than not."""
ENDLESS = 1 << 30


class Rows:
    def __init__(self, count: int) -> None:
        self.count, self.done = count, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        a = current_assignment()
        for row in range(a.global_worker_id + self.done * a.total_num_workers, self.count, a.total_num_workers):
            time.sleep(0.001)
            self.done += 1
            yield torch.tensor([row])
        self.done = 0

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]


def rows(count: int) -> Rows:
    return Rows(count)


class Slept(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, rows: range) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.004)
        return torch.tensor([self.rows[index]])


def in_processes(count: int) -> Any:
    """A loader with a process of its own, which signals end, and which is slower than the loop."""
    a = current_assignment()
    shard = Slept(range(a.global_worker_id, count, a.total_num_workers))
    return torch.utils.data.DataLoader(shard, batch_size=None, num_workers=1)


class Slow(Rows):
    """A helper process needs an hour for its states."""

    def aggregate_state_dict(self, states: list[dict[str, int]]) -> dict[str, int]:
        time.sleep(3600)
        return states[0]

    def deaggregate_state_dict(self, aggregated: dict[str, int]) -> dict[str, int]:
        return aggregated


def slow_states(count: int) -> Slow:
    if "PENSTOCK_RUNNER" not in os.environ:  # otherwise the training process aggregates states, and waits for nobody
        raise RuntimeError("only workers have the data")
    return Slow(count)


class Log:
    """File of one rank, a line for each thing that it tells, which survives the process."""

    def __init__(self, folder: Path) -> None:
        self._fd = os.open(folder / f"rank-{os.environ.get('RANK', 0)}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def tell(self, **told: Any) -> None:
        os.write(self._fd, json.dumps({**told, "pid": os.getpid()}).encode() + b"\n")


def lives(folder: Path, log: Log) -> None:
    """Train until a signal; save that step, and end. The next life continues."""
    with (
        Appliance(num_workers_per_box=2, seed=1) as appliance,
        AsyncCheckpointer(folder / "saved", on_signal=signal.SIGTERM, fsync=False, keep_last=2) as checkpointer,
    ):
        loader = DataLoader(rows, ENDLESS)
        state = {"model": torch.nn.Linear(200, 200), "loader": loader}
        step = checkpointer.restore(state) or 0
        log.tell(restored=step)
        for batch in DataExecutor(loader, appliance=appliance):
            step += 1
            log.tell(step=step, row=batch.tolist())
            signalled = checkpointer.signalled()
            if signalled or step % SAVE_EVERY == 0:
                checkpointer.save(step, state)
            if signalled:
                checkpointer.wait()
                log.tell(saved=step)
                return


def instants(folder: Path, log: Log, count: int, lent: int = 0) -> None:
    """Save at each signal, and go on; after `count` of them see what saved loaders continue with. `lent`: user code has
    processes of its own."""
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
    seen: dict[int, list[int]] = {}
    saved: list[int] = []
    with (
        Appliance(num_workers_per_box=2, seed=1, replay=bool(lent)) as appliance,
        AsyncCheckpointer(folder / "saved", fsync=False) as checkpointer,
    ):
        input_fn = in_processes if lent else rows
        loader = DataLoader(input_fn, ENDLESS)
        model = torch.nn.Linear(200, 200)
        for step, batch in enumerate(DataExecutor(loader, appliance=appliance), 1):
            seen[step] = batch.tolist()
            answered = len(signals)
            if answered > len(saved) or step % SAVE_EVERY == 0:
                checkpointer.save(step, {"model": model, "loader": loader})
            if answered > len(saved):
                saved.append(step)
                log.tell(saved=step)
            if len(saved) == count and step > saved[-1]:
                break
        checkpointer.wait()
        assert all(row == [step - 1] for step, row in seen.items()), "the rows are those of a run without signals"
        for step in saved[::9]:  # of each, an opening would take longer than the signals
            again = DataLoader(input_fn, ENDLESS)
            assert checkpointer.restore({"model": model, "loader": again}, step=step) == step
            assert next(iter(DataExecutor(again, appliance=appliance))).tolist() == seen[step + 1]
        assert [one.step for one in checkpoints(folder / "saved") if one.step % SAVE_EVERY] == [
            step for step in reversed(saved) if step % SAVE_EVERY
        ]
        log.tell(checked=len(saved))


def bereaved(folder: Path, log: Log) -> None:
    """Lose the embedded daemons while a state is being made, and say what the call does, on each rank."""
    with Appliance(num_workers_per_box=1, seed=1) as appliance:
        loader = DataLoader(slow_states, ENDLESS)
        batches = iter(DataExecutor(loader, appliance=appliance))
        for _ in range(3):
            next(batches)
        if dist.is_initialized():
            dist.barrier()
        if appliance._daemons is not None:
            threading.Timer(1.0, appliance._daemons.process.kill).start()
        began = time.monotonic()
        try:
            loader.state_dict()
        except PenstockError as error:
            log.tell(error=error.message, seconds=time.monotonic() - began)
    log.tell(closed=time.monotonic() - began)


def main() -> int:
    what, folder, *more = sys.argv[1:]
    torch.set_num_threads(1)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    programs: dict[str, Callable[..., None]] = {"lives": lives, "instants": instants, "bereaved": bereaved}
    programs[what](Path(folder), Log(Path(folder)), *map(int, more))
    return 0


if __name__ == "__main__":
    sys.exit(main())
