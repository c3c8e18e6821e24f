"""Behaviour that all loaders share: epochs, states, failures, keys, torch's loaders around them, and refusals."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from itertools import chain, islice
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from all_workers import AllWorkers
from listed import Counting, Listed
from torchdata.stateful_dataloader import StatefulDataLoader

from penstock.data import MapLoader, ShardLoader, StreamingDataset, StreamingLoader
from penstock.proto.errors import (
    DatasetError,
    InvalidArgumentError,
    StateCorruptError,
    StateMismatchError,
    StateVersionError,
)
from penstock.proto.state.assignment import Assignment, assigned
from penstock.proto.state.generators import capture_rng
from penstock.proto.state.restartable import RestartableDataLoader

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more processes than processors

UNEQUAL = [7, 0, 23, 1, 9]
LOADERS: dict[str, Callable[..., Any]] = {
    "map": lambda dataset, **options: MapLoader(range(40), shuffle=True, **options),
    "streaming": lambda dataset, **options: StreamingLoader(dataset, shuffle=True, **options),
    "known lengths": lambda dataset, **options: ShardLoader(Listed(UNEQUAL), **options),
    "found lengths": lambda dataset, **options: ShardLoader(Listed(UNEQUAL, known=False), **options),
    "endless": lambda dataset, **options: ShardLoader(Counting(4), **options),
}
Make = Callable[..., Any]


@pytest.fixture(params=LOADERS)
def make(request: pytest.FixtureRequest, dataset: StreamingDataset) -> Make:
    """Makes a loader of each kind."""

    def made(**options: Any) -> Any:
        return LOADERS[request.param](dataset, **{"seed": 9, "collate_fn": list, "batch_size": 5, **options})

    return made


finite = pytest.mark.parametrize("make", [kind for kind in LOADERS if kind != "endless"], indirect=True)
of_two_families = pytest.mark.parametrize("make", ["map", "found lengths"], indirect=True)
"""A loader that computes positions and one that reads along, where processes are started or seeds are set."""


@finite
def test_loaded_epoch_is_continued(make: Make) -> None:
    """The usual loop says the epoch's number before each epoch, also before the first one that is resumed."""
    loader = make(batch_size=10)
    whole = [list(loader) for _ in range(3)]
    loader.set_epoch(1)
    assert [*islice(iter(loader), 3)] == whole[1][:3]
    state = loader.state_dict()
    for _ in range(2):
        loader.load_state_dict(state)
        got = []
        for epoch in range(state["epoch"], 3):
            loader.set_epoch(epoch)
            got.append(list(loader))
        assert got == [whole[1][3:], whole[2]]
    for _ in range(2):
        loader.set_epoch(1)
        assert next(iter(loader)) == whole[1][0]
    for number in (-1, 0.5):
        with pytest.raises(InvalidArgumentError, match=f"epoch must be .* got {number}"):
            loader.set_epoch(number)


@finite
@pytest.mark.parametrize("batch", [10, 15])
def test_epochs_end_begins_the_next(make: Make, batch: int) -> None:
    loader = make(batch_size=batch)
    whole = [list(each) for each in [make(batch_size=batch)] * 2]
    stream = iter(loader)
    assert [*islice(stream, len(whole[0]))] == whole[0]
    states = [loader.state_dict()]
    assert next(stream, None) is None
    states.append(loader.state_dict())
    for state in states:
        loader.load_state_dict(state)
        assert list(loader) == whole[1]


@finite
def test_abandoned_iterator_yields_nothing_more(make: Make) -> None:
    loader = make()
    left = iter(loader)
    next(left)
    stream = iter(loader)
    assert next(left, None) is None
    assert len(list(stream)) >= 8
    assert next(stream, None) is None, "an epoch that is over stays over"


@finite
def test_skipped_batch_ends_an_epoch_too(make: Make) -> None:
    first, second = (list(loader) for loader in [make()] * 2)
    loader = make()
    stream = iter(loader)
    for _ in first:
        stream.skip_batch()
    with pytest.raises(StopIteration):
        stream.skip_batch()
    assert next(iter(loader)) == second[0]


def test_a_batch_that_fails_is_tried_again(make: Make) -> None:
    fails = [True, True]

    def collate(samples: list[Any]) -> Any:
        if fails and fails.pop():
            raise ValueError("once")
        return samples

    expected = list(islice(iter(make(rank=(1, 2), batch_size=3)), 6))
    loader = make(collate_fn=collate, rank=(1, 2), batch_size=3)
    stream = iter(loader)
    for _ in range(2):
        with pytest.raises(ValueError, match="once"):
            next(stream)
        assert loader.state_dict()["done"] == 0
    assert [next(stream), next(stream)] == expected[:2]
    fails.append(True)
    with pytest.raises(ValueError, match="once"):
        next(stream)
    other = make(rank=(1, 2), batch_size=3)
    other.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert list(islice(iter(other), 4)) == list(islice(stream, 4)) == expected[2:]


@of_two_families
def test_stop_iteration_in_collate_is_an_error(make: Make) -> None:
    with pytest.raises(DatasetError, match="StopIteration must not come out of the collate_fn"):
        next(iter(make(collate_fn=lambda samples: next(iter([])))))


def drawn(rows: list[Any]) -> dict[str, Any]:
    """A collate function that draws from all three generators."""
    return {"rows": rows, "drawn": [random.random(), float(np.random.rand()), torch.rand(1).item()]}


@of_two_families
def test_collate_draws_are_keyed_by_position(make: Make) -> None:
    options = {"collate_fn": drawn, "rank": (0, 2), "batch_size": 3}
    stream = iter(loader := make(**options))
    first, state = next(stream), loader.state_dict()
    rest = [next(stream), next(stream)]
    before = capture_rng()
    assert list(islice(iter(make(**options)), 3)) == [first, *rest], "another loader, with other draws before it"
    resumed = make(**options)
    resumed.load_state_dict(state)
    assert list(islice(iter(resumed), 2)) == rest, "from a state"
    skipped = iter(make(**options))
    skipped.skip_batch()
    assert next(skipped) == rest[0], "behind a batch that is passed over"
    assert len({tuple(batch["drawn"]) for batch in [first, *rest]}) == 3
    assert capture_rng() == before
    assert isinstance(loader, RestartableDataLoader)


# ---- in torch's loaders


@of_two_families
def test_in_torch_s_loaders(make: Make) -> None:
    whole = [list(loader) for loader in [make()] for _ in range(2)]
    loader = make()
    loader.set_epoch(1)
    assert list(torch.utils.data.DataLoader(loader, batch_size=None, num_workers=2)) == whole[1]
    first, again = (StatefulDataLoader(make(), batch_size=None, num_workers=2) for _ in range(2))
    got = list(islice(iter(first), 3))
    again.load_state_dict(first.state_dict())
    assert got + list(again) == whole[0]


@of_two_families
def test_slots_in_torchs_worker_processes(make: Make) -> None:
    """Each slot's batches come in its own order, whichever process makes them."""
    for slot in range(2):
        with assigned(Assignment(0, 1, slot, 2, 0, 1)):
            got = list(torch.utils.data.DataLoader(make(), batch_size=None, num_workers=2))
            assert got == list(make())


@of_two_families
def test_state_resumes_in_worker_processes(make: Make) -> None:
    loader, other = make(), make()
    stream = iter(loader)
    for _ in range(3):
        next(stream)
    other.load_state_dict(loader.state_dict())
    rest = iter(torch.utils.data.DataLoader(other, batch_size=None, num_workers=2))
    # As JSON: torch makes lists of tuples on the way.
    assert json.dumps([next(rest) for _ in range(4)]) == json.dumps([next(stream) for _ in range(4)])


# ---- keys


@of_two_families
def test_keys_are_a_field_of_the_batch(make: Make) -> None:
    loader, other = make(keys="key"), make(batch_size=2)
    batch = next(iter(loader))
    assert batch.keys() == {"batch", "key"}
    batches = list(islice(iter(make(keys="key", collate_fn=lambda rows: {"rows": rows})), 3))
    assert [[other.restore_sample(key) for key in batch["key"]] for batch in batches] == [b["rows"] for b in batches]
    assert batches[0] == {"rows": batch["batch"], "key": batch["key"]}
    taken = make(keys="rows", collate_fn=lambda rows: {"rows": rows})
    for _ in range(2):
        with pytest.raises(
            InvalidArgumentError, match="keys must be a field name that the batch does not have yet, got 'rows'"
        ):
            next(iter(taken))
        assert taken.state_dict()["done"] == 0
    with pytest.raises(StateMismatchError, match="must have the digest"):
        make(seed=10).restore_sample(batch["key"][0])


# ---- refused


def test_state_of_other_seed_is_refused_by_name(make: Make) -> None:
    loader = make(collate_fn=drawn)
    next(iter(loader))
    whole = loader.aggregate_state_dict([loader.state_dict()])
    other = make(seed=10, collate_fn=drawn)
    for state in (loader.state_dict(), whole):
        with pytest.raises(StateMismatchError, match="seed was 9 and is 10"):
            other.load_state_dict(state)
        with pytest.warns(UserWarning, match="seed was 9 and is 10"):
            other.load_state_dict(state, strict=False)
        assert other.state_dict()["done"] == 1
    with pytest.raises(StateMismatchError, match="seed was 9 and is 10"):
        other.deaggregate_state_dict(whole)


@finite
def test_state_of_other_tail_is_refused_by_name(make: Make) -> None:
    with pytest.raises(StateMismatchError, match="tail was 'emit' and is 'drop'"):
        make(tail="drop").load_state_dict(make().state_dict())


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"seed": 4}, "From worker 0 to worker 1.*seed (was )?9 and (is )?4"),
        ({"batch_size": 2}, "topology"),
    ],
)
def test_workers_of_unlike_orders_are_refused(make: Make, changed: dict[str, Any], says: str) -> None:
    states = []
    for number, options in enumerate([{}, changed]):
        with assigned(Assignment(0, 1, number, 2, 0, 1)):
            states.append(make(**options).state_dict())
    with pytest.raises(StateMismatchError, match=says):
        make().aggregate_state_dict(states)
    with pytest.raises(InvalidArgumentError, match="needs the states of all workers, got an empty list"):
        make().aggregate_state_dict([])


@pytest.mark.parametrize("directly", [True, False])
def test_a_sole_workers_state_fits_any_topology(make: Make, directly: bool) -> None:
    alone = make()
    stream = iter(alone)
    for _ in range(3):
        next(stream)
    state, workers = alone.state_dict(), []
    for slot in range(2):
        with assigned(Assignment(0, 1, slot, 2, 0, 1)):
            loader = make()
            loader.load_state_dict(state if directly else loader.deaggregate_state_dict(state))
            workers.append(iter(loader))
    assert [next(workers[step % 2]) for step in range(4)] == [*islice(stream, 4)]


def test_who_makes_the_next_batch_is_saved_again_after_a_change_of_the_batch_size(make: Make) -> None:
    """The launch that changes it begins with the slot whose turn it was, and so must what resumes from that launch.
    Epochs of 40 rows end."""
    cluster = AllWorkers(lambda: make(batch_size=4), (1, 2))
    rows = list(chain.from_iterable(cluster.take(3)))
    for count in (3, 1, 4, 6, 3, 1):
        cluster = AllWorkers(lambda: make(batch_size=2), (1, 2), cluster)
        rows += chain.from_iterable(cluster.take(count))
    whole = AllWorkers(lambda: make(batch_size=4), (1, 1))
    assert rows == list(chain.from_iterable(whole.take(12)))


@finite
def test_one_worker_may_be_an_epoch_behind(make: Make) -> None:
    """The box has had one batch of epoch 1, which the worker in front made."""
    plain = make()
    epochs = [list(plain) for _ in range(2)]
    workers = []
    for slot in range(2):
        with assigned(Assignment(0, 1, slot, 2, 0, 1)):
            workers.append(make())
        assert list(workers[slot]) == epochs[0][slot::2]
    assert next(iter(workers[0])) == epochs[1][0]
    resumed = make()
    resumed.load_state_dict(plain.aggregate_state_dict([loader.state_dict() for loader in workers]))
    assert list(resumed) == epochs[1][1:]


def test_one_workers_state_is_not_that_of_all(make: Make) -> None:
    cluster = AllWorkers(make, (1, 2))
    cluster.take(2)
    state = cluster.workers[0].state_dict()
    with pytest.raises(StateMismatchError, match="or state_after"):
        make().load_state_dict(state)
    for loader in (cluster.workers[1], make()):
        with pytest.raises(StateMismatchError, match="got one worker's"):
            loader.deaggregate_state_dict(state)


SPOILT: list[dict[str, Any]] = [
    *({"epoch": bad} for bad in (-1, 10**30)),
    {"done": "3"},
    *({"start": bad} for bad in (True, -1, -(1 << 62))),
    {"topology": {}},
    {"topology": {"boxes": 0, "workers": 1, "batch": 4}},
    {"first": 1},
    {"others": None, "workers": 1},
    {"format": 0},
    {"order": 3},
]


def test_a_state_that_cannot_be_is_refused(make: Make) -> None:
    loader = make()
    for spoilt in SPOILT:
        with pytest.raises(StateCorruptError):
            loader.load_state_dict({**loader.state_dict(), **spoilt})
    with pytest.raises(StateVersionError):
        loader.load_state_dict({**loader.state_dict(), "format": 4})
    for other in ({}, None, {"model": 3}, [1]):
        with pytest.raises(StateMismatchError, match="got another loader's"):
            loader.load_state_dict(other)


@of_two_families
def test_numbers_of_numpy_are_numbers(make: Make) -> None:
    loader = make(batch_size=np.int64(4), seed=np.int32(9), rank=(np.int64(0), np.int64(1)))
    stream, other = iter(loader), make(batch_size=4)
    next(stream)
    other.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert list(islice(iter(other), 3)) == list(islice(stream, 3))


INVALID: list[tuple[dict[str, Any], str]] = [
    ({"batch_size": None}, "exactly one of batch_size"),
    ({"batch_size": 3, "global_batch_size": 3}, "exactly one of batch_size"),
    ({"batch_size": 0}, "batch_size=0 must give each of 1 boxes at least one row"),
    ({"batch_size": 2.5}, "batch_size must be a whole number, got 2.5"),
    ({"batch_size": None, "global_batch_size": "4"}, "global_batch_size must be a whole number, got '4'"),
    ({"tail": "none"}, "tail must be one of .* got 'none'"),
    ({"seed": 1.0}, "seed must be a whole number, got 1.0"),
    ({"keys": ""}, "keys must be the name of a field to add to each batch, got ''"),
    ({"rank": 0}, "rank must be a pair .*, got 0"),
    ({"rank": (1,)}, r"rank must be a pair .*, got \(1,\)"),
    ({"rank": (0, 1.0)}, "ranks must be a whole number, got 1.0"),
]


def test_settings_that_cannot_be_meant(make: Make) -> None:
    for options, says in INVALID:
        with pytest.raises(InvalidArgumentError, match=says):
            make(**options)
