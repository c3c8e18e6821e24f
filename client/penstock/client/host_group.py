"""Groups of ranks for values in the host's memory, on gloo, beside the groups of torch.distributed's own registry.

A group is made without dist.new_group, for two reasons. By default all ranks of the job must call dist.new_group for
every group, so each rank would have to know all groups. With use_local_synchronization, torch names a group by its
ranks alone, and uses the name again once the group is destroyed: the next group of these ranks finds the addresses of
the destroyed group in the store, and waits for a peer that does not listen there.
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
    """Group of ranks of the job. Each rank of the group must make it, and ranks that make several groups of the same
    ranks must make these groups in the same order.

    Every operation, and making the group, raises RuntimeError if another rank does not take part within `timeout_s`.

    Args:
        ranks: ranks of the job, in the same order on every rank of the group.
        rank: number of this rank in the job.
        timeout_s: longest wait for the other ranks, in seconds.
    """

    def __init__(self, ranks: Sequence[int], rank: int, timeout_s: float) -> None:
        made = _made[tuple(ranks)]
        _made[tuple(ranks)] += 1
        digest = hashlib.blake2b(repr(tuple(ranks)).encode(), digest_size=16).hexdigest()
        store = PrefixStore(f"penstock/{digest}/{made}", default_store())
        self._ranks = list(ranks)
        # Any: torch's stubs lack the inherited methods
        self._group: Any = dist.ProcessGroupGloo(store, ranks.index(rank), len(ranks), timedelta(seconds=timeout_s))

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        """Send a tensor to a rank, which must call `receive`."""
        self._group.send([tensor], self._ranks.index(rank), 0).wait()

    def receive(self, tensor: torch.Tensor, rank: int) -> None:
        """Receive a tensor from a rank into `tensor`, which must have the same shape and dtype."""
        self._group.recv([tensor], self._ranks.index(rank), 0).wait()

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Copy the first rank's tensor into `tensor` on all ranks."""
        self._group.broadcast(tensor, root=0).wait()

    def sum(self, tensor: torch.Tensor) -> None:
        """Replace `tensor` on every rank by the sum over all ranks."""
        self._group.allreduce(tensor, dist.ReduceOp.SUM).wait()

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all ranks, in the group's order. All tensors must have the same shape and dtype."""
        found = [torch.empty_like(tensor) for _ in self._ranks]
        self._group.allgather([found], [tensor]).wait()
        return found


_made: Counter[tuple[int, ...]] = Counter()
"""Ranks -> number of groups that this process has made of them, which is the same on all of these ranks."""


def open_group(ranks: Sequence[int], rank: int, timeout_s: float) -> HostGroup | None:
    """Return a new gloo group of these ranks, for values in the host's memory; None for a single rank. `rank`: this
    process's rank. Every rank in `ranks` must make the call; RuntimeError after `timeout_s` if one does not."""
    return HostGroup(ranks, rank, timeout_s) if len(ranks) > 1 else None
