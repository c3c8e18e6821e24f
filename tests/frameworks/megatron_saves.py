"""One of the ranks of a job that saves with Megatron-core or NVRx, and with Penstock's writer in place of theirs.

    PYTHONPATH=RELEASE:RELEASE RANK=0 WORLD_SIZE=2 python megatron_saves.py FOLDER {torch,mcore,nvrx,alone} {True,False}

torch: Megatron-core before 0.17. mcore, nvrx: the asynchronous strategy of newer releases. alone: NVRx without it.
True: with a process that is spawned once; False: with a forked one for each save. They want CUDA, and get the CPU."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from penstock.client.integrations.megatron import FileSystemWriterAsync

# here, so that the spawned process has it, too
torch.cuda.synchronize = lambda *_: None
torch.cuda.set_device = lambda *_: None
torch.cuda.device_count = lambda: 1
torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
if importlib.util.find_spec("triton") is None:  # Megatron-core 0.19 imports its kernels, of which none runs here
    kernels: Any = ModuleType("megatron.core.transformer.moe.ops.paged_stash")
    kernels.GLOBAL_BLOCK_SIZE = kernels.paged_stash_copy_kernel = kernels.paged_stash_pop_kernel = None
    sys.modules[kernels.__name__] = kernels

MEGATRON = "megatron.core.dist_checkpointing"
NVRX = "nvidia_resiliency_ext.checkpointing.async_ckpt"
STEPS = (1, 2, 3, 4)
"""With a cached plan from the third on."""


class Used(FileSystemWriterAsync):
    saves: ClassVar[list[str]] = []

    def finish(self, *arguments: Any) -> None:
        super().finish(*arguments)
        self.saves.append(Path(self.path).name)


def no_room(path: str, mode: str) -> Any:
    raise OSError(28, "no room", path)


def put(*modules: str) -> None:
    for name in modules:
        module: Any = importlib.import_module(name)
        assert inspect.isclass(module.FileSystemWriterAsync)
        module.FileSystemWriterAsync = Used


def scheduler(package: str, *, persistent: bool) -> Any:
    core = importlib.import_module(package)
    without_cuda = "cpu_shm_mode" in inspect.signature(core.AsyncCallsQueue.__init__).parameters
    return core.AsyncCallsQueue(persistent=persistent, **({"cpu_shm_mode": True} if without_cuda else {}))


def values(mark: float) -> dict[str, torch.Tensor]:
    rank = dist.get_rank()
    return {
        "weight": torch.full((4, 8), mark + rank),
        "optimizer.moments": torch.full((4, 1000), mark * 3 + rank, dtype=torch.bfloat16),
        "view": torch.arange(64.0).reshape(8, 8).t()[2:6] * mark + rank,
    }


def saved_by_megatron(folder: Path, strategy: str, *, persistent: bool) -> None:
    checkpoints: Any = importlib.import_module(MEGATRON)
    strategies: Any = importlib.import_module(f"{MEGATRON}.strategies.torch")
    old = strategy == "torch"
    if old:
        put(f"{MEGATRON}.strategies.torch")
    else:
        put(f"{MEGATRON}.strategies.filesystem_async", *([f"{NVRX}.filesystem_async"] * (strategy == "nvrx")))

    def sharded(mark: float) -> dict[str, Any]:
        rank, size = dist.get_rank(), dist.get_world_size()
        of_rank = checkpoints.ShardedTensor.from_rank_offsets
        tensors = {name: of_rank(name, value, (0, rank, size)) for name, value in values(mark).items()}
        seed = checkpoints.ShardedObject("seed", {"seed": mark + rank}, (size,), (rank,))
        return {**tensors, "seed": seed, "iteration": mark}

    options = {"thread_count": 2, "cached_metadata": True, "separation_hint": "optimizer"}
    if "cpu_shm_mode" in inspect.signature(strategies.TorchDistSaveShardedStrategy).parameters:
        options["cpu_shm_mode"] = strategy == "nvrx"
    saver = strategies.TorchDistSaveShardedStrategy("torch_dist", 1, **options)
    named = {} if old else {"async_strategy": strategy}
    package = f"{NVRX}.core" if strategy == "nvrx" else f"{MEGATRON}.strategies.async_utils"
    queue = scheduler(package, persistent=persistent)
    for step in STEPS:
        (folder / str(step)).mkdir(exist_ok=True)
        state = sharded(step)
        queue.schedule_async_request(
            checkpoints.save(state, str(folder / str(step)), saver, async_sharded_save=True, **named)
        )
        for name in values(0):
            state[name].data.zero_()
        if step > 1:  # two saves at once, the first time
            queue.maybe_finalize_async_calls(blocking=True)
    queue.maybe_finalize_async_calls(blocking=True)
    queue.close(abort=persistent)
    (folder / "at once").mkdir(exist_ok=True)
    checkpoints.save(sharded(5), str(folder / "at once"))
    for mark, name in enumerate([*map(str, STEPS), "at once"], 1):
        found = checkpoints.load(sharded(0), str(folder / name))
        assert all(torch.equal(value, found[key]) for key, value in values(mark).items())
        assert found["seed"] == {"seed": mark + dist.get_rank()}
        assert found["iteration"] == mark


def saved_by_nvrx(folder: Path, *, persistent: bool) -> None:
    core: Any = importlib.import_module(f"{NVRX}.core")
    saver: Any = importlib.import_module(f"{NVRX}.state_dict_saver")
    put(f"{NVRX}.filesystem_async")
    queue = scheduler(f"{NVRX}.core", persistent=persistent)
    is_new = "abort" in inspect.signature(core.AsyncCallsQueue.close).parameters
    cache = saver.CheckpointMetadataCache()
    rank = dist.get_rank()

    def own(mark: float) -> dict[str, Any]:
        return {f"{rank}.{name}": value for name, value in values(mark).items()} | {f"{rank}.step": mark}

    def save(queue: Any, step: int, name: str = "", **options: Any) -> None:
        writer, state = Used(folder / (name or str(step)), thread_count=2, separation_hint="0", **options), own(step)
        planned = saver.save_state_dict_async_plan(
            state, writer, None, 0, planner=DefaultSavePlanner(), enable_cache=True, metadata_cache=cache
        )
        function, preload, arguments = writer.get_save_function_and_args()
        finalize = lambda: saver.save_state_dict_async_finalize(*planned)  # noqa: E731
        queue.schedule_async_request(core.AsyncRequest(function, arguments, [finalize], {}, preload))
        state[f"{rank}.weight"].zero_()

    def finalized(queue: Any) -> str:
        """Return the error of what was not saved."""
        try:
            queue.maybe_finalize_async_calls(blocking=True)
        except CheckpointException as error:
            return str(error)
        return ""

    def failing() -> None:
        """On the last rank. NVRx 0.4 raises on rank 0 alone, and has the others wait for it."""
        last = rank == dist.get_world_size() - 1
        save(queue, 5, "failing", **({"open_file": no_room} if last else {}))
        said = finalized(queue)
        assert said
        assert last or re.search(r"rank 1: the process that writes .* failed: OSError: .*no room", said), said
        assert not (folder / "failing" / ".metadata").exists()

    def aborted() -> None:
        """Of two queues, as a restart within the process does; both go on."""
        queues = (queue, scheduler(f"{NVRX}.core", persistent=persistent))
        for each, name in zip(queues, ("aborted", "aborted too"), strict=True):
            save(each, 6, name)
            each.close(abort=True)
            said = finalized(each)
            assert bool(said) != (folder / name / ".metadata").exists()
            assert rank or not said or "left no result: it was killed" in said, said
        for each, step in zip(queues, (3, 4), strict=True):
            save(each, step)
        for each in queues:
            each.maybe_finalize_async_calls(blocking=True)
        queues[1].close()

    for step in STEPS:
        save(queue, step)
        if step > 1:
            queue.maybe_finalize_async_calls(blocking=True)
    queue.maybe_finalize_async_calls(blocking=True)
    if is_new:
        failing()
        aborted()
    queue.close()
    for step in STEPS:
        found = own(0)
        load(found, storage_reader=FileSystemReader(folder / str(step)), no_dist=True)
        assert all(
            torch.equal(torch.as_tensor(value), torch.as_tensor(found[name])) for name, value in own(step).items()
        )


def main() -> None:
    folder, strategy, persistent = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "True"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{folder}/store", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"])
    )
    if strategy == "alone":
        saved_by_nvrx(folder, persistent=persistent)
    else:
        saved_by_megatron(folder, strategy, persistent=persistent)
    (folder / f"saves-{dist.get_rank()}.json").write_text(json.dumps(Used.saves))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
