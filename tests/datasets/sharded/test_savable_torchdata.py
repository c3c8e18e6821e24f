"""Loaders and graphs of torchdata as streams, with worker processes of their own. See test_contract.py, too."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch.utils.data
from opaque_streams import Numbers, shuffled_loader
from torchdata.nodes import IterableWrapper, Loader, Mapper

from penstock.data import Savable
from penstock.proto.state import snapshot_cadence
from penstock.proto.state.codec import decode_state, encode_state

SEED = 3


def split(make: Callable[[int], Any], place: int) -> tuple[bytes, bytes]:
    """A stream in one go, and with a save and resume at a place; encoded."""
    source = Savable(make, shards=1, snapshot_every=1)
    cursor = source.open(0, 0, SEED)
    whole = list(cursor)
    cursor.close()
    first = source.open(0, 0, SEED)
    got = list(itertools.islice(first, place))
    position = decode_state(encode_state(first.saved_position()))
    first.close()
    second = source.open(0, 0, SEED, position)
    got += list(second)
    second.close()
    assert len(whole) > place
    return encode_state(got), encode_state(whole)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_cadence, "SHARE", 1.0)


def test_graph_loader_that_restarts_at_its_end(eager: None) -> None:
    """Its state behind the last sample would lead to the next epoch."""
    source = Savable(lambda shard: Loader(IterableWrapper(range(5))), shards=1, snapshot_every=1)
    cursor = source.open(0, 0, SEED)
    assert cursor.skip(9) == 5
    position = cursor.saved_position()
    cursor.close()
    again = source.open(0, 0, SEED, position)
    assert list(again) == []
    again.close()


def test_graph_loader_that_draws_is_read_again(eager: None) -> None:
    """Loading its state draws a sample at once, before the generators are as they were: that is seen, and said."""
    with pytest.warns(UserWarning, match="are read again"):
        got, whole = split(lambda shard: Loader(Mapper(IterableWrapper(range(9)), lambda n: (n, random.random()))), 4)
    assert got == whole


def test_loader_with_stateless_worker_processes() -> None:
    """The workers are seeded from the generators at `iter`, and those are as they were."""
    numbers = Numbers(24)
    got, whole = split(lambda shard: torch.utils.data.DataLoader(numbers, batch_size=4, shuffle=True, num_workers=1), 3)
    assert got == whole


def test_draws_of_worker_processes_are_unsaved(eager: None) -> None:
    # Python 3.12 and newer also warn of the fork.
    also = r"'set_vital' is deprecated|use of fork\(\)"
    with pytest.warns((UserWarning, DeprecationWarning), match=f"Check whether it counts|{also}") as caught:
        got, whole = split(lambda shard: shuffled_loader(workers=1), 3)
    assert got == whole
    assert any("Check whether it counts" in str(warning.message) for warning in caught)
