"""Ranks of a model-parallel job that get the same batches.

The ranks with one data-parallel rank are a box: tp x cp ranks (tensor and context parallelism) in each stage of its
pipeline. A stage's first rank is its *leader*. The first stage's leader is the box's *reader*: it iterates the loader,
and sends the batches to the others.

        pp 0            pp 1                    (tp 2, pp 2, dp 2)
    dp 0   0 1    ->    4 5     box 0: rank 0 reads; rank 4 gets its batches, for stage 1; 1 and 5 get those of 0 and 4
    dp 1   2 3    ->    6 7     box 1: rank 2 reads

Other libraries' groups use the accelerators' network, but batches are in the host's memory, so Penstock opens groups of
its own (host_group.py)."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist

from penstock.proto.errors import InvalidArgumentError

Stages = Literal["ends", "all"]
"""Stages of a pipeline that get batches: "ends" (the first and the last) or "all"."""


@dataclass(frozen=True)
class RankGroups:
    """Position of a rank in a model-parallel job. Numbers of ranks are those of the whole job."""

    rank: int
    box: int
    """Number of the rank's box: its data-parallel rank."""
    stage: int
    num_stages: int
    peers: tuple[int, ...]
    """All ranks of the rank's stage in its box, including itself, in ascending order."""
    leaders: tuple[int, ...] = ()
    """First rank of each stage of the box, in their order. Used on leaders only."""
    readers: tuple[int, ...] = ()
    """Reader of each box, in their order. Used on readers only; elsewhere it may differ."""
    num_boxes: int = 1

    def __post_init__(self) -> None:
        if self.rank not in self.peers:
            raise InvalidArgumentError(f"RankGroups: peers must contain rank {self.rank}, got {self.peers}")
        if self.leads and (self.rank not in self.leaders or len(self.leaders) != self.num_stages):
            raise InvalidArgumentError(
                f"RankGroups: leaders must be the first ranks of all {self.num_stages} stages, got {self.leaders}"
            )
        if self.reads and len(self.readers) != self.num_boxes:
            raise InvalidArgumentError(
                f"RankGroups: readers must be the first rank of each of the {self.num_boxes} boxes, got {self.readers}"
            )

    @property
    def leads(self) -> bool:
        return self.rank == self.peers[0]

    @property
    def reads(self) -> bool:
        return self.leads and self.stage == 0

    def takes(self, stages: Stages, chunk: int, num_chunks: int) -> bool:
        """True if this rank's model chunk number `chunk` of `num_chunks` (virtual pipeline) takes batches. With "ends"
        only the first chunk of the first stage and the last chunk of the last stage do."""
        first = self.stage == 0 and chunk == 0
        last = self.stage == self.num_stages - 1 and chunk == num_chunks - 1
        return stages == "all" or first or last

    def targets(self, stages: Stages) -> tuple[int, ...]:
        """Return the leaders of other stages to which a reader sends its batches."""
        others = self.leaders[1:]
        return others if stages == "all" else others[-1:]

    @classmethod
    def of_boxes(cls, rank: int, boxes: Sequence[int]) -> RankGroups:
        """Return the groups if all ranks of a box request each batch together: one stage. `boxes`: of each rank."""
        ranks: dict[int, list[int]] = {}
        for each, box in enumerate(boxes):
            ranks.setdefault(box, []).append(each)
        peers = tuple(ranks[boxes[rank]])
        readers = tuple(ranks[box][0] for box in sorted(ranks))
        return cls(rank, boxes[rank], 0, 1, peers, peers[:1], readers, len(ranks))

    @classmethod
    def of_megatron(cls) -> RankGroups:
        """Return the groups of this rank, from Megatron-core's parallel_state.

        Raises InvalidArgumentError if initialize_model_parallel was not called."""
        state: Any = importlib.import_module("megatron.core.parallel_state")
        if not state.model_parallel_is_initialized():
            raise InvalidArgumentError(
                "Megatron's parallel state must be initialized: call initialize_model_parallel(...) first"
            )
        peers = _ranks(state.get_tensor_and_context_parallel_group())
        return cls(
            rank=dist.get_rank(),
            box=state.get_data_parallel_rank(),
            stage=state.get_pipeline_model_parallel_rank(),
            num_stages=state.get_pipeline_model_parallel_world_size(),
            peers=peers,
            leaders=_ranks(state.get_pipeline_model_parallel_group()) if dist.get_rank() == peers[0] else (),
            readers=_ranks(state.get_data_parallel_group()),
            num_boxes=state.get_data_parallel_world_size(),
        )


def _ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))
