"""Pieces that are opened and closed, and what is said of those that are not as they should be."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import join_all
from given_shards import rest

from penstock.data import Filtered, Grouped, LogicalShards, Mapped, Repeated, ShardLoader
from penstock.data.sharded.protocol import SavedPosition
from penstock.proto.errors import DatasetError, InvalidArgumentError, StateCorruptError

SEED = 1


class Files:
    """Pieces that know how many of them are open."""

    def __init__(self, lengths: list[int], *, indexable: bool = True) -> None:
        self.lengths, self.indexable = lengths, indexable
        self.now: list[int] = []
        self.most = self.times = 0

    def pieces(self) -> list[Callable[[], Any]]:
        return [partial(self._open, number) for number in range(len(self.lengths))]

    def _open(self, number: int) -> Any:
        self.now.append(number)
        self.times += 1
        self.most = max(self.most, len(self.now))
        return (_Table if self.indexable else _Along)(self, number)


class _Along:
    def __init__(self, files: Files, number: int) -> None:
        self.files, self.number = files, number

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return ((self.number, index) for index in range(self.files.lengths[self.number]))

    def close(self) -> None:
        self.files.now.remove(self.number)


class _Table(_Along):
    def __len__(self) -> int:
        return self.files.lengths[self.number]

    def __getitem__(self, index: int) -> tuple[int, int]:
        if index >= len(self):
            raise IndexError("beyond the last")
        return self.number, index


def in_turn(source: LogicalShards) -> list[Any]:
    """All samples, the shards read in turn as a loader does."""
    cursors = [source.open(shard, 0, SEED) for shard in range(source.num_shards)]
    got = [sample for row in itertools.zip_longest(*cursors) for sample in row if sample is not None]
    for cursor in cursors:
        cursor.close()
    return got


# ---- open and closed


def test_the_least_recently_used_goes_first() -> None:
    files = Files([2, 2, 2])
    source = LogicalShards(files.pieces(), shards=3, max_open=2)
    cursors = [source.open(shard, 0, SEED) for shard in range(3)]
    for shard, opened in [(0, [0]), (1, [0, 1]), (0, [0, 1]), (2, [0, 2]), (1, [2, 1])]:
        next(cursors[shard])
        assert files.now == opened
    for cursor in cursors:
        assert files.now
        cursor.close()
    assert files.now == []


def test_closed_iterables_resume_where_they_were() -> None:
    files = Files([3, 4, 2, 3], indexable=False)
    source = LogicalShards(files.pieces(), shards=4, max_open=2)
    with pytest.warns(UserWarning, match=r"piece \d is read again from its beginning repeatedly.*max_open") as caught:
        got = in_turn(source)
    assert len(caught) == 1, "once"
    assert sorted(got) == [(number, index) for number, length in enumerate([3, 4, 2, 3]) for index in range(length)]
    assert files.most == 2
    assert files.now == []


def test_a_forked_child_opens_its_own(tmp_path: Path) -> None:
    """Open pieces anew in a forked child, because a file that its parent opened has one position for both."""
    path = tmp_path / "rows"
    path.write_text("".join(f"{number}\n" for number in range(100)))

    class Lines(Sequence[str]):
        def __init__(self) -> None:
            self.opener, self.file = os.getpid(), path.open("rb", buffering=0)

        def __len__(self) -> int:
            return 100

        def __getitem__(self, index: Any) -> Any:
            assert self.opener == os.getpid()
            self.file.seek(sum(len(f"{number}\n") for number in range(index)))
            return self.file.read(3).split()[0]

        def close(self) -> None:
            self.file.close()

    source = LogicalShards([Lines], shards=1)
    cursor = source.open(0, 0, 0)
    assert next(cursor) == b"0"

    def work() -> None:
        assert list(source.open(0, 0, 0)) == [b"%d" % number for number in range(100)]

    join_all(work, work)
    assert next(cursor) == b"1"
    cursor.close()


def test_what_a_lost_cursor_held_is_closed() -> None:
    for indexable in (True, False):
        files = Files([5, 5], indexable=indexable)
        source = LogicalShards(files.pieces(), shards=1)
        next(source.open(0, 0, SEED))
        assert files.now == []


# ---- what is no piece, and settings


class Frame:
    iloc = None

    def __len__(self) -> int:
        return 2

    def __getitem__(self, name: str) -> int:
        return 0


@pytest.mark.parametrize(
    ("pieces", "options", "message"),
    [
        ([], {}, "pieces must have at least one piece"),
        ([[1], (x for x in [1])], {}, "piece 1 must be readable repeatedly, got generator"),
        (["a.txt"], {}, "piece 0 is a str, not a sequence of records"),
        ([Frame()], {}, "piece 0 is a Frame, which iterates over columns"),
        ([5], {}, "piece 0 must be indexable or iterable.* got int"),
        ([[1]], {"shards": 0}, "shards must be at least 1, got 0"),
        ([[1], [2]], {"names": ["a", "b", "c"]}, "names must have one entry for each of 2 pieces, got 3"),
        ([[1]], {"counts": [-1]}, "counts must be at least 0, got -1"),
        (torch.zeros(3, 2), {}, "pieces must be a list .* got Tensor"),
    ],
)
def test_what_cannot_be_meant(pieces: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        LogicalShards(pieces, **{"shards": 1, **options})


def test_counts_that_do_not_match() -> None:
    with pytest.raises(DatasetError, match=r"piece 1 \(b\) must have 4 records, as counts says, got 3"):
        LogicalShards([[1], [1, 2, 3]], shards=1, counts=[1, 4], names=["a", "b"])
    with pytest.raises(DatasetError, match="piece 1 must have 1 records, as counts says, got 2"):
        LogicalShards([lambda: iter([1]), [5, 6]], shards=1, counts=[1, 1])
    files = Files([5, 6])
    source = LogicalShards(files.pieces(), shards=1, counts=[5, 7])
    with pytest.raises(DatasetError, match="piece 1 must have 7 records, as counts says, got 6"):
        rest(source)


@pytest.mark.parametrize("said", [3, 5])
def test_iterable_of_another_length_than_counts(said: int) -> None:
    source = LogicalShards([lambda: iter(range(4)), lambda: iter([9])], shards=1, counts=[said, 1])
    message = (
        "must have 5 records, as counts says, got 4" if said > 4 else "must have 3 records, as counts says, got more"
    )
    cursor = source.open(0, 0, SEED)
    for _ in range(2 if said == 3 else 4):  # with the last record that counts knows it is seen that there are more
        next(cursor)
    for _ in range(2):
        with pytest.raises(DatasetError, match=f"piece 0 {message}"):
            next(cursor)
    cursor.close()


@pytest.mark.parametrize(
    ("counts", "why"), [(None, "it had 3 records when the source was made"), ([3], "counts says that it has 3")]
)
def test_a_table_that_became_shorter(counts: list[int] | None, why: str) -> None:
    records = [1, 2, 3]
    source = LogicalShards([records], shards=1, names=["table"], counts=counts)
    records.pop()
    with pytest.raises(DatasetError, match=rf"piece 0 \(table\) must have record 2, because {why}"):
        rest(source)


# ---- going on with pieces that are not what they were


def along(*pieces: list[int], **options: Any) -> LogicalShards:
    names = [f"{number}.txt" for number in range(len(pieces))]
    return LogicalShards([partial(iter, own) for own in pieces], shards=1, names=names, **options)


def test_description_shows_another_list_of_pieces() -> None:
    one, other = along(*[[1]] * 12).described(), along(*[[1]] * 11).described()
    assert (one["pieces"], other["pieces"]) == (12, 11)
    many = [[number] for number in range(40)]
    whole = LogicalShards(many, shards=2, names=[f"{number}.txt" for number in range(40)]).described()
    assert whole["records"] == 40
    assert whole["names"].startswith("40, digest ")
    renamed = LogicalShards(many, shards=2, names=[f"{number}.text" for number in range(40)]).described()
    assert [name for name in whole if whole[name] != renamed[name]] == ["names"]
    swapped = LogicalShards([[1, 2], [3]], shards=2).described()
    assert swapped["counts"] == [2, 1] != LogicalShards([[3], [1, 2]], shards=2).described()["counts"]


@pytest.mark.parametrize(
    "position",
    [
        5,
        {"turn": 0},
        {"turn": 3, "piece": None, "stream": None},
        {"turn": 0, "piece": 1, "stream": None},
        {"turn": 0, "piece": 0, "stream": {"passed": 1}},
        {"turn": 0, "piece": 0, "stream": 7},
    ],
)
def test_damaged_position_is_refused(position: SavedPosition) -> None:
    with pytest.raises(StateCorruptError):
        along([1], [2]).open(0, 0, SEED, position)


# ---- mistakes that would go unseen


class EndsAt(list[int]):
    """A table whose record 3 raises what iterators end with."""

    def __getitem__(self, index: Any) -> Any:
        return next(iter(())) if index == 3 else index


def ends_at(number: int) -> bool:
    return bool(next(iter(()))) if number == 3 else True


def numbers() -> LogicalShards:
    return LogicalShards([list(range(8))], shards=1)


@pytest.mark.parametrize(
    ("loader", "out_of"),
    [
        (
            lambda: ShardLoader(Repeated(LogicalShards([EndsAt(range(8))], shards=1)), batch_size=2),
            "record 3 of piece 0",
        ),
        (lambda: ShardLoader(Repeated(Mapped(numbers(), ends_at)), batch_size=2), "Mapped ends_at: shard 0, epoch 0"),
        (
            lambda: ShardLoader(Filtered(numbers(), ends_at), batch_size=2),
            "Filtered ends_at: shard 0, epoch 0, sample 3",
        ),
        (
            lambda: ShardLoader(Grouped(numbers(), ends_at, 2, window=4), unbatched=True),
            "the key of Grouped ends_at",
        ),
    ],
)
def test_users_stop_iteration_is_an_error(loader: Callable[[], Any], out_of: str) -> None:
    with pytest.raises(DatasetError, match=f"StopIteration must not come out of {out_of}"):
        list(itertools.islice(loader(), 4))


def test_used_generator_is_an_error() -> None:
    once = (number for number in range(3))
    with pytest.raises(DatasetError, match=r"piece 2 must be a new iterable .* got a generator that was read before"):
        rest(LogicalShards([lambda: iter([7]), lambda: once, lambda: once], shards=1))


@pytest.mark.parametrize(
    ("piece", "message"),
    [
        ({"a", "b"}, "piece 0 is a set, whose order differs between processes"),
        (lambda: "all of a file", "piece 0 opens a str, not a sequence of records"),
    ],
)
def test_opened_pieces_are_checked_like_given(piece: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        rest(LogicalShards([piece], shards=1))
    assert rest(LogicalShards([{"a": 1}.keys()], shards=1)) == ["a"]


def test_what_cannot_be_opened_is_named() -> None:
    source = LogicalShards([lambda: iter([1]), partial(open, "/nowhere/at/all")], shards=1, names=["a", "b"])
    with pytest.raises(FileNotFoundError) as caught:
        rest(source)
    assert caught.value.__notes__ == ["raised by the function that opens piece 1 (b)"]
