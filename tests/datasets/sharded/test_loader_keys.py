"""Restore keys: each row of a batch says where it is from, and can be had again."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from listed import Counting, Listed
from opaque_streams import Counter

from penstock.data import LogicalShards
from penstock.data.sharded import shard_keys
from penstock.data.sharded.shard_loader import ShardLoader
from penstock.proto.errors import DatasetError, InvalidArgumentError, StateCorruptError, StateMismatchError


def loader_of(source: Any, **options: Any) -> ShardLoader:
    return ShardLoader(source, **{"seed": 3, "batch_size": 4, "collate_fn": list, **options})


@pytest.mark.parametrize(
    "source",
    [Listed([5, 0, 9]), Listed([5, 0, 9], known=False), Counting(6)],
    ids=lambda s: type(s).__name__,
)
def test_each_sample_can_be_had_again(source: Any) -> None:
    loader = loader_of(source, keys="key", rank=(1, 2), partitions=2 if source.endless else 1)
    for _ in range(1 if source.endless else 2):
        stream = iter(loader)
        rows: list[tuple[Any, str]] = []
        while len(rows) < 13 and (batch := next(stream, None)) is not None:
            rows += zip(batch["batch"], batch["key"], strict=True)
        other = loader_of(source, partitions=2 if source.endless else 1)
        source.opened.clear()
        assert [other.restore_sample(key) for _, key in rows] == [sample for sample, _ in rows]
        assert [index for _, index in source.opened] == [int(key.split(".")[2]) for _, key in rows], "no skipping"


def test_large_positions_are_not_in_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_keys, "LARGEST", 0)
    batch = next(iter(loader_of(Listed([5, 0, 9]), keys="key")))
    source = Listed([5, 0, 9])
    assert [loader_of(source).restore_sample(key) for key in batch["key"]] == batch["batch"]
    assert {index for _, index in source.opened} == {0}


def test_key_does_not_depend_on_snapshots() -> None:
    """A batch that a worker makes again after another one died must be the one that was delivered, keys and all. Pieces
    that are closed for others have their state taken then, and others at other times."""

    def keyed(max_open: int) -> list[Any]:
        pieces = LogicalShards([partial(Counter, 5, 10 * n) for n in range(3)], shards=3, max_open=max_open)
        return list(loader_of(pieces, keys="key"))

    assert keyed(1) == keyed(3)
    batches = keyed(1)
    other = loader_of(LogicalShards([partial(Counter, 5, 10 * n) for n in range(3)], shards=3))
    for batch in batches:
        assert [other.restore_sample(key) for key in batch["key"]] == batch["batch"]


def test_of_batches_that_grew_and_of_a_later_pass() -> None:
    """Pass an endless source the same position of a sample when it is read again by its key."""
    loader = loader_of(Counting(6), keys="key", partitions=3, batch_size=4)
    rows: list[tuple[Any, str]] = []
    for size in (4, 7, 5):
        grown = loader_of(Counting(6), keys="key", partitions=3, batch_size=size)
        grown.load_state_dict(grown.deaggregate_state_dict(loader.aggregate_state_dict([loader.state_dict()])))
        stream = iter(grown)
        for batch in (next(stream), next(stream), next(stream)):
            rows += zip(batch["batch"], batch["key"], strict=True)
        loader = grown
    assert [place for (_, _, place, _), _ in rows] == list(range(3 * (4 + 7 + 5)))
    loader.set_epoch(2)
    batch = next(iter(loader))
    rows += zip(batch["batch"], batch["key"], strict=True)
    assert rows[-1][0][3] != rows[0][0][3], "another epoch has another seed"
    other = loader_of(Counting(6), partitions=3)
    assert [other.restore_sample(key) for _, key in rows] == [sample for sample, _ in rows]


def test_key_of_another_source_is_refused() -> None:
    key = next(iter(loader_of(Listed([5]), keys="key")))["key"][3]
    for other in (loader_of(Listed([6])), loader_of(Listed([5]), seed=4), loader_of(Listed([5, 5]))):
        with pytest.raises(StateMismatchError, match="must have the digest"):
            other.restore_sample(key)
    assert loader_of(Listed([5]), batch_size=2, tail="pad", rank=(1, 2)).restore_sample(key) == 3


def test_a_key_that_cannot_be_is_refused() -> None:
    source = Listed([5])
    loader = loader_of(source, keys="key")
    key = next(iter(loader))["key"][3]
    epoch, shard, index, order, more = key.split(".")
    for text in ("", "key", "1.2.3", f"{epoch}.-1.{index}.{order}.{more}", f"{epoch}.7.{index}.{order}.{more}", None):
        with pytest.raises(InvalidArgumentError):
            loader.restore_sample(text)  # type: ignore[arg-type]
    for spoilt in ("", "?", more[:-8], more[:40] + ("B" if more[40] == "A" else "A") + more[41:]):
        with pytest.raises(StateCorruptError, match="restore key is damaged"):
            loader.restore_sample(f"{epoch}.{shard}.{index}.{order}.{spoilt}")
    endless = next(iter(loader_of(Counting(1), keys="key")))["key"][0]
    with pytest.raises(InvalidArgumentError, match="must have a shard below 1, and a block only"):
        loader.restore_sample(".".join([epoch, shard, index, order, endless.split(".")[4]]))
    source.counted = lambda epoch: [3]  # type: ignore[method-assign]
    with pytest.raises(DatasetError, match="shard 0 of epoch 0 must have the sample 3"):
        loader.restore_sample(key)
