"""Reading of a MapLoader: ahead in threads, with random generators for each sample, and errors that name
the sample."""

from __future__ import annotations

import random
import threading
import traceback
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from all_workers import AllWorkers
from waiting import until

from penstock.data import MapLoader
from penstock.proto.errors import DatasetError, InvalidArgumentError, StateMismatchError
from penstock.proto.state.generators import capture_rng, seed_rng

AHEAD: list[dict[str, int]] = [{}, {"fetch_threads": 3}]


class Noisy(torch.utils.data.Dataset[Any]):
    """A number and something of each generator; some numbers cannot be read."""

    def __init__(self, length: int = 50, bad: dict[int, Exception] | None = None) -> None:
        self.length, self.bad = length, bad or {}

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, number: int) -> tuple[int, float, float, float]:
        if number in self.bad:
            raise self.bad[number]
        # random.gauss and np.random.normal keep a second number for the next call: it must not come here.
        noise = random.gauss(0, 1), float(np.random.normal()), float(torch.randn(()))
        return number, *noise


def as_it_is(samples: list[Any]) -> list[Any]:
    return samples


def numbers(samples: list[Any]) -> list[int]:
    return [sample[0] for sample in samples]


def loader_of(dataset: Any = None, **changed: Any) -> MapLoader:
    options = {"batch_size": 6, "shuffle": True, "seed": 2, "collate_fn": as_it_is, **changed}
    return MapLoader(Noisy() if dataset is None else dataset, **options)


def test_order_and_state_are_those_of_one_thread() -> None:
    ahead = {"fetch_threads": 3}
    whole = [list(loader) for loader in [loader_of(collate_fn=numbers)] for _ in range(2)]
    loader = loader_of(collate_fn=numbers, **ahead)
    assert [list(loader) for _ in range(2)] == whole
    loader.set_epoch(0)
    stream: Any = iter(loader)
    got = [next(stream) for _ in range(3)]
    state = loader.state_dict()
    assert (state["done"], got) == (3, whole[0][:3]), "what was read ahead does not count"
    stream.skip_batch()
    assert next(stream) == whole[0][4]
    loader.load_state_dict(state)
    assert next(stream, None) is None
    assert list(loader) == whole[0][3:]
    workers = AllWorkers(lambda: loader_of(collate_fn=numbers, **ahead), (1, 2))
    assert workers.take(12) == whole[0] + whole[1][:3]


def test_process_generators_are_restored() -> None:
    seed_rng(5)
    random.gauss(0, 1)
    np.random.normal()
    before = capture_rng()
    loader = loader_of(keys="key")
    loader.restore_sample(next(iter(loader))["key"][0])
    list(loader)
    assert capture_rng() == before
    with pytest.raises(ZeroDivisionError):
        list(loader_of(Noisy(bad={7: ZeroDivisionError()})))
    assert capture_rng() == before


class Meeting(torch.utils.data.Dataset[int]):
    """Each sample is read by as many threads at a time as there are, or not at all."""

    def __init__(self, threads: int) -> None:
        self.barrier = threading.Barrier(threads, timeout=30)

    def __len__(self) -> int:
        return 12

    def __getitem__(self, number: int) -> int:
        self.barrier.wait()
        return number


def test_threads_read_at_the_same_time() -> None:
    assert list(loader_of(Meeting(3), batch_size=1, shuffle=False, collate_fn=as_it_is, fetch_threads=3)) == [
        [number] for number in range(12)
    ]


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("penstock-fetch")]


def test_threads_are_gone_when_a_pass_is() -> None:
    loader = loader_of(collate_fn=as_it_is, fetch_threads=2)
    list(loader)
    until(lambda: not threads(), 10)
    stream = iter(loader)
    next(stream)
    assert len(threads()) == 2
    assert all(thread.daemon for thread in threads()), "a read that hangs does not hold up the end of the process"
    del stream
    until(lambda: not threads(), 10)


@pytest.mark.parametrize("ahead", AHEAD)
def test_an_error_says_which_sample(ahead: dict[str, int]) -> None:
    loader = loader_of(Noisy(bad={7: ValueError("no such pixel")}), **ahead)
    order = [row for batch in loader_of(collate_fn=numbers) for row in batch]
    got: list[Any] = []
    at, stream = order.index(7), iter(loader)
    with pytest.raises(ValueError, match="no such pixel") as caught:
        got.extend(stream)
    assert len(got) == at // 6, "all before it came"
    text = "".join(traceback.format_exception(caught.value))
    assert f"raised by Noisy for sample 7 (epoch 0, position {at})" in text
    assert "in __getitem__" in text
    assert loader.state_dict()["done"] == at // 6
    loader.dataset.bad.clear()
    got.extend(stream)
    assert [row for batch in got for row in numbers(batch)] == order, "it is tried again"


def test_stop_iteration_in_a_sample_is_an_error() -> None:
    with pytest.raises(DatasetError, match=r"StopIteration must not come out of Noisy for sample 7 \(epoch 0"):
        list(loader_of(Noisy(bad={7: StopIteration()})))


def with_a_key(samples: list[Any]) -> dict[str, Any]:
    return {"key": 0} if samples[0][0] == 6 else {"number": numbers(samples)}


def test_batch_that_refuses_keys_is_not_skipped() -> None:
    """Return the same batch at the second try. With a fetcher the second try gave the next batch once, and the state
    said that both were done."""
    loader = loader_of(collate_fn=with_a_key, keys="key", shuffle=False, fetch_threads=3)
    stream = iter(loader)
    assert next(stream)["number"] == list(range(6))
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match="a field name that the batch does not have yet"):
            next(stream)
        assert loader.state_dict()["done"] == 1


class Many(Noisy):
    def __init__(self) -> None:
        super().__init__(20)
        self.asked: list[int] = []
        self.lost = 0
        self.columns = False

    def __getitems__(self, numbers: list[int]) -> Any:
        self.asked.append(len(numbers))
        if self.columns:
            return {"number": numbers}
        return [self[number] for number in numbers][self.lost :]


def test_many_at_once_where_each_needs_no_seed() -> None:
    dataset = Many()
    ahead = {"fetch_threads": 2}
    whole = list(loader_of(dataset, collate_fn=numbers, reseed=False, **ahead))
    assert sorted(dataset.asked) == [2, 6, 6, 6]  # threads ask in any order
    assert list(loader_of(dataset, collate_fn=numbers)) == whole
    assert len(dataset.asked) == 4, "one by one, each with its seed"
    dataset.lost = 1
    with pytest.raises(DatasetError, match="Many: __getitems__ must return one sample for each of 6 numbers, got 5"):
        list(loader_of(dataset, reseed=False, **ahead))
    dataset.lost, dataset.columns = 0, True
    with pytest.raises(DatasetError, match="Many: __getitems__ must return a list of samples, got a dict"):
        list(loader_of(dataset, batch_size=1, reseed=False, **ahead))
    dataset.columns, dataset.bad = False, {3: ValueError("broken")}
    with pytest.raises(ValueError, match="broken") as caught:
        list(loader_of(dataset, reseed=False, shuffle=False, **ahead))
    places = ", ".join(f"sample {number} (epoch 0, position {number})" for number in range(3))
    assert caught.value.__notes__ == [f"raised by Many for one of 6 samples, the first of which are {places}"]


# ---- restore keys


def test_a_key_brings_back_its_sample_to_the_bit() -> None:
    loader = loader_of(keys="key", tail="carry")
    other = loader_of(keys="key", tail="drop", batch_size=1)  # how an epoch is cut is none of a key's business
    seen = set()
    for _ in range(3):
        for batch in loader:
            assert batch.keys() == {"batch", "key"}
            assert [other.restore_sample(key) for key in batch["key"]] == batch["batch"]
            seen |= set(batch["key"])
    assert len(seen) == 50 * 3 // 6 * 6


def test_key_of_other_data_is_refused() -> None:
    key = next(iter(loader_of(keys="key")))["key"][0]
    for changed in ({"seed": 3}, {"shuffle": False}, {"num_samples": 49}, {"dataset": Noisy(51)}):
        with pytest.raises(StateMismatchError, match=r"must have the digest \w{16}"):
            loader_of(**changed).restore_sample(key)
    kind, epoch, position, order = key.split(":")
    beyond = f"{kind}:{epoch}:50:{order}"
    for wrong in ("", "x", None, f"s:{epoch}:{position}:{order}", f"{kind}:-1:{position}:{order}", beyond):
        with pytest.raises(InvalidArgumentError, match=r"a restore key must be|must have a position"):
            loader_of().restore_sample(wrong)  # type: ignore[arg-type]
