"""Restore keys: each row of a batch says where it is from, and can be had again."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from listed import Counting, Listed
from opaque_streams import Counter

from penstock.data import LogicalShards
from penstock.data.sharded.protocol import PositionOf, SavedPosition
from penstock.data.sharded.shard_keys import LARGEST
from penstock.data.sharded.shard_loader import ShardLoader
from penstock.proto.errors import DatasetError, InvalidArgumentError, StateCorruptError, StateMismatchError


def loader_of(source: Any, **options: Any) -> ShardLoader:
    return ShardLoader(source, **{"seed": 3, "batch_size": 4, "collate_fn": list, **options})


class Heavy(Listed):
    """Its saved positions are too large for a key."""

    def open(
        self,
        shard: int,
        epoch: int,
        seed: int,
        saved: SavedPosition | None = None,
        position_of: PositionOf | None = None,
    ) -> Any:
        cursor: Any = super().open(shard, epoch, seed, saved, position_of)
        light = cursor.saved_position
        cursor.saved_position = lambda: {**light(), "ballast": bytes(LARGEST)}
        return cursor


@pytest.mark.parametrize(
    "source",
    [Listed([5, 0, 9]), Listed([5, 0, 9], known=False), Heavy([5, 0, 9]), Counting(6)],
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
        if isinstance(source, Heavy):
            assert max(len(key) for _, key in rows) < 200, "the saved position was left out"
        else:
            assert [index for _, index in source.opened] == [int(key.split(".")[2]) for _, key in rows], "no skipping"


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


def test_batches_of_the_source_s_own_have_one_key() -> None:
    loader = ShardLoader(Listed([5]), unbatched=True, keys="key", seed=3)
    batches = list(loader)
    assert [batch["batch"] for batch in batches] == [0, 1, 2, 3, 4]
    assert [loader.restore_sample(batch["key"][0]) for batch in batches] == [0, 1, 2, 3, 4]


def test_padded_rows_have_their_samples_keys() -> None:
    loader = loader_of(Listed([5]), keys="key", tail="pad")
    last = list(loader)[-1]
    assert last["batch"] == [4, 0, 1, 2]
    assert [loader.restore_sample(key) for key in last["key"]] == last["batch"]


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
