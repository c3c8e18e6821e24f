"""An epoch whose order comes from a file: from any row on, on any topology, and then the loader's own order."""

from __future__ import annotations

import copy
import pickle
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from all_workers import AllWorkers, Shape, saved
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.data import MapLoader, MDSWriter, StreamingDataset, StreamingLoader
from penstock.data.ordering import order_file
from penstock.data.ordering.order_file import FiledOrder, OrderFile, write_order
from penstock.data.ordering.order_states import ORDER_FILE, OrderProgress, Topology, state_of
from penstock.data.ordering.unsharded_order import UnshardedOrder
from penstock.proto.errors import DatasetError, InvalidArgumentError, StateMismatchError

pytestmark = pytest.mark.filterwarnings("ignore:the epoch's last batch has fewer samples than there are boxes")

ROWS, EPOCH, SEED = 101, 3, 5
SHAPES: list[Shape] = [(1, 1), (1, 3), (2, 2), (3, 1), (5, 2)]


def as_it_is(samples: list[Any]) -> list[Any]:
    return samples


class Numbers:
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, number: int) -> int:
        return number


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> OrderFile:
    order = np.random.default_rng(1).permutation(ROWS)
    return write_order(tmp_path_factory.mktemp("order") / "epoch.order", EPOCH, order)


def loader_of(file: OrderFile | None, **changed: Any) -> MapLoader:
    given = {"global_batch_size": 8, "shuffle": True, "seed": SEED, "collate_fn": as_it_is, **changed}
    return MapLoader(Numbers(), order_file=None if file is None else file.path, **given)


def imported(file: OrderFile, seen: int) -> dict[str, Any]:
    return state_of(OrderProgress(EPOCH, seen, 0, Topology(1, 1, 1)), {ORDER_FILE: file.described})


class Begun:
    """What an AllWorkers goes on from."""

    topology: Shape = (0, 0)
    step = 0

    def __init__(self, state: Any) -> None:
        self.state = lambda: state


def cluster(file: OrderFile, shape: Shape, state: Any, **changed: Any) -> AllWorkers:
    return AllWorkers(lambda: loader_of(file, **changed), shape, Begun(state))  # type: ignore[arg-type]


def flat(batches: list[list[Any]]) -> list[Any]:
    return list(chain.from_iterable(batches))


def own(epoch: int) -> list[int]:
    rows: list[int] = UnshardedOrder(ROWS, ROWS, seed=SEED, shuffle=True).ids(epoch, np.arange(ROWS)).tolist()
    return rows


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.integers(0, ROWS), st.lists(st.sampled_from(SHAPES), min_size=1, max_size=4), st.integers(0, 5))
def test_rest_comes_once_on_any_topology(file: OrderFile, seen: int, shapes: list[Shape], taken: int) -> None:
    """In the file's order, then the loader's own epochs; and over any number of resumes."""
    got: list[int] = []
    run = cluster(file, shapes[0], imported(file, seen))
    for shape in shapes[1:]:
        got += flat(run.take(taken))
        run = AllWorkers(lambda: loader_of(file), shape, run)
    while len(got) < 3 * ROWS:
        got += flat(run.take(1))
    expected = [*file.numbers[seen:].tolist(), *own(EPOCH + 1), *own(EPOCH + 2), *own(EPOCH + 3)]
    assert got == expected[: len(got)]


@pytest.mark.parametrize("tail", ["pad", "drop", "carry"])
def test_rest_with_each_tail(file: OrderFile, tail: str) -> None:
    run = cluster(file, (2, 1), imported(file, 40), tail=tail)
    got = flat(run.take(9))
    whole = file.numbers.tolist()
    following = {"pad": [*whole[:3], *own(EPOCH + 1)], "drop": own(EPOCH + 1), "carry": own(EPOCH + 1)}[tail]
    rest = whole[40:96] if tail == "drop" else whole[40:]
    assert got == [*rest, *following][:72]


def test_file_may_be_left_out_later(file: OrderFile) -> None:
    run = cluster(file, (1, 2), imported(file, 93))
    run.take(1)
    within = run.state()
    with pytest.raises(StateMismatchError, match=r"order_file was .* and is None now"):
        loader_of(None).load_state_dict(saved(within))
    run.take(3)
    rest = AllWorkers(lambda: loader_of(None), (2, 2), run)
    assert flat(rest.take(2)) == own(EPOCH + 1)[24:40]


def test_carried_rows_still_need_the_file(file: OrderFile) -> None:
    run = cluster(file, (1, 1), imported(file, 0), tail="carry")
    run.take(12)
    after = AllWorkers(lambda: loader_of(file, tail="carry"), (1, 1), run)
    assert after.take(1)[0][:5] == file.numbers[96:].tolist()
    run.take(1)
    state = loader_of(file, tail="carry")
    state.load_state_dict(saved(imported(file, 96)))
    next(iter(state))
    left = saved(state.state_dict())
    assert left["start"] < 0
    with pytest.raises(StateMismatchError, match="order_file"):
        loader_of(None, tail="carry").load_state_dict(left)


def test_imported_state_needs_its_file(file: OrderFile, tmp_path: Path) -> None:
    with pytest.raises(StateMismatchError, match="order_file must be given"):
        loader_of(None).load_state_dict(imported(file, 8))
    other = write_order(tmp_path / "other", EPOCH, np.arange(ROWS))
    with pytest.raises(StateMismatchError, match=r"order_file was .* and is .* now"):
        loader_of(other).load_state_dict(imported(file, 8))


def test_other_epochs_are_the_loaders_own(file: OrderFile) -> None:
    filed, plain = loader_of(file), loader_of(None)
    for epoch in range(EPOCH + 2):
        same = list(filed) == list(plain)
        assert same == (epoch != EPOCH)


def test_length_must_be_the_datasets(tmp_path: Path, file: OrderFile) -> None:
    short = write_order(tmp_path / "short", 0, np.arange(ROWS - 1))
    with pytest.raises(DatasetError, match=rf"as Numbers \(101\) and as an epoch .* \(101\), got {ROWS - 1}"):
        loader_of(short)
    with pytest.raises(DatasetError, match="epochs that take each sample once"):
        loader_of(file, num_samples=50)


def test_order_must_have_each_sample_once(tmp_path: Path) -> None:
    for wrong in ([0, 0, 1], [0, 2, 3], []):
        with pytest.raises(InvalidArgumentError, match="each of the samples"):
            write_order(tmp_path / "wrong", 0, np.array(wrong, np.int64))
    assert not (tmp_path / "wrong").exists()


@pytest.mark.parametrize("at", [0, 9, 16, 24, 32, 64, 200])
def test_damaged_file_is_an_error(tmp_path: Path, file: OrderFile, at: int) -> None:
    data = bytearray(file.path.read_bytes())
    data[at] ^= 1
    (tmp_path / "damaged").write_bytes(data)
    with pytest.raises(DatasetError, match=r"order_file .*damaged"):
        OrderFile.read(tmp_path / "damaged")


def test_missing_or_cut_file_is_an_error(tmp_path: Path, file: OrderFile) -> None:
    with pytest.raises(DatasetError, match=r"cannot be read: No such file .* same path on each worker"):
        loader_of(OrderFile(tmp_path / "none", 0, 1, "", file.numbers))
    (tmp_path / "cut").write_bytes(file.path.read_bytes()[:-1])
    with pytest.raises(DatasetError, match="the file must have 101 samples"):
        OrderFile.read(tmp_path / "cut")


def test_large_file_is_checked_in_parts(tmp_path: Path, file: OrderFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file may come from elsewhere: a number beyond the samples is refused though the digest is right."""
    monkeypatch.setattr(order_file, "CHUNK", 20)  # of 101 numbers, the last part has one
    assert OrderFile.read(file.path).digest == file.digest
    numbers = file.numbers.copy()
    numbers[-1] = ROWS
    header = order_file._HEADER.pack(b"PENORDER", 1, 4, EPOCH, ROWS, order_file._digest(EPOCH, numbers))
    (tmp_path / "beyond").write_bytes(header + numbers.tobytes())
    with pytest.raises(DatasetError, match="it has sample numbers above 100"):
        OrderFile.read(tmp_path / "beyond")


def test_copies_map_the_file_too(file: OrderFile) -> None:
    order = FiledOrder(UnshardedOrder(ROWS, ROWS, seed=1, shuffle=True), OrderFile.read(file.path), "n", ROWS)
    data = pickle.dumps(order)
    assert len(data) < 1000 + len(str(file.path))
    for copied in (pickle.loads(data), copy.deepcopy(order)):
        assert copied.ids(EPOCH, [4, 2]).tolist() == file.numbers[[4, 2]].tolist()


def test_shards_in_a_filed_order(file: OrderFile, tmp_path: Path) -> None:
    """All samples come in the file's order, whose shards are fetched ahead."""
    with MDSWriter(tmp_path / "shards", {"number": "int"}, size_limit=256) as writer:
        for number in range(ROWS):
            writer.write({"number": number})
    dataset = StreamingDataset(tmp_path / "shards")
    loader = StreamingLoader(dataset, batch_size=8, shuffle=True, seed=1, predownload=16, order_file=file.path)
    loader.load_state_dict(imported(file, 20))
    rows = [number for batch in loader for number in batch["number"].tolist()]
    assert rows == file.numbers[20:].tolist()
    assert sorted(number for batch in loader for number in batch["number"].tolist()) == list(range(ROWS))
    # a batch's own shards are fetched anyway: what is fetched ahead of it shows in a long epoch only
    ends = np.cumsum(dataset.sizes[0])
    first = np.searchsorted(ends, file.numbers[20:36], side="right")
    loader.load_state_dict(imported(file, 20))
    next(iter(loader))
    assert loader._upcoming is not None
    assert loader._upcoming.shards.tolist()[:8] == list(dict.fromkeys(first.tolist()))[:8]
