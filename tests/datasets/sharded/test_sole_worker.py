"""Streams that would split themselves among workers are whole in each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from splitting import Splitting
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from penstock.data import LogicalShards, MapLoader, Savable, ShardLoader
from penstock.data.sharded.protocol import ShardedSource
from penstock.proto.state.assignment import Assignment, assigned, current_assignment


def ours(shard: int) -> MapLoader:
    return MapLoader(range(100 * shard, 100 * shard + 9), batch_size=1, collate_fn=lambda samples: samples[0])


def asking(shard: int) -> Iterator[int]:
    for number in range(9):
        place = current_assignment()
        assert (place.global_worker_id, place.total_num_workers, place.seed) == (0, 1, 5)
        yield 100 * shard + number


SOURCES: dict[str, Callable[[], ShardedSource]] = {
    "a dataset of torch's": lambda: Savable(lambda shard: Splitting(100 * shard, 9), shards=2),
    "the same as pieces": lambda: LogicalShards([Splitting(0, 9), Splitting(100, 9)], shards=2),
    "a function that opens it": lambda: LogicalShards([lambda: Splitting(0, 9), lambda: Splitting(100, 9)], shards=2),
    "a loader of ours": lambda: Savable(ours, shards=2),
    "asking at each sample": lambda: Savable(asking, shards=2),
}
ALL = [100 * shard + number for number in range(9) for shard in range(2)]


@pytest.mark.parametrize("name", SOURCES)
def test_a_stream_is_whole_in_each_worker(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = []
    for worker in range(3):
        info = torch_worker.WorkerInfo(id=worker, num_workers=3, seed=0, dataset=None)  # type: ignore[arg-type]  # as a runner's
        with assigned(Assignment(0, 1, worker, 3, 5, 1)), monkeypatch.context() as patched:
            patched.setattr(torch_worker, "_worker_info", info)
            streams.append(list(ShardLoader(SOURCES[name](), batch_size=1, collate_fn=list)))
            assert get_worker_info() is info, "it has its place again"
            assert current_assignment().global_worker_id == worker
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
