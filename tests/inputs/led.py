"""What ranks of one model do: the first reads, and all compare what they got."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from penstock.client.integrations.batch_relay import Relay, relayed
from penstock.client.integrations.rank_groups import RankGroups


def batches() -> Iterator[Any]:
    for number in range(3):
        rows = torch.arange(number * 7, dtype=torch.int64).reshape(number, 7)  # the first batch has none
        yield {"input": rows, "half": rows.to(torch.bfloat16)}, rows * 2
    yield {"input": torch.ones(2)}, "another structure"


def failing() -> Iterator[Any]:
    yield torch.ones(1)
    raise ValueError("the data end here")


def _stream(make: Any) -> Iterator[Any]:
    rank = dist.get_rank()
    ranks = RankGroups.of_boxes(rank, [0] * dist.get_world_size())
    return relayed(make() if ranks.reads else None, Relay(ranks, "all", 30.0), rank)


def read() -> list[str]:
    return [repr(batch) for batch in _stream(batches)]


def fail() -> list[str]:
    said = []
    try:
        for batch in _stream(failing):
            said.append(repr(batch))
    except Exception as error:
        said.append(f"{type(error).__name__}: {error}")
    return said
