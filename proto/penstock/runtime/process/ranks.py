"""Rank of this process in its job, and when the process was started.

torchrun sets RANK and WORLD_SIZE. Other launchers (torch.multiprocessing.spawn, Lightning's ddp and ddp_spawn) set none
or only WORLD_SIZE, and call init_process_group with a rank: then torch.distributed knows it."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from penstock.proto.errors import InvalidArgumentError

_STARTED_FIELD = 22
"""Number of the field in /proc/self/stat, from 1, with the time of the process's start, in clock ticks since boot."""


def distributed_ranks() -> tuple[int, int] | None:
    """Return this process's rank and the number of ranks by torch.distributed; None where it is not initialised."""
    dist = sys.modules.get("torch.distributed")  # not imported here: coordinators have no torch
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    return dist.get_rank(), dist.get_world_size()


def launched_ranks() -> tuple[int, int] | None:
    """Return this process's rank and the number of ranks, by RANK and WORLD_SIZE or else by torch.distributed; None if
    neither tells. Raises InvalidArgumentError if they disagree, or if there are other ranks and this one's is
    unknown."""
    rank, ranks = os.environ.get("RANK") or None, os.environ.get("WORLD_SIZE") or None
    known = distributed_ranks()
    for value in (rank, ranks):
        if value is not None and not value.isdecimal():
            raise InvalidArgumentError(
                f"RANK and WORLD_SIZE must be whole numbers from 0, got {rank} and {ranks}. Let torchrun set them"
            )
    if rank is not None and ranks is not None:
        if known not in (None, (int(rank), int(ranks))):
            assert known is not None
            raise InvalidArgumentError(
                f"RANK={rank} and WORLD_SIZE={ranks} must be what torch.distributed was initialised with, got rank "
                f"{known[0]} of {known[1]}: correct the variables or the arguments of init_process_group"
            )
        return int(rank), int(ranks)
    if known is None and ranks is not None and int(ranks) > 1:
        raise InvalidArgumentError(
            f"RANK must be set if WORLD_SIZE is, got WORLD_SIZE={ranks} alone: start the ranks with torchrun, make "
            "the first batches after init_process_group (Lightning calls it in Trainer.fit), or pass this rank's number"
        )
    return known


def process_age_s() -> float:
    """Return the seconds since this process was started; 0 where /proc does not tell."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started_s = int(fields[_STARTED_FIELD - 3]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started_s)
