"""Loaders of other libraries, as their documentation builds them. Workers of tests/loaders import them by name.

Each function is an `input_fn`. Every worker has rows of its own, `ROWS` in an epoch, in batches of four. A batch holds
the numbers of its rows, so that a row that is lost or comes twice is seen. "noisy" ones draw random numbers besides.
"""

from __future__ import annotations

import importlib.util
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    Dataset,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from penstock.proto.state.assignment import Assignment, assigned
from penstock.worker import current_assignment

BATCHES = 12
"""Number of batches of a worker in an epoch, for most loaders here."""
ROWS = 4 * BATCHES


def first_row() -> int:
    """Number of this worker's first row."""
    return 1000 * current_assignment().global_worker_id


class Rows(Dataset[dict[str, Any]]):
    """Map-style: row i is its number, and a random one beside it if `noisy`."""

    def __init__(self, noisy: bool = False, rows: int = ROWS) -> None:
        self.first = first_row()
        self.noisy = noisy
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        noise = random.random() + float(np.random.rand()) + float(torch.rand(())) if self.noisy else 0.0
        return {"row": self.first + int(index), "noise": noise}


class Stream(IterableDataset[dict[str, Any]]):
    """Iterable, without a state; worker processes of the loader share the rows out."""

    def __init__(self, noisy: bool = False) -> None:
        self.first = first_row()
        self.noisy = noisy

    def _numbers(self) -> range:
        import torch.utils.data._utils.worker as torch_worker

        info = torch_worker._worker_info  # its own processes: those of Penstock have `first_row`
        return range(ROWS) if info is None else range(info.id, ROWS, info.num_workers)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number in self._numbers():
            yield {"row": self.first + number, "noise": random.random() if self.noisy else 0.0}


class SavedStream(Stream):
    """The same, with a state of its own, as torchdata's documentation shows it."""

    def __init__(self, noisy: bool = False) -> None:
        super().__init__(noisy)
        self.done = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        numbers = self._numbers()
        while self.done < len(numbers):
            number = numbers[self.done]
            self.done += 1
            yield {"row": self.first + number, "noise": random.random() if self.noisy else 0.0}
        self.done = 0

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done = state["done"]


class ShuffledStream(Stream):
    """The rows in another order in each epoch, of a generator that the dataset holds and no state has."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = random.Random(5)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        numbers = list(self._numbers())
        self.generator.shuffle(numbers)
        for number in numbers:
            yield {"row": self.first + number, "noise": 0.0}


def _folder(name: str) -> Path:
    return Path(tempfile.gettempdir()) / f"penstock-third-party-{os.getuid()}" / name


def _finish(partial: Path, folder: Path) -> None:
    """Give the written folder its final name."""
    try:
        partial.rename(folder)
    except OSError:  # another runner was first
        shutil.rmtree(partial)


# ---- torchdata


def _stateful(dataset: Any, workers: int, **options: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(dataset, **{"batch_size": 4, **options}, num_workers=workers)


def shuffled(workers: int = 0, noisy: bool = False) -> Any:
    return _stateful(Rows(noisy), workers, shuffle=True)


def random_sampler(workers: int = 0, own: bool = False) -> Any:
    rows = Rows()
    return _stateful(rows, workers, sampler=RandomSampler(rows, generator=_generator(own)))


def weighted_sampler(workers: int = 0, own: bool = False) -> Any:
    rows = Rows()
    weights = [1.0 + number % 5 for number in range(len(rows))]
    return _stateful(rows, workers, sampler=WeightedRandomSampler(weights, ROWS, generator=_generator(own)))


def distributed_sampler(workers: int = 0) -> Any:
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    rows = Rows()
    return _stateful(rows, workers, sampler=StatefulDistributedSampler(rows, num_replicas=1, rank=0, seed=3))


def _generator(own: bool) -> torch.Generator | None:
    return torch.Generator().manual_seed(11) if own else None


def stream(workers: int = 0, noisy: bool = False) -> Any:
    return _stateful(Stream(noisy), workers)


def saved_stream(workers: int = 0, noisy: bool = False) -> Any:
    return _stateful(SavedStream(noisy), workers)


def shuffled_stream(workers: int = 0) -> Any:
    return _stateful(ShuffledStream(), workers)


def rare_snapshots(workers: int = 2) -> Any:
    return _stateful(Rows(), workers, shuffle=True, snapshot_every_n_steps=5)


def prefetched_out_of_order(workers: int = 2) -> Any:
    return _stateful(SavedStream(), workers, prefetch_factor=3)


def _nodes(make: Callable[[Any], Any], restart: bool = True) -> Any:
    from torchdata import nodes

    return nodes.Loader(nodes.Mapper(nodes.Batcher(make(nodes), 4, drop_last=False), _collate), restart)


def _collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {key: torch.tensor([row[key] for row in rows]) for key in rows[0]}


def nodes_random() -> Any:
    rows = Rows()
    return _nodes(lambda nodes: nodes.MapStyleWrapper(rows, RandomSampler(rows)))


def nodes_random_own() -> Any:
    rows = Rows()
    return _nodes(lambda nodes: nodes.MapStyleWrapper(rows, RandomSampler(rows, generator=_generator(True))))


def nodes_saved_iterable() -> Any:
    return _nodes(lambda nodes: nodes.IterableWrapper(SavedStream()))


def nodes_weighted() -> Any:
    def make(nodes: Any) -> Any:
        parts = {"a": nodes.IterableWrapper(range(20)), "b": nodes.IterableWrapper(range(100, 128))}
        mixed = nodes.MultiNodeWeightedSampler(parts, {"a": 0.4, "b": 0.6}, seed=7 + first_row(), rank=0, world_size=1)
        return nodes.Mapper(mixed, _as_row)

    return _nodes(make)


def _as_row(number: int) -> dict[str, Any]:
    return {"row": int(number), "noise": 0.0}


def nodes_parallel() -> Any:
    """Four threads, and a prefetcher before the batches."""
    first = first_row()

    def make(nodes: Any) -> Any:
        mapped = nodes.ParallelMapper(
            nodes.IterableWrapper(range(first, first + ROWS)), _as_row, num_workers=4, in_order=True, method="thread"
        )
        return nodes.Prefetcher(mapped, prefetch_factor=4, snapshot_frequency=3)

    return _nodes(make)


def nodes_no_restart() -> Any:
    """`restart_on_stop_iteration=False`."""
    return _nodes(lambda nodes: nodes.IterableWrapper(SavedStream()), restart=False)


# ---- Hugging Face datasets


def _hf_rows(shards: int = 4) -> Any:
    import datasets

    datasets.disable_progress_bars()
    first = first_row()
    return datasets.Dataset.from_dict({"row": list(range(first, first + 2 * ROWS))}).with_format("torch")


def hf_map(workers: int = 0) -> Any:
    return _stateful(_hf_rows().filter(_keeps, keep_in_memory=True, load_from_cache_file=False), workers, shuffle=True)


def _keeps(example: dict[str, Any]) -> bool:
    return int(example["row"]) % 2 == 0


def _hf_stream() -> Any:
    import datasets

    first = first_row()

    def part(starts: list[int]) -> Iterator[dict[str, int]]:
        for start in starts:
            for number in range(start, start + ROWS // 2):
                yield {"row": number}

    starts = [first + ROWS // 2 * number for number in range(4)]
    return datasets.IterableDataset.from_generator(part, gen_kwargs={"starts": starts}).with_format("torch")


def hf_iterable_shuffled() -> Any:
    return _hf_stream().shuffle(seed=3, buffer_size=10).filter(_keeps).batch(4)


def hf_iterable_stateful(workers: int = 0, shuffle: bool = False) -> Any:
    dataset = _hf_stream().filter(_keeps)
    return _stateful(dataset.shuffle(seed=3, buffer_size=10) if shuffle else dataset, workers)


# ---- webdataset


def _tars() -> list[str]:
    """Four archives of this worker, written once."""
    import webdataset

    first = first_row()
    folder = _folder(f"tars-{first}")
    paths = [folder / f"{number}.tar" for number in range(4)]
    if not folder.exists():
        partial = folder.with_name(f"{folder.name}.{os.getpid()}")
        partial.mkdir(parents=True)
        for number, path in enumerate(paths):
            with webdataset.TarWriter(str(partial / path.name)) as writer:
                for row in range(first + number * ROWS // 4, first + (number + 1) * ROWS // 4):
                    writer.write({"__key__": f"{row:06}", "row.cls": row})
        _finish(partial, folder)
    return [str(path) for path in paths]


def webdataset_shuffled() -> Any:
    """Shards and samples shuffled; with seeds, for without them it draws from the clock."""
    import webdataset

    return (
        webdataset.WebDataset(_tars(), shardshuffle=4, detshuffle=True, seed=5, nodesplitter=None, workersplitter=None)
        .compose(webdataset.detshuffle(10, seed=3))
        .decode()
        .to_tuple("row.cls")
        .batched(4)
        .map(_rows_of)
    )


def webdataset_loader(workers: int = 0) -> Any:
    import webdataset

    dataset = webdataset.WebDataset(_tars(), shardshuffle=False, nodesplitter=None, workersplitter=_split)
    return webdataset.WebLoader(
        dataset.decode().to_tuple("row.cls").batched(4).map(_rows_of), batch_size=None, num_workers=workers
    )


def _split(sources: Iterator[Any]) -> Iterator[Any]:
    import torch.utils.data._utils.worker as torch_worker

    info = torch_worker._worker_info
    for number, source in enumerate(sources):
        if info is None or number % info.num_workers == info.id:
            yield source


def _rows_of(batch: Any) -> dict[str, Any]:
    return {"row": torch.as_tensor(np.asarray(batch[0]))}


# ---- Grain


class _GrainRows:
    def __init__(self) -> None:
        self.first = first_row()

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"row": np.int64(self.first + index)}


def grain_loader(workers: int = 0) -> Any:
    import grain.python as grain

    source = _GrainRows()
    sampler = grain.IndexSampler(len(source), grain.NoSharding(), shuffle=True, num_epochs=1, seed=3)
    return grain.DataLoader(data_source=source, sampler=sampler, operations=[grain.Batch(4)], worker_count=workers)


def grain_dataset() -> Any:
    import grain.python as grain

    return grain.MapDataset.source(_GrainRows()).seed(5).shuffle().batch(4).to_iter_dataset()


class _GrainSaved:
    """Grain's iterators have `get_state` and `set_state`: given the names that a loader's methods have here."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.iterator: Any = None
        self.state: Any = None

    def __iter__(self) -> Iterator[Any]:
        self.iterator = iter(self.dataset)
        if self.state is not None:
            self.iterator.set_state(self.state)
            self.state = None
        return iter(self.iterator)

    def state_dict(self) -> dict[str, Any]:
        if self.iterator is None:
            return {}
        state = self.iterator.get_state()
        return {"bytes": state} if isinstance(state, bytes) else {"plain": state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state.get("bytes", state.get("plain"))


def grain_saved() -> Any:
    return _GrainSaved(grain_dataset())


def grain_loader_saved() -> Any:
    return _GrainSaved(grain_loader())


# ---- litData


def _litdata_folder() -> str:
    """A dataset of this worker's rows, written once, and not in a worker: its writer waits for those of the others."""
    from litdata.streaming.writer import BinaryWriter

    first = first_row()
    folder = _folder(f"litdata-{first}")
    if not folder.exists():
        partial = folder.with_name(f"{folder.name}.{os.getpid()}")
        partial.mkdir(parents=True)
        writer = BinaryWriter(str(partial), chunk_size=16)
        for number in range(ROWS):
            writer[number] = {"row": first + number}
        writer.done()
        writer.merge()
        _finish(partial, folder)
    return str(folder)


def litdata_loader(workers: int = 0, shuffle: bool = True) -> Any:
    import litdata

    dataset = litdata.StreamingDataset(_litdata_folder(), shuffle=shuffle, seed=3)
    return litdata.StreamingDataLoader(dataset, batch_size=4, num_workers=workers)


# ---- loaders with the habits of some of them


class BeginsWhereItWas:
    """Two methods: once it was loaded, every later epoch begins there again, too, as Hugging Face's IterableDataset
    has it. Saved and loaded only in a process that is no worker of torch's, as litData's StreamingDataLoader."""

    def __init__(self) -> None:
        self.first = first_row()
        self.start = self.done = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for at in range(self.start, ROWS, 4):
            self.done = at + 4
            yield {"row": torch.arange(at, at + 4) + self.first}

    def state_dict(self) -> dict[str, Any]:
        assert get_worker_info() is None
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert get_worker_info() is None
        self.start = self.done = state["done"]


def begins_where_it_was() -> Any:
    return BeginsWhereItWas()


class RaisesOnceRestored:
    """Two methods: what was loaded cannot be saved and loaded again, nor begun again in the next epoch: the loader
    raises then, at the first batch, as Hugging Face's shuffled IterableDataset does."""

    def __init__(self) -> None:
        self.first = first_row()
        self.done = self.loads = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for at in range(self.done, ROWS, 4):
            if self.loads > 1:
                raise IndexError("list index out of range")
            self.done = at + 4
            yield {"row": torch.arange(at, at + 4) + self.first}
        self.done = 0
        self.loads *= 2

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done, "loads": self.loads}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done, self.loads = state["done"], state["loads"] + 1


def raises_once_restored() -> Any:
    return RaisesOnceRestored()


def prepare() -> None:
    """Write the data that several processes read; in one that is no worker, for some writers ask."""
    if importlib.util.find_spec("litdata") is None:
        return
    for slot in range(2):
        with assigned(Assignment(0, 1, slot, 2, 7, 1)):
            _litdata_folder()
