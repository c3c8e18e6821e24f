"""A state is loaded where the same data lie in another folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from penstock.data import (
    LogicalShards,
    MDSWriter,
    ShardLoader,
    StreamingDataset,
    StreamingLoader,
)


def records(file: int, count: int) -> Iterator[int]:
    yield from range(100 * file, 100 * file + count)


def lines_of(path: Path) -> Iterator[int]:
    with path.open() as lines:
        yield from map(int, lines)


def logical(folder: Path) -> ShardLoader:
    """Return a loader of text files that are named from the folder on."""
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
