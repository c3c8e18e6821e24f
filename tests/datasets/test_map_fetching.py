"""Reading of a MapLoader: ahead in threads and processes, with random generators for each sample, and errors that name
the sample."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import signal
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

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more processes than processors

AHEAD: list[dict[str, int]] = [{}, {"fetch_threads": 3}, {"fetch_processes": 2}]


class Noisy(torch.utils.data.Dataset[Any]):
    """A number and something of each generator; some numbers cannot be read."""

    def __init__(self, length: int = 50, bad: dict[int, Exception] | None = None) -> None:
        self.length, self.bad = length, bad or {}

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, number: int) -> tuple[int, float, float, float, int]:
        if number in self.bad:
            raise self.bad[number]
        # random.gauss and np.random.normal keep a second number for the next call: it must not come here.
        noise = random.gauss(0, 1), float(np.random.normal()), float(torch.randn(()))
        return number, *noise, os.getpid()


def as_it_is(samples: list[Any]) -> list[Any]:
    return samples


def values(samples: list[Any]) -> list[Any]:
    return [sample[:4] for sample in samples]


def numbers(samples: list[Any]) -> list[int]:
    return [sample[0] for sample in samples]


def loader_of(dataset: Any = None, **changed: Any) -> MapLoader:
    options = {"batch_size": 6, "shuffle": True, "seed": 2, "collate_fn": values, **changed}
    return MapLoader(Noisy() if dataset is None else dataset, **options)


@pytest.mark.parametrize("ahead", AHEAD[1:])
def test_order_and_state_are_those_of_one_thread(ahead: dict[str, int]) -> None:
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


@pytest.mark.parametrize("ahead", [{}, {"fetch_processes": 2}])
def test_the_randomness_of_a_sample_is_its_own(ahead: dict[str, int]) -> None:
    """Make a sample's randomness independent of workers, boxes, processes and restarts, and different in each epoch."""
    whole = [list(loader) for loader in [loader_of(global_batch_size=6, batch_size=None)] for _ in range(2)]
    flat = sorted(sample for epoch in whole for batch in epoch for sample in batch)
    assert [first[0] == second[0] for first, second in zip(flat[::2], flat[1::2], strict=True)] == [True] * 50
    assert len({noise for sample in flat for noise in sample[1:]}) == 300
    before = AllWorkers(lambda: loader_of(global_batch_size=6, batch_size=None, **ahead), (2, 2))
    got = before.take(5)
    after = AllWorkers(lambda: loader_of(global_batch_size=6, batch_size=None, **ahead), (1, 3), before)
    assert [*got, *after.take(7)] == whole[0] + whole[1][:3]


@pytest.mark.parametrize("ahead", [{}, {"fetch_processes": 2}])
def test_process_generators_are_restored(ahead: dict[str, int]) -> None:
    seed_rng(5)
    random.gauss(0, 1)
    np.random.normal()
    before = capture_rng()
    loader = loader_of(keys="key", **ahead)
    loader.restore_sample(next(iter(loader))["key"][0])
    list(loader)
    assert capture_rng() == before
    with pytest.raises(ZeroDivisionError):
        list(loader_of(Noisy(bad={7: ZeroDivisionError()}), **ahead))
    assert capture_rng() == before


def drawn(samples: list[Any]) -> list[Any]:
    return [random.random(), *numbers(samples)]


def test_collate_draws_the_same_in_a_process() -> None:
    assert list(loader_of(collate_fn=drawn, fetch_processes=1)) == list(loader_of(collate_fn=drawn))


def test_without_reseed_own_generators_are_used() -> None:
    seed_rng(1)
    first = list(loader_of(reseed=False))
    seed_rng(1)
    assert list(loader_of(reseed=False)) == first
    assert list(loader_of(reseed=False)) != first
    epochs = [list(loader) for loader in [loader_of(reseed=False, fetch_processes=1)] for _ in range(2)]
    noise = {sample[1] for epoch in epochs for batch in epoch for sample in batch}
    assert len(noise) == 100, "processes do not repeat in each epoch what they drew in the one before"


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


def children() -> list[Any]:
    gc.collect()  # nothing of an earlier test
    return multiprocessing.active_children()


def test_processes_end_with_the_epoch() -> None:
    loader = loader_of(collate_fn=as_it_is, fetch_processes=2)
    pids = {sample[4] for batch in loader for sample in batch}
    assert len(pids) == 2
    assert os.getpid() not in pids
    assert children() == []
    stream = iter(loader)
    next(stream)
    assert len(multiprocessing.active_children()) == 2
    del stream  # a loop that is left
    assert multiprocessing.active_children() == []
    stream = iter(loader)
    next(stream)
    loader.set_epoch(5)
    assert next(stream, None) is None
    assert multiprocessing.active_children() == []


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


@pytest.mark.parametrize("ahead", AHEAD)
def test_stop_iteration_in_a_sample_is_an_error(ahead: dict[str, int]) -> None:
    with pytest.raises(DatasetError, match=r"StopIteration must not come out of Noisy for sample 7 \(epoch 0"):
        list(loader_of(Noisy(bad={7: StopIteration()}), **ahead))


def gives_up(samples: list[Any]) -> Any:
    raise StopIteration("no more memory")


@pytest.mark.parametrize("ahead", AHEAD[1:])
def test_stop_iteration_in_collate_is_an_error(ahead: dict[str, int]) -> None:
    with pytest.raises(DatasetError, match="StopIteration must not come out of the collate_fn"):
        list(loader_of(collate_fn=gives_up, **ahead))


def with_a_key(samples: list[Any]) -> dict[str, Any]:
    return {"key": 0} if samples[0][0] == 6 else {"number": numbers(samples)}


@pytest.mark.parametrize("ahead", [{"fetch_threads": 1}, *AHEAD[1:]])
def test_batch_that_refuses_keys_is_not_skipped(ahead: dict[str, int]) -> None:
    """Return the same batch at the second try. With a fetcher the second try gave the next batch once, and the state
    said that both were done."""
    loader = loader_of(collate_fn=with_a_key, keys="key", shuffle=False, **ahead)
    stream = iter(loader)
    assert next(stream)["number"] == list(range(6))
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match="a field name that the batch does not have yet"):
            next(stream)
        assert loader.state_dict()["done"] == 1


def unsendable(samples: list[Any]) -> Any:
    return lambda: samples


def graphs(samples: list[Any]) -> Any:
    return torch.zeros(3, requires_grad=True) * 2


@pytest.mark.parametrize(
    ("collate", "why"),
    [(unsendable, "Can't (pickle|get) local object"), (graphs, "non-leaf tensor which requires_grad")],
)
def test_unsendable_batch_is_an_error(collate: Any, why: str) -> None:
    """torch's queue drops it, and its reader would wait for ever."""
    with pytest.raises(DatasetError, match=f"Noisy: a batch cannot be sent from a process of fetch_processes: .*{why}"):
        list(loader_of(collate_fn=collate, fetch_processes=1))


def test_error_of_an_unsendable_class_arrives() -> None:
    class Local(Exception):
        pass

    with pytest.raises(DatasetError, match="Local: no such pixel") as caught:
        list(loader_of(Noisy(bad={7: Local("no such pixel")}), fetch_processes=1))
    assert "raised by Noisy for sample 7" in str(caught.value)


class Deadly(Noisy):
    """Its process ends at sample 20: by a signal, or with a status."""

    def __init__(self, status: int) -> None:
        super().__init__()
        self.status = status

    def __getitem__(self, number: int) -> Any:
        if number == 20:
            if self.status < 0:
                os.kill(os.getpid(), -self.status)
            os._exit(self.status)
        return torch.full((100,), number)


def slowly(stream: Any, pause_s: float) -> None:
    for _ in stream:
        threading.Event().wait(pause_s)


@pytest.mark.parametrize(
    ("status", "says", "pause_s"),
    [
        (-signal.SIGKILL, r"was killed by SIGKILL \(by the kernel for lack of memory", 0.05),
        (-signal.SIGTERM, "was killed by SIGTERM", 0.0),
        (3, "exited with status 3", 0.05),
        (0, "exited with status 0 before the end of its input", 0.0),
        (0, "exited with status 0 before the end of its input", 0.05),
    ],
)
def test_ended_process_is_an_error_with_status(status: int, says: str, pause_s: float) -> None:
    """Raise the error also if the loop is slow, because a batch that was queued before cannot be received any more."""
    stream = iter(loader_of(Deadly(status), fetch_processes=2, batch_size=4, shuffle=False, collate_fn=torch.stack))
    with pytest.raises(RuntimeError, match=f"^a process that reads Deadly {says}") as caught:
        slowly(stream, pause_s)
    assert caught.value.__cause__ is caught.value.__context__ is None
    assert multiprocessing.active_children() == [], "whoever holds the error holds no process"


def test_users_error_is_not_an_ended_process() -> None:
    with pytest.raises(RuntimeError, match="no such pixel") as caught:
        list(loader_of(Noisy(bad={20: RuntimeError("no such pixel")}), fetch_processes=2))
    assert "raised by Noisy for sample 20" in str(caught.value)
    assert multiprocessing.active_children() == []


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


@pytest.mark.parametrize("ahead", [{}, {"fetch_threads": 2}])
def test_many_at_once_where_each_needs_no_seed(ahead: dict[str, int]) -> None:
    dataset = Many()
    whole = list(loader_of(dataset, collate_fn=numbers, reseed=False, **ahead))
    assert sorted(dataset.asked) == [2, 6, 6, 6]  # threads ask in any order
    assert list(loader_of(dataset, collate_fn=numbers)) == whole
    assert len(dataset.asked) == 4, "one by one, each with its seed"
    dataset.lost = 1
    with pytest.raises(
        DatasetError, match="Many: __getitems__ must return one sample for each of the 6 numbers, got 5"
    ):
        list(loader_of(dataset, reseed=False, **ahead))
    dataset.lost, dataset.columns = 0, True
    with pytest.raises(DatasetError, match="Many: __getitems__ must return a list of samples, got a dict"):
        list(loader_of(dataset, batch_size=1, reseed=False, **ahead))
    dataset.columns, dataset.bad = False, {3: ValueError("broken")}
    with pytest.raises(ValueError, match="broken") as caught:
        list(loader_of(dataset, reseed=False, shuffle=False, **ahead))
    places = ", ".join(f"sample {number} (epoch 0, position {number})" for number in range(3))
    assert caught.value.__notes__ == [f"raised by Many for one of 6 samples, the first of which are {places}"]


def test_nested_processes_are_refused_by_name() -> None:
    loader = torch.utils.data.DataLoader(loader_of(fetch_processes=1), batch_size=None, num_workers=1)
    with pytest.raises(InvalidArgumentError, match="Use either the DataLoader's num_workers or fetch_processes"):
        list(loader)


# ---- restore keys


@pytest.mark.parametrize(
    ("ahead", "tail"), [({}, "emit"), ({}, "pad"), ({}, "carry"), ({"fetch_processes": 1}, "carry")]
)
def test_a_key_brings_back_its_sample_to_the_bit(ahead: dict[str, int], tail: str) -> None:
    loader = loader_of(keys="key", tail=tail, **ahead)
    other = loader_of(keys="key", tail="drop", batch_size=1)  # how an epoch is cut is none of a key's business
    seen = set()
    for _ in range(3):
        for batch in loader:
            assert batch.keys() == {"batch", "key"}
            assert [other.restore_sample(key)[:4] for key in batch["key"]] == batch["batch"]
            seen |= set(batch["key"])
    assert len(seen) == (50 * 3 // 6 * 6 if tail == "carry" else 150)


def test_key_of_other_data_is_refused() -> None:
    key = next(iter(loader_of(keys="key")))["key"][0]
    for changed in ({"seed": 3}, {"shuffle": False}, {"num_samples": 49}, {"dataset": Noisy(51)}):
        with pytest.raises(
            StateMismatchError, match=r"the same dataset, seed and order .digest \w{16}., got digest \w{16}"
        ):
            loader_of(**changed).restore_sample(key)
    kind, epoch, position, order = key.split(":")
    beyond = f"{kind}:{epoch}:50:{order}"
    for wrong in ("", "x", None, f"s:{epoch}:{position}:{order}", f"{kind}:-1:{position}:{order}", beyond):
        with pytest.raises(InvalidArgumentError, match=r"a restore key must be|must have a position"):
            loader_of().restore_sample(wrong)  # type: ignore[arg-type]
