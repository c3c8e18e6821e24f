"""A source of a mixture whose data are gone: it is not opened where it has no weight, and named where it has one."""

from __future__ import annotations

from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from penstock.data import LogicalShards, Mapped, Mixture, Schedule, ShardLoader
from penstock.data.sharded.protocol import ShardedSource
from penstock.proto.errors import DatasetError, StateMismatchError

BATCHES = 30


def lines(path: Path) -> list[str]:
    return path.read_text().split()


def source(folder: Path, name: str) -> ShardedSource:
    return Mapped(LogicalShards([partial(lines, folder / name)], shards=2, shuffle=True), str.upper)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("web", "code"):
        (tmp_path / name).write_text(" ".join(f"{name}{number}" for number in range(50)))
    return tmp_path


def loader(folder: Path, weights: Any, by: Any = "samples") -> ShardLoader:
    sources = {name: source(folder, name) for name in ("web", "code")}
    return ShardLoader(Mixture(sources, weights, by=by), batch_size=4, seed=3, collate_fn=list)


def test_a_source_without_weight_is_not_opened(folder: Path) -> None:
    weights = {"web": 0, "code": 1}
    expected = list(islice(loader(folder, weights), BATCHES))
    before = loader(folder, weights)
    batches = iter(before)
    begun = [next(batches) for _ in range(3)]
    state = before.state_dict()
    (folder / "web").unlink()
    assert list(islice(loader(folder, weights), BATCHES)) == expected
    again = loader(folder, weights)
    again.load_state_dict(state)
    assert begun + list(islice(again, BATCHES - 3)) == expected
    loader(folder, weights).load_state_dict(again.state_dict())


def test_a_retired_source_is_not_opened(folder: Path) -> None:
    weights = Schedule({0: {"web": 1, "code": 1}, 40: {"code": 1}})
    expected = list(islice(loader(folder, weights), BATCHES))
    before = loader(folder, weights)
    begun = list(islice(before, 12))
    state = before.state_dict()
    (folder / "web").unlink()
    again = loader(folder, weights)
    again.load_state_dict(state)
    assert begun + list(islice(again, BATCHES - 12)) == expected
    with pytest.raises(
        DatasetError, match=r"piece .* cannot be opened: .*No such file.*web.*Restore it, or give .* weight 0"
    ):
        list(islice(loader(folder, weights), 3))


def test_other_data_and_a_source_with_weight_are_refused(folder: Path) -> None:
    weights = Schedule({0: {"web": 1, "code": 1}, 40: {"code": 1}})
    before = loader(folder, weights)
    batches = iter(before)
    states = []
    for _ in range(12):
        next(batches)
        states.append(before.state_dict())
    (folder / "web").rename(folder / "gone")
    with pytest.raises(StateMismatchError, match=r"No such file"):
        loader(folder, weights).load_state_dict(states[3])  # it is read again before sample 40
    (folder / "web").write_text("other data")
    with pytest.raises(StateMismatchError):
        loader(folder, weights).load_state_dict(states[-1])
