"""torch's DataLoader taken over, by its arguments or whole: the same batches, an exact position, refusals by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from appliances import made
from chains import plain
from torch.utils import data
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import TensorDataset, get_worker_info

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.client.states.saved_state import read
from penstock.client.testing import FakeAppliance
from penstock.proto.errors import InputFnError, InvalidArgumentError

NUMBERS = TensorDataset(torch.arange(10), torch.arange(10.0))


class Texts(data.Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return 7

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"text": str(number), "pair": (number, float(number))}


class Rows(data.IterableDataset[torch.Tensor]):
    """Shards itself as torch asks."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info is not None else (0, 1)
        return (torch.tensor(number) for number in range(first, self.count, step))


class Even(data.Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(0, 10, 2))


def squared(samples: list[Any]) -> torch.Tensor:
    return torch.stack([number**2 for number, _ in samples])


def samples(batches: Iterable[Any]) -> list[int]:
    return [number for batch in batches for number in batch[0]]


def here(**settings: Any) -> Appliance:
    return Appliance(**{"num_workers_per_box": 0, "seed": 7, **settings})


def epoch(loader: DataLoader, **settings: Any) -> list[Any]:
    with here(**settings):
        return [plain(batch) for batch in loader]


@pytest.mark.parametrize(
    ("dataset", "arguments"),
    [
        (NUMBERS, {"batch_size": 4, "drop_last": True, "collate_fn": squared}),
        (Texts(), {"batch_size": None}),
        (list(range(5)), {"batch_size": 3, "num_workers": 2}),
    ],
    ids=["collated", "samples", "processes"],
)
def test_unshuffled_batches_are_those_of_torch(dataset: Any, arguments: dict[str, Any]) -> None:
    expected = [plain(batch) for batch in TorchLoader(dataset, **arguments)]
    assert epoch(DataLoader(dataset, **arguments)) == expected
    assert epoch(DataLoader(TorchLoader(dataset, **arguments))) == expected


def test_shuffled_epochs_have_each_sample_once() -> None:
    with here():
        loader = DataLoader(NUMBERS, batch_size=3, shuffle=True)
        epochs = [samples(map(plain, loader)) for _ in range(2)]
    assert epochs[0] != epochs[1]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(10))


def test_a_generator_gives_the_seed() -> None:
    """Use the generator's seed in place of the run's."""

    def order(seed: int, of_run: int) -> list[Any]:
        generator = torch.Generator().manual_seed(seed)
        return epoch(DataLoader(TorchLoader(NUMBERS, 10, shuffle=True, generator=generator)), seed=of_run)

    assert order(5, of_run=1) == order(5, of_run=2) != order(6, of_run=1)


class Photos(Texts):
    def __getitem__(self, number: int) -> dict[str, Any]:
        raise ValueError(f"photo {number} is black")


def test_people_read_the_name_of_the_dataset() -> None:
    loader = DataLoader(Photos(), batch_size=2, shuffle=True)
    assert repr(loader) == "<DataLoader of Photos, batch_size=2, shuffled, step 0>"
    with (
        here(),
        pytest.raises(InputFnError, match=r"^Photos, batch_size=2, shuffled \(box 0, slot 0\): batch \d raised"),
    ):
        next(iter(loader))
    assert read(DataLoader(Texts(), batch_size=2).state_dict()).label == "Texts, batch_size=2"
    assert repr(DataLoader(lambda: [1])).startswith("<DataLoader of test_people_read_the_name_of_the_dataset.<locals>")


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        (data.RandomSampler(NUMBERS, num_samples=4), None),
        (data.SubsetRandomSampler([1, 5, 7]), [1, 5, 7]),
        (data.DistributedSampler(NUMBERS, num_replicas=1, rank=0), list(range(10))),
    ],
    ids=lambda value: type(value).__name__,
)
def test_torchs_own_samplers_are_taken_over(sampler: Any, expected: list[int] | None) -> None:
    got = samples(epoch(DataLoader(TorchLoader(NUMBERS, 4, sampler=sampler))))
    assert sorted(got) == expected if expected is not None else len(set(got)) == 4


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"sampler": Even()}, "sampler of a torch DataLoader is not supported, got a Even"),
        ({"sampler": data.RandomSampler(NUMBERS, replacement=True)}, "got a RandomSampler"),
        ({"batch_sampler": [[0, 1], [2]]}, "batch_sampler of a torch DataLoader is not supported, got a list"),
    ],
    ids=["own", "replacement", "batches"],
)
def test_an_order_of_the_users_own_is_refused(arguments: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"{name}.*MapLoader"):
        DataLoader(NUMBERS, **arguments)
    with pytest.raises(InvalidArgumentError, match=rf"{name}.*MapLoader"):
        DataLoader(TorchLoader(NUMBERS, **arguments))


def test_other_arguments_are_named() -> None:
    with pytest.raises(InvalidArgumentError, match="in_order of a torch DataLoader is not supported, got False"):
        DataLoader(NUMBERS, in_order=False)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="unexpected keyword argument 'batchsize'"):
        DataLoader(NUMBERS, batchsize=3)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="shuffle"):
        DataLoader(Rows(3), shuffle=True)
    with pytest.raises(ValueError, match="mutually exclusive with shuffle"):
        DataLoader(NUMBERS, shuffle=True, sampler=data.SequentialSampler(NUMBERS))


def test_a_state_resumes_on_other_workers() -> None:
    whole = epoch(DataLoader(NUMBERS, batch_size=2, shuffle=True))
    loader, again = (DataLoader(TorchLoader(NUMBERS, batch_size=2, shuffle=True)) for _ in range(2))
    with here() as first:
        begun = [plain(batch) for batch in DataExecutor(loader, num_steps=2, appliance=first)]
        again.load_state_dict(loader.state_dict())
    with FakeAppliance(num_workers_per_box=3) as second:
        rest = [plain(batch) for batch in DataExecutor(again, appliance=second)]
    assert begun + rest == whole


def test_an_iterable_dataset_resumes_by_replay() -> None:
    def loader() -> DataLoader:
        return DataLoader(TorchLoader(Rows(20), batch_size=3))

    appliance = FakeAppliance(num_workers_per_box=2, seed=7, replay=True)
    whole = [plain(batch) for batch in DataExecutor(loader(), appliance=appliance)]
    saved, again = loader(), loader()
    begun = [plain(batch) for batch in DataExecutor(saved, num_steps=3, appliance=appliance)]
    assert saved.is_restartable
    again.load_state_dict(saved.state_dict())
    assert begun + [plain(batch) for batch in DataExecutor(again, appliance=appliance)] == whole
    assert sorted(chain.from_iterable(whole)) == list(range(20))


def test_workers_elsewhere_are_refused_by_name() -> None:
    loader = DataLoader(NUMBERS)
    error = pytest.raises(InvalidArgumentError, match=r"args\[0\] of input_fn .*cannot be sent to a worker")
    with made("nowhere.invalid:1", token="t", job="j", timeout_s=1) as appliance, error:
        next(iter(DataExecutor(loader, appliance=appliance)))


def doubled(rows: int, *, start: int = 0) -> list[torch.Tensor]:
    return [torch.tensor(2 * row) for row in range(start, rows)]


def test_type_checkers_know_each_form() -> None:
    """mypy reports a suppression as unused where it would pass the call."""
    DataLoader(NUMBERS, batch_size=4, shuffle=True, num_workers=2, persistent_workers=True)
    DataLoader([1, 2, 3], 2, collate_fn=squared)
    DataLoader(TorchLoader(NUMBERS, 4))
    DataLoader(doubled, 3, start=1)
    with pytest.raises(ValueError, match="batch_size"):
        DataLoader(NUMBERS, batch_size="4")  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="unexpected keyword argument 'step'"):
        DataLoader(doubled, 3, step=2)  # type: ignore[call-arg]
