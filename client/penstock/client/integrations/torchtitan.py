"""torchtitan: a dataloader and a checkpoint manager for its trainer, chosen by its own configuration.

    config.dataloader = PenstockDataLoader.Config(input_fn=input_fn)
    config.checkpoint = PenstockCheckpointManager.Config(enable=True, interval=500)       # or torchtitan's own

A data-parallel rank is a box. The loader's state describes all boxes: all ranks save the same, a checkpoint keeps one
copy, and any number of data-parallel ranks can load it. torchtitan takes a batch only when its loop requests one, and
saves between steps, so the state is that of the step."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import tyro
from torchtitan.components.checkpointer import DATALOADER, MODEL, OPTIMIZER, TRAIN_STATE, AsyncMode, CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.tools import filesystem
from torchtitan.tools.utils import GarbageCollection

from penstock.client.api.appliance import Appliance
from penstock.client.api.appliance_settings import resolve
from penstock.client.api.data_loader import DataLoader
from penstock.client.api.executor import DataExecutor
from penstock.client.checkpoint.checkpointer import AsyncCheckpointer
from penstock.client.host_group import HostGroup
from penstock.client.integrations.batch_relay import Relay, relayed
from penstock.client.integrations.rank_groups import RankGroups
from penstock.proto.errors import CheckpointError, CheckpointNotFoundError, InvalidArgumentError
from penstock.proto.state.checkpoint_files import MANIFEST

__all__ = ["PenstockCheckpointManager", "PenstockDataLoader"]

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]

GRACE_S = 60.0
"""Seconds for which a rank waits for its reader's batch beyond the reader's own deadline."""


class PenstockDataLoader(BaseDataLoader):
    """Dataloader of a torchtitan trainer or validator, with batches that Penstock's workers make.

    In the trainer's configuration::

        config.dataloader = PenstockDataLoader.Config(input_fn=input_fn, dataset_path="/data/corpus", num_workers=4)

    Of the ranks that split a model (tensor, context, pipeline parallelism), the first rank reads, and the others get
    its batches.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        input_fn: Annotated[Callable[..., Any] | None, tyro.conf.Suppress] = None
        """
        Function of a module that the workers can import. Workers call it with dataset_path, tokenizer_path, seq_len and
        global_batch_size (rows of a microbatch over all data-parallel ranks) by name. The loader that the function
        returns yields ({"input": tokens, ...}, labels).
        """

        arguments: Annotated[dict[str, Any], tyro.conf.Suppress] = field(default_factory=dict)
        """Further arguments of input_fn, by name."""

        infinite: bool = True
        """
        True: read epoch after epoch. False: read one epoch, or the rest of the epoch after a resume. If the state was
        saved at the end of an epoch, False reads nothing, or the next epoch if the number of ranks or workers has
        changed (see `rest_only` of DataExecutor).
        """

        num_workers: int | None = None
        """Number of worker processes of each data-parallel rank. None: PENSTOCK_NUM_WORKERS_PER_BOX, else 1."""

        address: str | None = None
        """Address "host:port" of the coordinator. None: PENSTOCK_COORDINATOR, else coordinator and workers are started
        on this machine."""

        seed: int | None = None
        """Seed of the order. None: PENSTOCK_SEED, else a random one; a resumed run keeps its own."""

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: Any,
        seq_len: int,
        local_batch_size: int,
        snapshot_every_n_steps: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Create the dataloader, as torchtitan's trainer does. snapshot_every_n_steps: batches between two checkpoint
        steps, for which the workers prepare states; None: none is announced."""
        if config.input_fn is None:
            raise InvalidArgumentError(
                "PenstockDataLoader.Config: input_fn must be the function that makes the loader, got None"
            )
        self._infinite, self._every = config.infinite, snapshot_every_n_steps
        self._ranks, self._relay = _box(dp_rank, dp_world_size)
        self.loader: DataLoader | None = None
        """None on a rank that gets its batches from another rank."""
        if self._ranks is None or self._ranks.reads:
            self.loader = DataLoader(
                config.input_fn,
                dataset_path=config.dataset_path,
                tokenizer_path=getattr(tokenizer, "tokenizer_path", None),
                seq_len=seq_len,
                global_batch_size=local_batch_size * dp_world_size,
                **config.arguments,
            )
            self._appliance = _appliance(config.address, config.num_workers, dp_rank, dp_world_size, config.seed)
            self.loader.expect(self._appliance)
            # A validator makes a loader for each validation, and the stream of a dropped loader must end.
            weakref.finalize(self, self.loader.close).atexit = False

    def __iter__(self) -> Iterator[Batch]:
        batches = None if self.loader is None else self._read(self.loader)
        if self._relay is None or self._ranks is None:
            assert batches is not None
            return batches
        return relayed(batches, self._relay, self._ranks.rank)

    def _read(self, loader: DataLoader) -> Iterator[Batch]:
        while True:
            executor = DataExecutor(
                loader, checkpoint_steps=self._every, appliance=self._appliance, rest_only=not self._infinite
            )
            for batch in executor:
                yield _checked(batch, loader.name)
            if not self._infinite:
                return

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all data-parallel ranks; {} on a rank that gets its batches from another."""
        return {} if self.loader is None else self.loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.loader is not None:
            self.loader.load_state_dict(state_dict)


def _checked(batch: Any, name: str) -> Batch:
    """Return a batch as the pair that torchtitan takes, ({"input": tokens, ...}, labels)."""
    match batch:
        case ({"input": torch.Tensor()} as inputs, torch.Tensor() as labels):
            return inputs, labels
    raise InvalidArgumentError(
        f'the loader of {name} must yield ({{"input": tokens, ...}}, labels), got a {type(batch).__name__}'
    )


def _appliance(
    address: str | None, num_workers: int | None, dp_rank: int, dp_world_size: int, seed: int | None
) -> Appliance:
    """Return the same appliance until it is closed: trainer and validator share one, whose start takes seconds."""
    key = (address, num_workers, dp_rank, dp_world_size, seed)
    if key not in _appliances or _appliances[key].closed:
        _appliances[key] = Appliance(
            address, num_workers_per_box=num_workers, box=dp_rank, num_boxes=dp_world_size, seed=seed
        )
    return _appliances[key]


_appliances: dict[tuple[Any, ...], Appliance] = {}


@cache
def _box(dp_rank: int, dp_world_size: int) -> tuple[RankGroups | None, Relay | None]:
    """Return this rank's groups and connection; Nones if it is its box's only rank. All ranks call this together."""
    if not dist.is_initialized() or dist.get_world_size() <= dp_world_size:
        return None, None
    rank, timeout_s = dist.get_rank(), resolve().timeout_s + GRACE_S
    job = HostGroup(range(dist.get_world_size()), rank, timeout_s)
    ranks = RankGroups.of_boxes(rank, [int(box) for box in job.gather(torch.tensor(dp_rank))])
    return ranks, Relay(ranks, "all", timeout_s)


class PenstockCheckpointManager(CheckpointManager):
    """Checkpoint manager of torchtitan that uses `AsyncCheckpointer` for checkpoints of the whole training.

    It keeps all settings of torchtitan's own, except async_mode: a save always returns once the state is copied to
    shared memory. torchtitan itself writes safetensors, and the last save if it holds only the model. Checkpoints of
    torchtitan's own manager are read if the folder has none of Penstock's."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        threads: int = 2
        """Number of writing threads of each rank, and of files that they write."""

        buffers: int = 1
        """Number of saves that may be unwritten at a time. 1: a save waits until the previous save is written. 2: a
        save waits only for the save before the previous one, and two copies of the state take twice the memory."""

    def __init__(self, config: Config, *, base_folder: str = "", **components: Any) -> None:
        self._checkpointer: AsyncCheckpointer | None = None
        theirs: Any = config
        super().__init__(replace(theirs, async_mode="disabled"), base_folder=base_folder, **components)
        if not config.enable:
            return
        if filesystem.is_remote(self.folder):
            raise InvalidArgumentError(
                f"PenstockCheckpointManager: folder must be a path, got {self.folder}: use torchtitan's manager there"
            )
        # torchtitan's count of tokens may differ between ranks, and torchtitan itself keeps the count of one rank.
        self._checkpointer = AsyncCheckpointer(
            self.folder,
            keep_last=config.keep_latest_k or None,
            threads=config.threads,
            buffers=config.buffers,
            check_replicas=False,
        )

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        if to_hf or DATALOADER not in state_dict:
            return super().dcp_save(state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf)
        assert self._checkpointer is not None
        self._checkpointer.save(_step_of(checkpoint_id), _saved_parts(state_dict))
        if enable_garbage_collection:
            GarbageCollection.collect("GC collection invoked by checkpointer.")
        return None

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        path = Path(checkpoint_id).absolute()
        checkpointer = self._checkpointer
        assert checkpointer is not None
        if from_hf or path.parent != checkpointer.folder or not (path / MANIFEST).is_file():
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        checkpointer.restore(_saved_parts(state_dict), step=_step_of(checkpoint_id))
        self.states[MODEL].load_state_dict(state_dict)

    def _load(self, step: int = -1) -> bool:
        loaded = super()._load(step)
        if self.load_only or TRAIN_STATE not in self.states:
            return bool(loaded)
        step = self.states[TRAIN_STATE].state_dict()["step"]
        foreign = _foreign(Path(self.folder), step)
        if foreign:  # a save of that step would fail, perhaps much later
            raise CheckpointError(
                f"{self.folder} has {', '.join(foreign)} beyond step {step}, where training begins, which torchtitan's "
                "manager wrote: move these folders to another place"
            )
        return bool(loaded)

    def _find_load_step(self, folder: str = "") -> int:
        """Return the step of the newest checkpoint, the same on all ranks; -1 if there is none."""
        if folder:
            return int(super()._find_load_step(folder))
        assert self._checkpointer is not None
        try:
            newest = self._checkpointer.newest()
        except CheckpointNotFoundError:  # all checkpoints are of torchtitan's own manager
            newest = None
        return int(super()._find_load_step() if newest is None else newest)

    def _save_last_step(self, curr_step: int) -> None:
        super()._save_last_step(curr_step)
        assert self._checkpointer is not None
        self._checkpointer.wait()

    def _should_purge(self) -> bool:
        return False  # AsyncCheckpointer(keep_last=) deletes older checkpoints

    def _close(self) -> None:
        super()._close()
        if self._checkpointer is not None:
            self._checkpointer.close()


class _Container:
    """Adapter for torchtitan's container of optimizers, whose state_dict has named the states already."""

    def __init__(self, container: Any) -> None:
        self.state_dict = container.state_dict
        self.load_state_dict = container.load_state_dict


def _saved_parts(state: dict[str, Any]) -> dict[str, Any]:
    parts = dict(state)
    if OPTIMIZER in parts:
        parts[OPTIMIZER] = _Container(parts[OPTIMIZER])
    if isinstance(ours := parts.get(DATALOADER), PenstockDataLoader):
        del parts[DATALOADER]
        if ours.loader is not None:
            parts[DATALOADER] = ours.loader
    return parts


def _foreign(folder: Path, step: int) -> list[str]:
    """Return the names of the checkpoints of later steps than `step` that Penstock did not write."""
    beyond = {
        int(path.name.removeprefix("step-")): path.name
        for path in folder.glob("step-*")
        if re.fullmatch(r"step-\d+", path.name) and not (path / MANIFEST).is_file()
    }
    return [name for number, name in sorted(beyond.items()) if number > step]


def _step_of(checkpoint_id: str) -> int:
    return int(Path(checkpoint_id).name.removeprefix("step-"))
