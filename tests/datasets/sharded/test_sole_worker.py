"""Streams that would split themselves among workers are whole in each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from splitting import Splitting
from torch.utils.data import DataLoader, get_worker_info

from penstock.data import LogicalShards, Savable, ShardLoader
from penstock.data.sharded.protocol import ShardedSource
from penstock.proto.state.assignment import Assignment, assigned, current_assignment, process_assignment
from penstock.proto.v1 import records_pb2
from penstock.worker.loader.worker_info import exchange, offer_worker_info


def asking(shard: int) -> Iterator[int]:
    for number in range(9):
        place = current_assignment()
        assert (place.global_worker_id, place.total_num_workers, place.seed) == (0, 1, 5)
        yield 100 * shard + number


@contextmanager
def answering() -> Iterator[None]:
    """Context in which get_worker_info() answers as in a runner."""
    before = exchange(None)
    offer_worker_info(records_pb2.WorkerAssignment())
    try:
        yield
    finally:
        exchange(before)


SOURCES: dict[str, Callable[[], ShardedSource]] = {
    "a dataset of torch's": lambda: Savable(lambda shard: Splitting(100 * shard, 9), shards=2),
    "the same as pieces": lambda: LogicalShards([Splitting(0, 9), Splitting(100, 9)], shards=2),
    "asking at each sample": lambda: Savable(asking, shards=2),
}
ALL = [100 * shard + number for number in range(9) for shard in range(2)]


@pytest.mark.parametrize("name", SOURCES)
def test_a_stream_is_whole_in_each_worker(name: str) -> None:
    streams = []
    for worker in range(3):
        with assigned(Assignment(0, 1, worker, 3, 5, 1)), answering():
            streams.append(list(ShardLoader(SOURCES[name](), batch_size=1, collate_fn=list)))
            info = get_worker_info()
            assert info is not None
            assert info.id == process_assignment().slot == worker, "it has its place again"
    dealt = [streams[step % 3][step // 3] for step in range(18)]
    assert [number for batch in dealt for number in batch] == ALL


def test_in_worker_processes_of_a_torch_loader() -> None:
    loader = ShardLoader(SOURCES["a dataset of torch's"](), batch_size=2, collate_fn=torch.tensor)
    batches = DataLoader(loader, batch_size=None, num_workers=2)
    assert torch.cat(list(batches)).tolist() == ALL


def test_its_place_comes_back_when_a_stream_fails() -> None:
    def fails(shard: int) -> Iterator[int]:
        raise OSError("gone")
        yield 0

    with assigned(Assignment(0, 1, 1, 2, 5, 1)):
        with pytest.raises(OSError, match="gone"):
            next(iter(ShardLoader(Savable(fails, shards=1), batch_size=1)))
        assert current_assignment().slot == 1
