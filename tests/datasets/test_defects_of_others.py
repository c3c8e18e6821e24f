"""What was measured to go wrong in other systems, each as one plain case that must come out right here.

Defects that a test of the part itself shows stand with that part, under names of their own: offsets that are lost by a
second save, float fractions, open lines, mixing counters, padding counted as samples, duplicated leaves.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from penstock.data import (
    LogicalShards,
    MapLoader,
    MDSWriter,
    ShardLoader,
    StreamingDataset,
    StreamingLoader,
    WindowShuffled,
)
from penstock.proto.errors import StateMismatchError
from penstock.proto.state.assignment import Assignment, assigned


def records(file: int, count: int) -> Iterator[int]:
    yield from range(100 * file, 100 * file + count)


def files(count: int, length: int, shards: int, shuffle: bool = True) -> LogicalShards:
    return LogicalShards([partial(records, file, length) for file in range(count)], shards=shards, shuffle=shuffle)


def test_a_shuffle_without_a_seed_takes_the_run_s() -> None:
    """It failed."""

    def order(seed: int) -> list[Any]:
        with assigned(Assignment(0, 1, 0, 1, seed, 1)):
            return [row for batch in MapLoader(range(50), batch_size=5, shuffle=True, collate_fn=list) for row in batch]

    assert sorted(order(3)) == list(range(50))
    assert order(3) == order(3) != order(4)


def test_other_shuffle_buffer_names_both_numbers() -> None:
    """It was accepted silently."""

    def made(window: int) -> ShardLoader:
        return ShardLoader(WindowShuffled(files(4, 10, 2), window), batch_size=4, seed=1, collate_fn=list)

    with pytest.raises(StateMismatchError, match=r"source\.window was 5 and is 6"):
        made(6).load_state_dict(made(5).state_dict())
    with pytest.raises(StateMismatchError, match=r"seed was 1 and is 2"):
        ShardLoader(WindowShuffled(files(4, 10, 2), 5), batch_size=4, seed=2).load_state_dict(made(5).state_dict())


def lines_of(path: Path) -> Iterator[int]:
    with path.open() as lines:
        yield from map(int, lines)


def logical(folder: Path) -> ShardLoader:
    """Of text files, named from the folder on."""
    paths = sorted(folder.glob("*.txt"))
    source = LogicalShards(
        [partial(lines_of, path) for path in paths],
        shards=2,
        names=[str(path.relative_to(folder)) for path in paths],
        shuffle=True,
    )
    return ShardLoader(source, batch_size=4, seed=1, collate_fn=list)


def streaming(folder: Path) -> StreamingLoader:
    return StreamingLoader(StreamingDataset(local=folder), batch_size=4, shuffle=True, seed=1, collate_fn=list)


@pytest.mark.parametrize("made", [logical, streaming])
def test_moved_files_are_the_same_files(tmp_path: Path, made: Callable[[Path], Any]) -> None:
    """A strict load refused data that lay in another folder."""
    with MDSWriter(tmp_path / "a", {"number": "int"}, size_limit=200, hashes=["xxh64"]) as writer:
        for number in range(30):
            writer.write({"number": number})
    for file in range(3):
        (tmp_path / "a" / f"{file}.txt").write_text("".join(f"{line}\n" for line in records(file, 10)))
    whole, first = list(made(tmp_path / "a")), made(tmp_path / "a")
    begun = iter(first)
    got = [next(begun), next(begun)]
    state = json.loads(json.dumps(first.state_dict()))
    del begun
    (tmp_path / "a").rename(tmp_path / "b")
    moved = made(tmp_path / "b")
    moved.load_state_dict(state)
    assert got + list(moved) == whole
    assert str(tmp_path) not in json.dumps(state)


def test_files_named_by_full_path_may_not_move() -> None:
    """On purpose: a name says which data it is."""

    def made(folder: str) -> LogicalShards:
        return LogicalShards([[1, 2], [3]], shards=1, names=[f"{folder}/0.txt", f"{folder}/1.txt"])

    state = ShardLoader(made("/data"), batch_size=1).state_dict()
    with pytest.raises(StateMismatchError, match=r"names.* was "):
        ShardLoader(made("/mnt"), batch_size=1).load_state_dict(state)
