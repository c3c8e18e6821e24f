"""Loops as people and their libraries write them: over torch's DataLoader and over ours, they get the same batches.

Where ours cannot be the same, because a loader has one stream, the error says so.
"""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import lengths
import pytest
import streams
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import TensorDataset

from penstock.client import Appliance, DataExecutor, DataLoader, Lookahead
from penstock.client.testing import FakeAppliance, SlowBatch
from penstock.proto.errors import DeadlineError, PenstockError

DATA = TensorDataset(torch.arange(10))
LOOPS: dict[str, Callable[[Any], Any]] = {}
IN_PROCESSES = ["iterator held", "len() batches", "thread"]
"""Loops that are also tried with worker processes."""


def number(batch: Any) -> int:
    return int(batch[0][0]) // 2


def numbers(batches: Any) -> list[int]:
    return [number(batch) for batch in batches]


def loop(name: str) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    def note(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        LOOPS[name] = function
        return function

    return note


@loop("for, twice")
def _(loader: Any) -> Any:
    return numbers(loader), numbers(loader)


@loop("bar of tqdm.auto")
def _(loader: Any) -> Any:
    from tqdm.auto import tqdm

    bar = tqdm(loader, file=io.StringIO())  # calls iter() at once, and again in each loop
    return numbers(bar), numbers(bar)


@loop("made and dropped")
def _(loader: Any) -> Any:
    iter(loader)
    unused = iter(loader)
    seen = []
    for batch in loader:
        iter(loader)
        seen.append(number(batch))
    return seen, numbers(unused)


@loop("peek")
def _(loader: Any) -> Any:
    return number(next(iter(loader))), numbers(loader)


@loop("iterator held")
def _(loader: Any) -> Any:
    held = iter(loader)
    return number(next(held)), numbers(loader)


@loop("next() after the end")
def _(loader: Any) -> Any:
    batches = iter(loader)
    return numbers(batches), next(batches, "end"), next(batches, "end"), numbers(loader)


@loop("iterator in a cycle")
def _(loader: Any) -> Any:
    def fails() -> None:
        batches = iter(loader)
        next(batches)
        cycle: list[Any] = [batches]
        cycle.append(cycle)

    fails()
    return numbers(loader)


@loop("len() and iter()")
def _(loader: Any) -> Any:
    unused, before = iter(loader), len(loader)
    return before, numbers(loader), len(loader), len(list(loader)), numbers(unused)


@loop("len() batches")
def _(loader: Any) -> Any:
    seen = []
    for _ in range(2):
        batches = iter(loader)
        seen.append([number(next(batches)) for _ in range(len(loader))])
    return seen


@loop("thread")
def _(loader: Any) -> Any:
    taken: queue.Queue[Any] = queue.Queue(1)

    def take() -> None:
        for batch in loader:
            taken.put(number(batch))
        taken.put(None)

    def epoch() -> list[int]:
        thread = threading.Thread(target=take)
        thread.start()
        seen = list(iter(taken.get, None))
        thread.join()
        return seen

    return epoch(), epoch()


@loop("copies")
def _(loader: Any) -> Any:
    copies = [copy.copy(loader), copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))]
    return [numbers(one) for one in [*copies, loader]]


WRAPPERS: dict[str, Callable[[DataLoader], Any]] = {"the loader": lambda loader: loader, "Lookahead": Lookahead}


@pytest.fixture(autouse=True)
def left_on_purpose(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("ERROR", "penstock.client")


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", LOOPS)
def test_as_with_torch(name: str, wrapper: str) -> None:
    with FakeAppliance(num_workers_per_box=2):
        ours = LOOPS[name](WRAPPERS[wrapper](DataLoader(DATA, batch_size=2)))
    assert ours == LOOPS[name](TorchLoader(DATA, batch_size=2))


@pytest.fixture(scope="module")
def workers() -> Iterator[Appliance]:
    with Appliance(num_workers_per_box=2, seed=7, timeout_s=60) as appliance:
        yield appliance


@pytest.mark.parametrize("name", IN_PROCESSES)
def test_as_with_torch_in_processes(workers: Appliance, name: str) -> None:
    loader = DataLoader(DATA, batch_size=2)
    assert LOOPS[name](DataExecutor(loader, appliance=workers)) == LOOPS[name](TorchLoader(DATA, batch_size=2))
    loader.close()


# ---- a loader has one stream


def test_an_older_iterator_cannot_go_on() -> None:
    with FakeAppliance(num_workers_per_box=2):
        loader = DataLoader(DATA, batch_size=2)
        with pytest.raises(RuntimeError, match=r"another loop has taken batches \(now step 2\)"):
            list(itertools.islice(zip(loader, loader, strict=True), 9))
        nested = ((number(outer), number(inner)) for outer in loader for inner in loader)
        assert list(itertools.islice(nested, 5)) == [(0, inner) for inner in range(5)]
        with pytest.raises(RuntimeError, match="another loop has taken batches"):
            next(nested)
        older, newer = iter(loader), iter(loader)
        next(newer)
        with pytest.raises(RuntimeError, match=r"only one loop .* is at step 9: finish"):
            next(older)
        assert numbers(newer) == [1, 2, 3, 4]
        assert numbers(older) == [0, 1, 2, 3, 4], "it had taken nothing, and the other loop is over"


def test_an_iterator_ends_with_its_session() -> None:
    with FakeAppliance():
        loader = DataLoader(DATA, batch_size=2)
        state = loader.state_dict()
        unused, batches = iter(loader), iter(loader)
        next(batches)
        with pytest.raises(RuntimeError, match="load_state_dict was called in a loop over"):
            loader.load_state_dict(state)
        loader.close()
        with pytest.raises(PenstockError, match="closed inside the loop"):
            next(batches)
        with pytest.raises(RuntimeError, match=r"a state was loaded or the loader closed: call iter\(\)"):
            next(batches)
        loader.load_state_dict(state)
        assert numbers(unused) == [0, 1, 2, 3, 4]


def test_a_closed_iterator_has_no_batch() -> None:
    with FakeAppliance():
        loader = DataLoader(DATA, batch_size=2)
        for taken in (0, 1):
            batches: Any = iter(loader)
            assert len(list(itertools.islice(batches, taken))) == taken
            batches.close()
            assert next(batches, None) is None
        assert numbers(loader) == [0, 1, 2, 3, 4]


def test_two_threads_in_one_next() -> None:
    """Of one iterator, and of two."""
    inside, leave = threading.Event(), threading.Event()
    with FakeAppliance() as appliance:
        loader = DataLoader(DATA, batch_size=2)
        executor = DataExecutor(loader, appliance=appliance)
        batches = iter(executor)
        next(batches)
        assert executor._session is not None
        reader = executor._session.reader
        take = reader.next

        def waits() -> Any:
            inside.set()
            assert leave.wait(30)
            return take()

        reader.next = waits  # type: ignore[method-assign]
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(next, batches)
            assert inside.wait(30)
            with pytest.raises(RuntimeError, match="while another thread was in it"):
                next(batches)
            with pytest.raises(RuntimeError, match="only one loop can take"):
                next(iter(loader))
            leave.set()
            assert number(other.result(30)) == 1
        assert numbers(batches) == [2, 3, 4]


# ---- errors of next()


def test_next_again_after_an_error_gets_the_same_batch() -> None:
    with FakeAppliance(timeout_s=0.01, faults=[SlowBatch(1, 1), SlowBatch(3, 1)]) as appliance:
        executor = DataExecutor(DataLoader(DATA, batch_size=2), num_steps=7, appliance=appliance)
        batches, seen = iter(executor), list[int]()
        for _ in range(2):
            with pytest.raises(DeadlineError):
                seen.extend(map(number, batches))
        assert seen + numbers(batches) == [0, 1, 2, 3, 4, 0, 1]
        assert executor.user_iteration == 7


def test_failed_next_leaves_the_loader_to_others() -> None:
    with FakeAppliance(timeout_s=0.01, faults=[SlowBatch(2, 1)]):
        loader = DataLoader(DATA, batch_size=2)
        failed = iter(loader)
        next(failed)
        with pytest.raises(DeadlineError):
            next(failed)
        assert numbers(loader) == [1, 2, 3, 4], "the rest of the epoch: no batch was lost"
        with pytest.raises(RuntimeError, match="another loop has taken batches"):
            next(failed)


def test_next_again_after_ctrl_c(workers: Appliance) -> None:
    loader = DataLoader(streams.slow, 0.5, 4)
    batches, seen = iter(DataExecutor(loader, appliance=workers)), []
    seen.append(int(next(batches)))
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(KeyboardInterrupt):
            seen.extend(map(int, batches))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(seen) < 8
    assert [*seen, *map(int, batches)] == [0, 0, 1, 1, 2, 2, 3, 3]
    loader.close()


# ---- wrong lengths


@pytest.mark.parametrize("kind", ["in process", "workers"])
def test_batches_beyond_len_are_dropped_with_the_epoch(
    kind: str, workers: Appliance, caplog: pytest.LogCaptureFixture
) -> None:
    """As torch does, if the loop leaves the epoch there; a loop to the end gets them."""
    caplog.set_level("WARNING", "penstock.client")
    appliance = workers if kind == "workers" else FakeAppliance(num_workers_per_box=2, seed=7)
    loader = DataLoader(lengths.too_short, 3)
    executor = DataExecutor(loader, appliance=appliance)
    epochs = []
    for _ in range(3):
        batches = iter(executor)
        next(batches)
        assert len(loader) == 4
        epochs.append([int(batch["number"]) for batch in itertools.islice(batches, 3)])
    assert epochs == [[1001, 2, 1002]] * 3
    assert [int(batch["number"]) for batch in executor] == [1, 1001, 2, 1002, 3, 1003]
    assert [int(batch["number"]) for batch in itertools.islice(executor, 6)] == [1, 1001, 2, 1002, 3, 1003]
    assert [int(batch["number"]) for batch in executor] == [1, 1001, 2, 1002, 3, 1003]
    told = [text for text in (record.getMessage() for record in caplog.records) if "len()" in text]
    assert len(told) == 1
    assert "left its epoch at step 4, after as many batches as len() says" in told[0]
    loader.close()
    if appliance is not workers:
        appliance.close()


def test_a_len_that_raises_is_none(workers: Appliance) -> None:
    """In this process before the run, and in a worker."""
    loader = DataLoader(lengths.raising)
    why = r"the loader of lengths:raising has no len\(\) \(it raised ValueError: the manifest\nhas no row count\): add"
    with pytest.raises(TypeError, match=why):
        len(loader)
    executor = DataExecutor(loader, appliance=workers)
    assert [batch.tolist() for batch in executor] == [[0, 1], [100, 101], [2, 3], [102, 103]]
    with pytest.raises(TypeError, match="it raised ValueError: the manifest"):
        len(loader)
    loader.close()
