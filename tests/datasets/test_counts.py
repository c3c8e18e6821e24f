"""Counts of samples by source and key: equal to a recount of what was handed out, over kills and topologies."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from all_workers import AllWorkers, saved
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from layer_stacks import documents, stacks
from tests.datasets.sharded.contract import SEED, Fleet, Make

from penstock.data import (
    Balance,
    Counts,
    MapLoader,
    Mapped,
    MDSWriter,
    Mixture,
    Packed,
    Repeated,
    Stream,
    StreamingDataset,
    StreamingLoader,
)
from penstock.data.sharded.protocol import cursor_origin
from penstock.proto.errors import (
    DatasetError,
    InvalidArgumentError,
    StateCorruptError,
    StateMismatchError,
)
from penstock.proto.state.counts import (
    MOST_GROUPS,
    OTHER,
    SAMPLES,
    Rows,
    Tally,
    by_key,
    by_source,
    counts_part,
    cut_name,
    imbalance_of,
    merged_rows,
    new_row,
    read_changes,
    rows_of,
    saved_rows,
)

SHAPES = st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2), (3, 1)])
CHAIN = st.lists(st.tuples(SHAPES, st.integers(0, 7), st.booleans()), min_size=1, max_size=5)
"""Topologies, the steps on each, and whether a worker is lost there."""


class Words:
    """Map-style samples of known keys and lengths."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, number: int) -> dict[str, Any]:
        words = [number] * (number % 7)
        return {"number": number, "tokens": words, "language": "en" if number % 3 else "de", "cut": number % 5 == 0}


def counts_of(fleet: AllWorkers) -> Rows:
    """The counts in a state; those of the workers' tallies must be the same."""
    rows = rows_of(fleet.state())
    assert rows is not None
    assert rows == merged_rows(loader.tally.rows for loader in fleet.workers)
    return rows


def runs(fleet: AllWorkers, steps: int, loses: bool) -> list[Any]:
    got = fleet.take(steps)
    if loses and steps:
        fleet.lose(steps % len(fleet.workers))
    return got


@settings(max_examples=4, deadline=None)
@given(CHAIN, st.integers(0, 20), st.integers(0, 30))
def test_counts_of_a_map_are_a_recount(chain: list[Any], first: int, skipped: int) -> None:
    def made() -> MapLoader:
        counts = Counts(by="language", tokens="tokens", truncated="cut")
        skip = [range(first, first + skipped)]
        return MapLoader(
            Words(), global_batch_size=6, shuffle=True, seed=4, skip=skip, counts=counts, collate_fn=list, reseed=False
        )

    fleet: AllWorkers | None = None
    samples: list[Any] = []
    for shape, steps, loses in chain:
        fleet = AllWorkers(made, shape, fleet)
        samples += [sample for batch in runs(fleet, steps, loses) for sample in batch]
        rows, languages = counts_of(fleet), Counter(sample["language"] for sample in samples)
        found = by_key(rows)
        for language, count in languages.items():
            own = [sample for sample in samples if sample["language"] == language]
            lengths = Counter(1 << len(sample["tokens"]).bit_length() >> 1 for sample in own)
            assert (found[language].samples, found[language].lengths) == (count, dict(lengths))
            assert found[language].tokens == sum(len(sample["tokens"]) for sample in own)
            assert found[language].truncated == sum(sample["cut"] for sample in own)
        assert sum(own.samples for own in found.values()) == len(samples)
        assert sum(own.skipped for own in found.values()) <= skipped
        if len(samples) > first:  # a batch was handed out after the skipped samples
            assert sum(own.skipped for own in found.values()) == min(skipped, 60 - first)


@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(stacks(), CHAIN, st.integers(3, 6))
def test_counts_of_any_stack_are_those_of_one_worker(make: Make, chain: list[Any], batch: int) -> None:
    options: dict[str, Any] = {"global_batch_size": batch, "tail": "drop", "counts": Counts(tokens=len)}
    whole, expected, rows = Fleet(make, (1, 1), **options), [Rows()], 0
    with suppress(DatasetError):  # an epoch of a small source may have no batch, or a shard nothing to repeat
        for _ in range(sum(steps for _, steps, _ in chain)):
            whole.take(1)
            expected.append(counts_of(whole))
    assume(len(expected) > sum(steps for _, steps, _ in chain))
    fleet: Fleet | None = None
    for shape, steps, loses in chain:
        fleet = Fleet(make, shape, fleet, **options)
        runs(fleet, steps, loses)
        rows += steps
        assert counts_of(fleet) == expected[rows]
    assert sum(row[SAMPLES] for row in expected[rows].values()) == rows * batch


PACKINGS: dict[str, dict[str, Any]] = {
    "in order": {"pad": -1},
    "by best fit with labels": {"pad": -1, "split": False, "window": 8, "labels": True, "shift": False},
    "truncated": {"pad": -1, "split": False, "window": 8, "long": "truncate", "labels": True, "shift": True},
}


@pytest.mark.parametrize("packing", PACKINGS)
def test_counts_of_packed_lines_are_a_recount(packing: str) -> None:
    """Each token for its source, and each document without tokens once, over kills and other numbers of workers."""
    options, length, windows = PACKINGS[packing], 6, 5

    def some(document: Any) -> Any:
        return document if len(document) > 3 else []

    def made() -> Any:
        corpora = [Mapped(documents(30, first=10 * source), some) for source in range(2)]
        return Mixture([Repeated(corpora[0]), Repeated(corpora[1])], [2, 1], names=["a", "b"])

    def packed() -> Any:
        return Packed(made(), length=length, **options)

    cursor, count = packed().open(0, 0, SEED), 0
    while cursor.saved_position().get("window", count // 8) < windows:
        next(cursor)
        count += 1
    fleet: Fleet | None = None
    lines: list[Any] = []
    for workers, steps in ((1, 4), (3, 5), (2, count - 9)):
        fleet = Fleet(packed, (1, workers), fleet, global_batch_size=1, counts=Counts())
        lines += [line for batch in runs(fleet, steps, workers == 3) for line in batch]
    assert fleet is not None
    found = by_source(counts_of(fleet))
    values = [line["tokens"] if isinstance(line, dict) else line for line in lines]
    names = {0: "a", 1: "b"}
    tokens = Counter(names[int(token) // 10_000] for line in values for token in line if token >= 0)
    assert {name: own.tokens for name, own in found.items() if own.tokens} == tokens
    assert {name: own.samples for name, own in found.items() if own.samples} == Counter(
        names[int(line[0]) // 10_000] for line in values
    )
    read, given, expected = made().open(0, 0, SEED), 0, Counter[str]()
    held: Counter[str] = Counter()
    for number, document in enumerate(read):
        if number == 8 * windows if "window" in options else given >= length * count:
            break
        if len(document):
            given += len(document)
            expected, held = expected + held, Counter()
        else:
            held[cursor_origin(read).source] += 1
    expected += held if "window" in options else Counter()
    assert expected
    assert {name: own.skipped for name, own in found.items() if own.skipped} == expected


@pytest.mark.parametrize(("boxes", "counted"), [(2, [1, 1]), (3, [1, 0, 0])])
def test_counts_of_an_only_worker_go_to_one_box(boxes: int, counted: list[int]) -> None:
    """A box without others beside it knows only its own counts; as many boxes as before have one state each."""

    def made(rank: tuple[int, int]) -> MapLoader:
        return MapLoader(Words(), global_batch_size=6, rank=rank, counts=Counts(), collate_fn=list, reseed=False)

    first = made((0, 2))
    rows = len(next(iter(first)))
    loaders = [made((box, boxes)) for box in range(boxes)]
    for loader in loaders:
        loader.load_state_dict(saved(first.state_dict()))
    found = [sum(row[SAMPLES] for row in loader.tally.rows.values()) for loader in loaders if loader.tally]
    assert found == [rows * count for count in counted]


def test_samples_of_streams_are_counted_by_their_folders(tmp_path: Path) -> None:
    for name, samples in (("web", 30), ("code", 10)):
        with MDSWriter(tmp_path / name, columns={"tokens": "ndarray:int32"}) as writer:
            for number in range(samples):
                writer.write({"tokens": np.full(1 + number % 5, len(name), np.int32)})
    dataset = StreamingDataset(streams=[Stream(local=tmp_path / "web"), Stream(local=tmp_path / "code")])
    loader = StreamingLoader(
        dataset, batch_size=8, shuffle=True, seed=2, counts=Counts(), collate_fn=list, fetch_threads=1
    )
    list(loader)
    assert loader.tally is not None
    found = by_source(loader.tally.rows)
    assert {name: own.samples for name, own in found.items()} == {"web": 30, "code": 10}
    assert {name: own.tokens for name, own in found.items()} == {"web": 90, "code": 30}
    assert found["web"].wanted == (0.75, "samples")
    assert loader.last_samples() == [range(32, 40)]


@pytest.mark.parametrize(("over_steps", "report"), [(1, True), (3, False)])
def test_a_box_counts_the_rows_that_it_was_dealt(over_steps: int, report: bool) -> None:
    """And how much more than the mean the most expensive box of a step costs."""
    costs = np.random.default_rng(0).lognormal(0, 1, 60)
    boxes = [
        MapLoader(
            range(60),
            global_batch_size=12,
            shuffle=True,
            seed=1,
            rank=(box, 3),
            balance=Balance(costs, over_steps, report=report),
            counts=Counts(by=str, tokens=int),
            collate_fn=list,
        )
        for box in range(3)
    ]
    ratios = []
    for step, batches in enumerate(zip(*boxes, strict=True), 1):
        sums = [float(costs[rows].sum()) for rows in batches]
        ratios.append(max(sums) / (sum(sums) / 3))
        for loader, rows in zip(boxes, batches, strict=True):
            assert loader.last_samples() == [range(12 * step - 12, 12 * step)]
            last = by_key(loader.tally.last if loader.tally else {})
            assert {key: own.tokens for key, own in last.items()} == {str(row): row for row in rows}
    assert [sum(own.samples for own in by_key(loader.tally.rows).values()) for loader in boxes if loader.tally] == [
        20
    ] * 3
    for loader in boxes:
        assert loader.tally
        assert imbalance_of(loader.tally.rows) == pytest.approx(np.mean(ratios), abs=1e-4)
        assert imbalance_of(saved_rows(loader.state_dict()["counts"]["rows"])) == imbalance_of(loader.tally.rows)
    assert imbalance_of({}) is None


def test_counts_go_on_in_another_version(tmp_path: Path) -> None:
    """A state leads back to its version, and "newest" to the next one at the epoch's end: the counts go with it."""

    def append(first: int) -> None:
        with MDSWriter(tmp_path, columns={"number": "int"}, append=True) as writer:
            for number in range(first, first + 24):
                writer.write({"number": number})

    def made() -> StreamingLoader:
        dataset = StreamingDataset(local=tmp_path, version="newest")
        counts = Counts(tokens="number")
        return StreamingLoader(dataset, global_batch_size=6, shuffle=True, seed=1, counts=counts, collate_fn=list)

    append(0)
    fleet: AllWorkers | None = None
    got: list[Any] = []
    for shape, steps, version in (((1, 1), 2, 1), ((2, 1), 1, 1), ((1, 2), 1, 1), ((1, 1), 2, 2)):
        fleet = AllWorkers(made, shape, fleet)
        assert {worker.dataset.versions[0] for worker in fleet.workers} == {version}
        got += [sample["number"] for batch in fleet.take(steps) for sample in batch]
        found = by_source(counts_of(fleet))
        assert {(own.samples, own.tokens) for own in found.values()} == {(len(got), sum(got))}
        if len(got) == 12:
            append(24)


def test_state_without_counts_and_with_others() -> None:
    def made(**options: Any) -> MapLoader:
        return MapLoader(Words(), batch_size=5, seed=1, collate_fn=list, **options)

    plain, counted = made(), made(counts=Counts(by="language"))
    for loader in (plain, counted):
        next(iter(loader))
    assert callable(plain.advance_state)
    assert not callable(counted.advance_state)
    later = made(counts=Counts(by="language"))
    with pytest.warns(UserWarning, match="so only later batches are counted"):
        later.load_state_dict(saved(plain.state_dict()))
    with pytest.warns(UserWarning, match="which end here"):
        made().load_state_dict(saved(counted.state_dict()))
    other = made(counts=Counts(by="number"))
    with pytest.raises(StateMismatchError, match=r"Counts.by=. must be .language., .* got .number."):
        other.load_state_dict(counted.state_dict())
    other.load_state_dict(counted.state_dict(), strict=False)
    assert other.tally is not None
    assert not other.tally.rows


def test_keys_beyond_the_limit_are_counted_together() -> None:
    loader = MapLoader(range(300), batch_size=10, counts=Counts(by=lambda number: number), collate_fn=list)
    list(loader)
    assert loader.tally is not None
    rows = loader.tally.rows
    assert len(rows) == MOST_GROUPS
    assert rows[OTHER][SAMPLES] == 300 - MOST_GROUPS + 1
    twice = merged_rows([rows, {("", str(number)): new_row() for number in range(1000, 1100)}])
    assert len(twice) == MOST_GROUPS
    assert sum(row[SAMPLES] for row in twice.values()) == 300
    assert len(loader.tally.take()) < 48 << 10
    names = [cut_name("ä" * 40 + str(number)) for number in range(2)]
    assert [len(name.encode()) <= 48 for name in names] == [True, True]
    assert names[0] != names[1]
    long = Tally()
    long.add({("ä" * 24, "b" * 48): [1] * len(new_row())})
    assert read_changes(long.take()) == long.rows


@pytest.mark.parametrize("plain", [1, [1], [["", ""]], [["", "", -1, *[0] * 7]], [["", 1, *[0] * 7]]])
def test_damaged_counts_of_a_state_are_refused(plain: Any) -> None:
    with pytest.raises(StateCorruptError, match="are damaged"):
        saved_rows(plain)
    with pytest.raises(StateCorruptError, match="are damaged"):
        counts_part({"boxes": plain if plain == 1 else [plain]}, 0, 1, 0)


def test_keys_of_any_kind_have_names() -> None:
    keys = [None, b"de", np.str_("en"), np.int64(3), torch.tensor([4]), True, 0.5, "\ud800"]
    loader = MapLoader(range(8), batch_size=8, counts=Counts(by=lambda number: keys[number]), collate_fn=list)
    list(loader)
    assert loader.tally is not None
    assert set(by_key(loader.tally.rows)) == {"(none)", "de", "en", "3", "4", "True", "0.5", "?"}


class Sourced(Words):
    """Words of these sources."""

    def __init__(self, names: list[Any]) -> None:
        self.names = names

    def sources_of(self, numbers: Any) -> list[Any]:
        return self.names


def test_invalid_counts_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="must name a field or be a function"):
        Counts(by=3)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=r"must be a penstock.data.Counts or None, got str"):
        MapLoader(Words(), batch_size=2, counts="language")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="2 different texts"):
        Mixture([documents(3), documents(3)], [1, 1], names=["a", "a"])
    for counts, message in [
        (Counts(by="color"), "needs this field in each sample, but a dict has the fields number"),
        (Counts(by="tokens"), "must give a text or a number, got a list"),
        (
            Counts(tokens="language", by=lambda sample: next(iter(()))),
            "StopIteration must not come out of the function",
        ),
        (Counts(tokens=lambda sample: -1), "must give 0 to"),
        (Counts(truncated=lambda sample: "no"), "must give True or False for each sample, got 'no'"),
    ]:
        with pytest.raises(DatasetError, match=message):
            next(iter(MapLoader(Words(), batch_size=2, counts=counts, reseed=False)))
    for names in ([1, 1], ["one"]):
        with pytest.raises(DatasetError, match="sources_of must return a text for each of 2 samples"):
            next(iter(MapLoader(Sourced(names), batch_size=2, counts=Counts(), reseed=False)))
