"""What users of other systems pass to their own classes is an error that says where it went, never silence."""

from __future__ import annotations

import inspect
import pickle
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils import data
from torchdata.stateful_dataloader import StatefulDataLoader

from penstock.client import DataExecutor, DataLoader
from penstock.data import MapLoader, Stream, StreamingDataset, StreamingLoader
from penstock.proto.errors import InvalidArgumentError
from penstock.runtime.moved_names import MOVED

STREAMS = "remote local split download_retry download_timeout validate_hash keep_zip"
THEIRS: dict[Any, str] = {  # mosaicml-streaming 0.13, cerebras-pytorch 2.3 to 2.10
    StreamingDataset: f"""{STREAMS} streams epoch_size predownload cache_limit sampling_method sampling_granularity
        partition_algo num_canonical_nodes batch_size shuffle shuffle_algo shuffle_seed shuffle_block_size
        batching_method allow_unsafe_types replication stream_name stream_config""",
    Stream: f"{STREAMS} proportion repeat choose",
    DataExecutor: """dataloader num_steps checkpoint_steps activation_steps cs_config writer profiler_activities
        listeners micro_batch_size""",
}
"""Arguments of classes of the same name."""


@pytest.mark.parametrize("kind", THEIRS, ids=lambda kind: str(kind.__name__))
def test_each_argument_is_taken_or_told(kind: Any) -> None:
    own = inspect.signature(kind).parameters
    for name in THEIRS[kind].split():
        if name in own:
            assert name not in MOVED[kind.__name__].arguments
            continue
        with pytest.raises(TypeError, match=f"^{kind.__name__} has no argument '{name}': [a-z]"):
            kind(**{name: 1})


@pytest.mark.parametrize("owner", [StreamingDataset, StreamingLoader])
def test_remedies_name_arguments_that_there_are(owner: type) -> None:
    loaders = inspect.signature(StreamingLoader).parameters
    for name, remedy in MOVED[owner.__name__].arguments.items():
        for said in re.findall(r"pass (\w+) to StreamingLoader", remedy):
            assert (name if said == "it" else said) in loaders, remedy
        for said in re.findall(r"^pass (\w+)\b(?! to)", remedy):
            assert said in inspect.signature(owner).parameters, remedy


class Own(StreamingDataset):
    def __init__(self, remote: Any, **settings: Any) -> None:
        super().__init__(remote, **settings)
        self.shuffle = False

    @property
    def broken(self) -> int:
        return self.misspelt  # type: ignore[attr-defined, no-any-return]


def test_missing_attributes_and_places(hundred: Any, dataset: StreamingDataset) -> None:
    for told, says in (
        (lambda: dataset.next_epoch, "no attribute 'next_epoch': use set_epoch"),  # type: ignore[attr-defined]
        (lambda: dataset.batch_size, "no attribute 'batch_size': pass it to StreamingLoader"),  # type: ignore[attr-defined]
        (lambda: dataset.state_dict(), "no attribute 'state_dict': use that of the"),  # type: ignore[attr-defined]
        (lambda: dataset.load_state_dict({}), "no attribute 'load_state_dict': use that of the"),  # type: ignore[attr-defined]
        (lambda: DataLoader(list).cached_state, r"no attribute 'cached_state': use state_dict\(\)"),  # type: ignore[attr-defined]
        (lambda: dataset.nothing, "object has no attribute 'nothing'$"),  # type: ignore[attr-defined]
        (lambda: Own(hundred).broken, "object has no attribute 'misspelt'$"),
    ):
        with pytest.raises(AttributeError, match=says):
            told()
    assert not hasattr(dataset, "state_dict")
    assert not isinstance(dataset, Stateful), "a framework would save it"
    assert len(pickle.loads(pickle.dumps(Own(hundred)))) == 100
    assert not Own(hundred).shuffle
    with pytest.raises(TypeError, match="no argument 'shuffle'"):
        Own(hundred, shuffle=True)
    positions: Any = StreamingDataset
    with pytest.raises(TypeError, match="takes 2 arguments by position, got 3: pass split"):
        positions("remote", "local", "train")
    loader: Any = StreamingLoader
    with pytest.raises(TypeError, match="takes 1 arguments by position, got 2: pass batch_size"):
        loader(dataset, 32)
    with pytest.raises(TypeError, match="no argument 'num_workers': pass fetch_threads"):
        loader(dataset, batch_size=32, num_workers=8)
    assert DataLoader(dict, cached_state=1).step == 0, "an argument of input_fn"


# ---- torch's DataLoader in one of several ranks


class Shared(data.Sampler[list[int]]):
    """Batches of torch's samplers, divided by a framework."""

    def __init__(self, batches: data.BatchSampler) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return (batch for number, batch in enumerate(self.batches) if number % 2)


def read(loader: Any) -> int:
    return sum(1 for _ in loader)


def unbatched(samples: Any) -> Any:
    return samples


MAKERS: list[tuple[Callable[[Any], Any], int]] = [
    (lambda dataset: data.DataLoader(dataset, 4), 0),
    (lambda dataset: data.DataLoader(dataset, 4, shuffle=True), 0),
    (lambda dataset: data.DataLoader(dataset, batch_size=None), 0),
    (lambda dataset: StatefulDataLoader(dataset, 4), 0),
    (lambda dataset: StatefulDataLoader(dataset, 4, shuffle=True), 0),
    (lambda dataset: data.DataLoader(dataset, 4, num_workers=1, collate_fn=unbatched), 0),
    (lambda dataset: data.DataLoader(dataset, 4, sampler=data.DistributedSampler(dataset, 2, 1)), 13),
    (lambda dataset: data.DataLoader(dataset, 4, sampler=range(len(dataset))), 25),
    (lambda d: data.DataLoader(d, batch_sampler=Shared(data.BatchSampler(data.SequentialSampler(d), 4, False))), 12),
    (lambda dataset: data.DataLoader(data.Subset(dataset, range(8)), 4), 2),
    (lambda dataset: data.DataLoader(StreamingLoader(dataset, batch_size=4), batch_size=None), 13),
    (lambda dataset: MapLoader(dataset, batch_size=4), 13),
]


@pytest.mark.parametrize(("make", "batches"), MAKERS)
def test_no_rank_reads_all_samples_unasked(
    make: Callable[[Any], Any], batches: int, dataset: StreamingDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = read(make(dataset))
    assert alone in (12, 13, 25, 2, 100)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    loader = make(dataset)
    if batches:
        assert read(loader) == batches
    else:
        assert len(loader) == alone
        with pytest.raises(InvalidArgumentError, match=r"each of 2 ranks all samples: use a StreamingLoader"):
            read(loader)
        if type(loader) is data.DataLoader:
            assert DataLoader(loader).step == 0, "Penstock's boxes share what is taken over"
        assert DataLoader(dataset, batch_size=4, shuffle=True).step == 0
