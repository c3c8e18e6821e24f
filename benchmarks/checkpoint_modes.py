"""Modes of saving a checkpoint, each in a process of its own that benchmarks/checkpoint.py starts.

Each process runs a small training loop. A step computes matrix products on all cores and then changes part of the saved
tensors, as an optimizer's step does. The loop saves several times. For each save three times are measured: the stall,
for which the call that saves blocks the loop; the excess, by which the steps after the call take longer than others
until the checkpoint is on the disk; and the total, from the call until then.

If a mode copies while the loop runs, the loop waits before it changes tensors that are being copied, because the
checkpoint would otherwise mix two steps. That wait is part of the stall.

"floor" is the lower limit: it only copies the same bytes once, and writes them once.
"""

from __future__ import annotations

import argparse
import errno
import json
import mmap
import os
import shutil
import statistics
import tempfile
import time
import warnings
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse, async_save, save

from penstock.client.checkpoint import AsyncCheckpointer

THREADS = 2
"""Number of threads that write a checkpoint, the same in every mode."""
CHUNK = 16 << 20
"""Number of bytes that one system call of the floor writes, the same as in Penstock's writer."""
TENSORS = 192
"""Number of tensors that are saved. A third are parameters, the others an optimizer's moments. One in 4 is 16 times as
large as the others."""


class Mode(ABC):
    """Mode: one of the compared methods of saving a checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @abstractmethod
    def save(self, step: int, state: dict[str, Any]) -> None:
        """Make the call by which a training loop saves `state`. Return when the loop may continue."""

    @abstractmethod
    def done(self) -> bool:
        """Return True if the last save is on the disk."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until the last save is on the disk."""

    # The two methods below do nothing in most modes, which have copied when `save` returns and hold no resources.

    def settle(self) -> None:  # noqa: B027
        """Wait until the last save has copied the state, so that the loop may change it."""

    def close(self) -> None:  # noqa: B027
        """Release processes, threads and memory of this mode after the last save."""


class Plain(Mode):
    def save(self, step: int, state: dict[str, Any]) -> None:
        save(state, storage_writer=FileSystemWriter(self.folder / f"step-{step}", thread_count=THREADS))

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class Asynchronous(Mode):
    """Mode that saves by torch's dcp.async_save, as its documentation recommends."""

    kind = AsyncCheckpointerType.THREAD

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._future: Any = None
        self._staged: Any = None

    def options(self) -> dict[str, Any]:
        return {}

    def save(self, step: int, state: dict[str, Any]) -> None:
        response = async_save(
            state,
            storage_writer=self.writer(self.folder / f"step-{step}"),
            async_checkpointer_type=self.kind,
            **self.options(),
        )
        if isinstance(response, AsyncSaveResponse):
            self._future, self._staged = response.upload_completion, response.staging_completion
        else:
            self._future = response

    def writer(self, path: Path) -> Any:
        return FileSystemWriter(path, thread_count=THREADS)

    def done(self) -> bool:
        return bool(self._future.done())

    def wait(self) -> None:
        self._future.result()


class InProcess(Asynchronous):
    kind = AsyncCheckpointerType.PROCESS


class KeptStager(Asynchronous):
    """Mode that saves by dcp.async_save, with a stager (torch's object that copies the state) that is used again for
    each save, with its memory. By default each save has a new one."""

    shared, meanwhile = False, False

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=self.shared,
                use_async_staging=self.meanwhile,
                use_non_blocking_copy=False,
            )
        )

    def options(self) -> dict[str, Any]:
        return {"async_stager": self._stager}

    def close(self) -> None:
        self._stager.close()


class SharedStager(KeptStager):
    """Mode that saves by dcp.async_save, and copies the state to shared memory, from which the saving process writes.
    By default the state is copied once more, to that process."""

    kind = AsyncCheckpointerType.PROCESS
    shared = True


class StagedMeanwhile(SharedStager):
    """Mode that saves by dcp.async_save, and copies the state in a thread while the loop continues. The loop waits for
    the copy only before it changes the saved tensors. torch's documentation says that this needs CUDA; it works
    without."""

    meanwhile = True

    def settle(self) -> None:
        if self._staged is not None:
            self._staged.result()
            self._staged = None


class Penstock(Mode):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._checkpointer = AsyncCheckpointer(folder, threads=THREADS)

    def save(self, step: int, state: dict[str, Any]) -> None:
        self._checkpointer.save(step, state)

    def done(self) -> bool:
        return self._checkpointer.progress.step is None

    def wait(self) -> None:
        self._checkpointer.wait()

    def close(self) -> None:
        self._checkpointer.close()


MODES: dict[str, type[Mode]] = {
    "dcp.save": Plain,
    "dcp.async_save, thread": Asynchronous,
    "thread, kept stager": KeptStager,
    "dcp.async_save, process": InProcess,
    "process, shared stager": SharedStager,
    "process, staged meanwhile": StagedMeanwhile,
    "Penstock": Penstock,
}


def make_state(nbytes: int) -> dict[str, Any]:
    """Return a state to save: a model and the state of its optimizer, of `nbytes` bytes of float32 tensors, and a few
    objects."""
    shares = [1 if number % 4 else 16 for number in range(TENSORS)]
    tensors = [torch.randn(nbytes // 4 * share // sum(shares) + 1) for share in shares]
    third = TENSORS // 3
    return {
        "model": {f"layer.{number}.weight": tensor for number, tensor in enumerate(tensors[:third])},
        "optimizer": {
            "state": {
                f"layer.{number}.weight": {
                    "exp_avg": tensors[third + number],
                    "exp_avg_sq": tensors[2 * third + number],
                    "step": torch.tensor(1.0),
                }
                for number in range(third)
            },
            "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}],
        },
    }


class Loop:
    """Training loop of a benchmark, of which each step is timed."""

    def __init__(self, state: dict[str, Any], step_s: float) -> None:
        self._tensors = list(state["model"].values())
        self._left, self._right = torch.randn(768, 768), torch.randn(768, 768)
        self._products = 1
        took = min(self._timed() for _ in range(5))
        self._products = max(1, round(step_s / took))

    def _timed(self) -> float:
        began = time.perf_counter()
        for _ in range(self._products):
            torch.mm(self._left, self._right)
        return time.perf_counter() - began

    def step(self, mode: Mode) -> tuple[float, float]:
        """Make one step. Return its seconds without waiting, and the seconds for which it waited until `mode` had
        copied the state."""
        products = self._timed()
        began = time.perf_counter()
        mode.settle()
        settled = time.perf_counter()
        torch._foreach_mul_(self._tensors[:4], 1.0)
        return products + time.perf_counter() - settled, settled - began


def measure(mode: Mode, state: dict[str, Any], loop: Loop, saves: int, nbytes: int) -> list[dict[str, float]]:
    found = []
    for number in range(saves + 1):
        for path in mode.folder.glob("step-*"):
            shutil.rmtree(path)
        os.sync()
        usual = statistics.median(loop.step(mode)[0] for _ in range(15))
        began = time.perf_counter()
        mode.save(number, state)
        stall = time.perf_counter() - began
        excess, steps = 0.0, 0
        while not mode.done():
            took, waited = loop.step(mode)
            excess, stall, steps = excess + took - usual, stall + waited, steps + 1
        mode.wait()
        total = time.perf_counter() - began
        if number:  # the first save allocates memory for the others
            found.append({"stall": stall, "excess": excess, "total": total, "usual": usual, "steps": steps})
        else:
            first = stall
    size = sum(file.stat().st_size for file in mode.folder.glob("step-*/*.distcp"))
    assert size > nbytes, f"{size} bytes on the disk, of {nbytes}"
    return [{**one, "first": first} for one in found]


def floor(folder: Path, saves: int, nbytes: int) -> list[dict[str, float]]:
    """Measure the floor, the least that any mode must do: copy `nbytes` bytes to memory that has been used before, and
    write them to the disk past the page cache. Return the measurements of each save."""
    source = torch.randn(nbytes // 4).view(torch.uint8)
    memory = mmap.mmap(-1, nbytes)
    target = torch.frombuffer(memory, dtype=torch.uint8)
    target.copy_(source)  # the pages are faulted in from now on
    share = nbytes // THREADS
    paths = [folder / str(number) for number in range(THREADS)]
    found = []
    for _ in range(saves):
        began = time.perf_counter()
        target.copy_(source)
        copied = time.perf_counter() - began
        os.sync()
        began = time.perf_counter()
        with ThreadPoolExecutor(THREADS) as pool:
            parts = [memoryview(memory)[number * share : (number + 1) * share] for number in range(THREADS)]
            direct = list(pool.map(write, paths, parts))
        found.append({"copy": copied, "write": time.perf_counter() - began, "direct": float(all(direct))})
        for path in paths:
            path.unlink()
    return found


def write(path: Path, data: memoryview) -> bool:
    """Write and sync a file. Return True if it was written past the page cache, False if the file system has no
    O_DIRECT."""
    flags, direct = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, True
    try:
        handle = os.open(path, flags | os.O_DIRECT, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        handle, direct = os.open(path, flags, 0o666), False
    try:
        while data:
            data = data[os.write(handle, data[:CHUNK]) :]
        os.fsync(handle)
    finally:
        os.close(handle)
    return direct


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=[*MODES, "floor"], required=True)
    parser.add_argument("--mib", type=int, required=True)
    parser.add_argument("--saves", type=int, required=True)
    parser.add_argument("--step-ms", type=float, default=50.0)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--go", type=Path, help="wait for this file before the first save, and report readiness")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        if given.mode == "floor":
            print("ready", flush=True)
            print(json.dumps(floor(Path(folder), given.saves, given.mib << 20)), flush=True)
            return
        store = dist.FileStore(f"{folder}/store", 1)  # type: ignore[attr-defined]
        os.environ.update(MASTER_ADDR="127.0.0.1", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        state = make_state(given.mib << 20)
        loop = Loop(state, given.step_ms / 1e3)
        print("ready", flush=True)
        while given.go is not None and not given.go.exists():
            time.sleep(0.01)
        saves = Path(folder) / "saves"
        saves.mkdir()
        mode = MODES[given.mode](saves)
        found = measure(mode, state, loop, given.saves, given.mib << 20)
        print(json.dumps(found), flush=True)
        mode.close()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
