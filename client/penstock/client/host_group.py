"""Groups of ranks that exchange tensors in the host's memory over gloo, apart from the groups that torch.distributed
registers.

A group is made without dist.new_group, for two reasons. By default all ranks of the job must call dist.new_group for
every group, so each rank would have to know all groups. With use_local_synchronization only the ranks of the group must
call it, but torch names the group by its ranks alone. Once that group is destroyed, the next group of the same ranks
gets the same name. It then finds the addresses of the destroyed group in the store, and waits for a peer that does not
listen there.
"""

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

__all__ = ["HostGroup", "open_group"]


class HostGroup:
    """Group of ranks of the job. Each rank of the group must make a HostGroup with the same `ranks`, and several with
    the same ranks in the same order.

    The constructor and each method raise RuntimeError if another rank does not take part within `timeout_s`. All ranks
    of a group must pass tensors of the same shape and dtype.

    Args:
        ranks: ranks of the job, in the same order on every rank of the group.
        rank: number of this rank in the job."""

    def __init__(self, ranks: Sequence[int], rank: int, timeout_s: float) -> None:
        made = _made[tuple(ranks)]
        _made[tuple(ranks)] += 1
        digest = hashlib.blake2b(repr(tuple(ranks)).encode(), digest_size=16).hexdigest()
        store = PrefixStore(f"penstock/{digest}/{made}", default_store())
        self._ranks = list(ranks)
        # Any: torch's stubs lack the inherited methods
        self._group: Any = dist.ProcessGroupGloo(store, ranks.index(rank), len(ranks), timedelta(seconds=timeout_s))

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        """Send a tensor to another rank of the group (its number in the job), which must call `receive`."""
        self._group.send([tensor], self._ranks.index(rank), 0).wait()

    def receive(self, tensor: torch.Tensor, rank: int) -> None:
        self._group.recv([tensor], self._ranks.index(rank), 0).wait()

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Copy the tensor of the group's first rank into `tensor` on all other ranks."""
        self._group.broadcast(tensor, root=0).wait()

    def sum(self, tensor: torch.Tensor) -> None:
        """Replace `tensor` on every rank by the elementwise sum of all ranks' tensors."""
        self._group.allreduce(tensor, dist.ReduceOp.SUM).wait()

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors that the ranks of the group pass, in the group's order."""
        gathered = [torch.empty_like(tensor) for _ in self._ranks]
        self._group.allgather([gathered], [tensor]).wait()
        return gathered


_made: Counter[tuple[int, ...]] = Counter()
"""Number of groups that this process has made of these ranks. It is the same on all of them, and makes the names of
several groups of the same ranks differ."""


def open_group(ranks: Sequence[int], rank: int, timeout_s: float) -> HostGroup | None:
    """Return a new HostGroup of these ranks; None for a single rank, which needs no group."""
    return HostGroup(ranks, rank, timeout_s) if len(ranks) > 1 else None
