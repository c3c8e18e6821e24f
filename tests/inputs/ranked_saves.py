"""Functions that ranks of a training job run with checkpoints, for tests: started by tests/support/ranked.py, one for
each rank."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from quantised import Rows8
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from penstock.client.checkpoint import AsyncCheckpointer
from penstock.proto.errors import CheckpointNotFoundError

__all__ = [
    "agreed",
    "contradictions",
    "ddp_restore",
    "ddp_save",
    "different",
    "fsdp_restore",
    "fsdp_save",
    "in_flight",
    "lost_verdict",
    "one_cannot_collect",
    "one_cannot_load",
    "other_calls",
    "outside",
    "preempted",
    "quantised_restore",
    "quantised_save",
    "surrounded",
    "torch_fsdp_save",
]


def model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 7, bias=False))


def train(network: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    for _ in range(3):
        optimizer.zero_grad()
        network(torch.randn(4, 12)).square().sum().backward()
        optimizer.step()


def whole(tensor: Any) -> list[float]:
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return [float(value) for value in tensor.detach().flatten()]


def described(network: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All values of both, by names that are the same on any number of ranks."""
    plain = getattr(network, "module", network)
    names = {id(parameter): name for name, parameter in plain.named_parameters()}
    found: dict[str, Any] = {name: whole(parameter) for name, parameter in plain.named_parameters()}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            found[f"{names[id(parameter)]}/{key}"] = whole(value)
    found["lr"] = optimizer.param_groups[0]["lr"]
    return found


def ddp_save(folder: str) -> dict[str, Any]:
    network = DistributedDataParallel(model(1))
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.25)
    train(network, optimizer, 1)
    with AsyncCheckpointer(folder) as checkpointer:
        checkpointer.save(3, {"model": network, "optimizer": optimizer, "extra": {"note": "x", "of": {}}})
    return described(network, optimizer)


def ddp_restore(folder: str) -> dict[str, Any]:
    network = DistributedDataParallel(model(2))
    optimizer = torch.optim.AdamW(network.parameters())
    extra: dict[str, Any] = {"note": None, "of": None}
    with AsyncCheckpointer(folder) as checkpointer:
        step = checkpointer.restore({"model": network, "optimizer": optimizer, "extra": extra})
    assert (step, extra) == (3, {"note": "x", "of": {}})
    found = described(network, optimizer)
    train(network, optimizer, 9)  # it can be gone on with
    return found


def agreed(folder: str) -> list[int | None]:
    """The newest step, before the first save, and right after a save of step 5 and one of step 3."""
    with AsyncCheckpointer(folder) as checkpointer:
        found = [checkpointer.newest()]
        for step in (5, 3):
            checkpointer.save(step, {"value": torch.ones(step)})
            found.append(checkpointer.newest())
    return found


def fsdp_save(folder: str) -> dict[str, Any]:
    network = model(1)
    fully_shard(network)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.25)
    train(network, optimizer, 1)
    with AsyncCheckpointer(folder, separation_hint="optimizer") as checkpointer:
        for step in (3, 4):  # the second one by the plan of the first
            checkpointer.save(step, {"model": network, "optimizer": optimizer})
    return described(network, optimizer)


def surrounded(environment: dict[str, str], function: str, *arguments: Any) -> Any:
    """Run another function of this module with these environment variables."""
    with mock.patch.dict(os.environ, environment):
        return globals()[function](*arguments)


def torch_fsdp_save(folder: str) -> dict[str, Any]:
    """A checkpoint of dcp.save as step 4. A restore names it on all ranks, and begins nothing anew."""
    network = model(1)
    fully_shard(network)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.25)
    train(network, optimizer, 1)
    weights, moments = get_state_dict(network, optimizer)
    save({"model": weights, "optimizer": moments}, checkpoint_id=f"{folder}/step-4")
    with AsyncCheckpointer(folder) as checkpointer:
        for call in (checkpointer.newest, lambda: checkpointer.restore({"model": network})):
            with pytest.raises(CheckpointNotFoundError, match=f"{folder}/step-4. Pass step=4"):
                call()
    return described(network, optimizer)


def fsdp_restore(folder: str, step: int | None = None) -> dict[str, Any]:
    network = model(2)
    fully_shard(network)
    optimizer = torch.optim.Adam(network.parameters())
    with AsyncCheckpointer(folder) as checkpointer, warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* without checksums", UserWarning)
        assert checkpointer.restore({"model": network, "optimizer": optimizer}, step) == 4
    return described(network, optimizer)


def quantised(seed: int) -> DTensor:
    """A quantised tensor of 8 rows, split over the ranks."""
    values = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = values.tensor_split(dist.get_world_size())[dist.get_rank()]
    return DTensor.from_local(Rows8.of(rows), mesh, [Shard(0)], run_check=False, shape=values.shape, stride=(16, 1))


def quantised_save(folder: str) -> list[Any]:
    tensor = quantised(1)
    with AsyncCheckpointer(folder) as checkpointer:
        checkpointer.save(1, {"x": {"q": tensor}})
    return rows_of(tensor)


def quantised_restore(folder: str) -> list[Any]:
    state = {"x": {"q": quantised(2)}}
    with AsyncCheckpointer(folder) as checkpointer:
        assert checkpointer.restore(state) == 1
    return rows_of(state["x"]["q"])


def rows_of(tensor: DTensor) -> list[Any]:
    local = tensor.to_local()
    assert isinstance(local, Rows8)
    return [local.codes.tolist(), local.scale.tolist()]


def different(folder: str, what: str) -> list[str]:
    """Something that is not the same on the ranks."""
    rank = dist.get_rank()
    state: dict[str, Any] = {"same": torch.arange(5), "number": 1}
    step = 5
    if what == "object":
        state["number"] = rank
    elif what == "tensor":
        state["same"] = torch.arange(5) + rank
    elif what == "shape":
        state["same"] = torch.arange(5 + rank)
    elif what == "step":
        step += rank
    with AsyncCheckpointer(folder, timeout_s=30) as checkpointer, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checkpointer.save(step, state)
        checkpointer.save(step, state)
        checkpointer.wait()
    return [str(one.message) for one in caught]


def contradictions(folder: str) -> list[str]:
    """Errors of saves that cannot be meant, one after another."""
    return [said for what in ("object", "shape", "step") for said in trying(partial(different, folder, what))]


class Refuses:
    """A state that cannot be had, or not twice."""

    def __init__(self, states: int = 0) -> None:
        self.states = states

    def state_dict(self) -> dict[str, Any]:
        if not self.states:
            raise OSError("the state is out")
        self.states -= 1
        return {"a": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise OSError("it does not go in")


def one_cannot_collect(folder: str, which: int) -> list[str]:
    """Save a state that raises on one rank; the next save succeeds on all."""
    said = []
    good: dict[str, Any] = {"x": torch.ones(3)}
    with AsyncCheckpointer(folder, timeout_s=30) as checkpointer:
        checkpointer.save(1, good)
        try:
            checkpointer.save(2, {**good, "bad": Refuses()} if dist.get_rank() == which else good)
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
        checkpointer.save(3, good)
        checkpointer.wait()
        said.append(str(checkpointer.latest()))
    return said


def trying(act: Callable[[], Any]) -> list[str]:
    """Return the error that `act` raised, as text."""
    try:
        act()
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]
    return []


def in_flight(folder: str, on_exit: str, end: str, room: str) -> None:
    """A save that a stopped writer holds; then, when the test says so, an end that no code of ours sees."""
    checkpointer = AsyncCheckpointer(folder, on_exit=on_exit)  # type: ignore[arg-type]
    checkpointer.save(1, {"x": torch.ones(1000)})
    checkpointer.wait()
    pid = checkpointer._writer.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    checkpointer.save(2, {"x": torch.full((1000,), 2.0)})
    Path(room, "pid").write_text(f"{pid} {os.getpid()}\n")
    while not Path(room, "go").exists():
        time.sleep(0.01)
    if end == "exit":
        os._exit(3)
    os.kill(os.getpid(), signal.SIGKILL)


def outside(folder: str) -> list[str]:
    """A checkpointer of a rank that is not in its group; and one that was made too early."""
    rank = dist.get_rank()
    group = dist.new_group([0])
    said = trying(lambda: AsyncCheckpointer(folder, group=group).close())
    with mock.patch.object(dist, "is_initialized", return_value=False):
        early = AsyncCheckpointer(folder)
    said += trying(lambda: early.save(1, {"x": torch.full((3,), rank)}))
    early.close()
    return said


def other_calls(folder: str) -> list[str]:
    with AsyncCheckpointer(folder, timeout_s=60) as checkpointer:
        state = {"x": torch.ones(3)}
        call = checkpointer.restore if dist.get_rank() else partial(checkpointer.save, 1)
        said = trying(lambda: print(call(state)))
        checkpointer.save(3, state)
        checkpointer.wait()
        return said + trying(lambda: print(checkpointer.restore(state, step=3 + dist.get_rank())))


def one_cannot_load(folder: str) -> list[Any]:
    saved: dict[str, Any] = {"x": torch.ones(2), "other": Loads()}
    present = torch.zeros(2)
    with AsyncCheckpointer(folder, timeout_s=60) as checkpointer:
        checkpointer.save(1, saved)
        other = Refuses(2) if dist.get_rank() else Loads()
        said = trying(lambda: print(checkpointer.restore({"x": present, "other": other})))
    return [said[0], present.tolist()]


class Loads:
    def state_dict(self) -> dict[str, Any]:
        return {"a": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def lost_verdict(folder: str) -> list[str]:
    """Rank 0's writer dies with a save, and the next one is made before the other rank's has heard of it."""
    state = {f"x-{dist.get_rank()}": torch.ones(1 << 10)}
    with AsyncCheckpointer(folder, timeout_s=600, buffers=2) as checkpointer:
        checkpointer.save(1, state)
        checkpointer.wait()
        dist.barrier()
        pid = checkpointer._writer.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        checkpointer.save(2, state)
        if dist.get_rank() == 0:
            os.kill(pid, signal.SIGKILL)
            said = trying(checkpointer.wait)
        dist.barrier()
        if dist.get_rank():
            said = []
            os.kill(pid, signal.SIGCONT)
        for step in (3, 4):
            said += trying(lambda step=step: checkpointer.save(step, state))  # type: ignore[misc]
        said += trying(checkpointer.wait)
        dist.barrier()
        said += trying(lambda: checkpointer.save(5, state))  # or here, if a rank has heard of it only now
        checkpointer.save(6, state)
        checkpointer.wait()
        return [*said, str(checkpointer.latest())]


def preempted(folder: str) -> int:
    """Trains until rank 1 gets a signal. Returns the step after which it stopped."""
    with AsyncCheckpointer(folder, on_signal=signal.SIGTERM) as checkpointer:
        for step in range(1000):
            if dist.get_rank() == 1 and step == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            if checkpointer.signalled():
                checkpointer.save(step, {"x": torch.ones(3)})
                return step
    return -1
