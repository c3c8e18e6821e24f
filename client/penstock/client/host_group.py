"""Groups of ranks that exchange tensors in the host's memory over gloo, apart from torch.distributed's.

dist.new_group must be called by all ranks of the job. With use_local_synchronization only the group's ranks call it,
but torch names the group by its ranks alone: a later group of the same ranks finds the destroyed one's addresses in the
store, and waits forever."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store as default_store


class HostGroup:
    """Group of ranks of the job. Each makes it with the same `ranks` in the same order; `rank` is its number in the
    job.

    Constructor and methods raise RuntimeError if another rank does not take part within `timeout_s`. Tensors must have
    the same shape and dtype on all ranks."""

    def __init__(self, ranks: Sequence[int], rank: int, timeout_s: float) -> None:
        made = _made[tuple(ranks)]
        _made[tuple(ranks)] += 1
        digest = hashlib.blake2b(repr(tuple(ranks)).encode(), digest_size=16).hexdigest()
        store = PrefixStore(f"penstock/{digest}/{made}", default_store())
        self._ranks = list(ranks)
        # Any: torch's stubs lack the inherited methods
        self._group: Any = dist.ProcessGroupGloo(store, ranks.index(rank), len(ranks), timedelta(seconds=timeout_s))

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        """Send to another rank (number in the job), which must call `receive`."""
        self._group.send([tensor], self._ranks.index(rank), 0).wait()

    def receive(self, tensor: torch.Tensor, rank: int) -> None:
        self._group.recv([tensor], self._ranks.index(rank), 0).wait()

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Copy the first rank's tensor into `tensor` on all others."""
        self._group.broadcast(tensor, root=0).wait()

    def sum(self, tensor: torch.Tensor) -> None:
        """Replace `tensor` on every rank by the elementwise sum."""
        self._group.allreduce(tensor, dist.ReduceOp.SUM).wait()

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        gathered = [torch.empty_like(tensor) for _ in self._ranks]
        self._group.allgather([gathered], [tensor]).wait()
        return gathered


_made: Counter[tuple[int, ...]] = Counter()
"""Groups made of these ranks: equal on all of them, it makes the groups' names differ."""


def open_group(ranks: Sequence[int], rank: int, timeout_s: float) -> HostGroup | None:
    """Return a new group; None for a single rank."""
    return HostGroup(ranks, rank, timeout_s) if len(ranks) > 1 else None
