"""Layers that are changed in mid-run: each document is seen once; the cut ones, which are seen again, are listed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
from all_workers import AllWorkers, saved
from given_shards import Given

from penstock.data import Chunked, Filtered, Mapped, Packed, Repeated, ShardedSource, ShardLoader, WindowShuffled
from penstock.data.sharded.protocol import Cursor, PositionOf, SavedPosition
from penstock.proto.errors import StateMismatchError

SHARDS, EACH = 6, 40
PAD = -1
HELD = 60
"""Documents behind the furthest one that the layers here can hold."""


def size(document: int) -> int:
    return document * 7919 % 11


class Documents(Given):
    """A document is a list of one number for each token, from which its number can be told; other ones each epoch."""

    def open(
        self, shard: int, epoch: int, seed: int, saved: SavedPosition = None, position_of: PositionOf | None = None
    ) -> Cursor:
        numbers = [(epoch * SHARDS + shard) * EACH + index for index in range(EACH)]
        return self.cursor([[100 * n + token for token in range(size(n))] for n in numbers], saved)


def place(document: int) -> tuple[int, int]:
    """(shard, index in it over all epochs)"""
    passes, index = divmod(document, EACH)
    return passes % SHARDS, passes // SHARDS * EACH + index


def number(shard: int, index: int) -> int:
    return (index // EACH * SHARDS + shard) * EACH + index % EACH


def plain(document: list[int]) -> list[int]:
    return document


def twice(document: list[int]) -> list[int]:
    return [token for token in document for _ in range(2)]


def kept(divisor: int, document: list[int]) -> bool:
    return not document or document[0] // 100 % divisor != 0


class Layers(NamedTuple):
    tokenizer: Callable[[list[int]], list[int]]
    divisor: int
    """Documents whose number is a multiple are left out; 0: none."""
    length: int
    split: bool
    window: int | None
    documents_shuffled: int
    chunks: int
    lines_shuffled: int

    @classmethod
    def drawn(cls, draw: random.Random, before: Layers | None) -> Layers:
        tokenizer: Any = draw.choice([plain, twice])
        divisor = draw.choice([0, 3, 5])
        if before is not None and draw.random() < 0.6:  # the functions stay: only then may windows be open
            tokenizer, divisor = before.tokenizer, before.divisor
        return cls(
            tokenizer,
            divisor,
            draw.choice([n for n in range(3, 25) if before is None or n != before.length]),
            split := draw.random() < 0.4,
            None if split or draw.random() < 0.5 else draw.randint(2, 9),
            draw.choice([0, 0, 5]),
            draw.choice([0, 0, 4, 30]),
            draw.choice([0, 0, 6]),
        )

    def over(self, source: ShardedSource) -> ShardedSource:
        source = Mapped(source, self.tokenizer)
        if self.divisor:
            source = Filtered(source, partial(kept, self.divisor), name=f"not {self.divisor}")
        if self.documents_shuffled:
            source = WindowShuffled(source, self.documents_shuffled)
        if self.chunks:
            source = Chunked(source, length=self.chunks)
        source = Packed(source, length=self.length, pad=PAD, split=self.split, window=self.window)
        return WindowShuffled(source, self.lines_shuffled) if self.lines_shuffled else source

    def tokens(self, document: int) -> int:
        return len(self.tokenizer([0])) * size(document)

    def keeps(self, document: int) -> bool:
        return size(document) > 0 and not (self.divisor and document % self.divisor == 0)


class Segment(NamedTuple):
    layers: Layers
    seen: Counter[int]
    """Tokens by document."""
    cut: set[tuple[int, int]]
    """Listed by the change after it."""


def fleet(
    layers: Layers, endless: bool, draw: random.Random, before: AllWorkers | None = None, state: Any = None
) -> AllWorkers:
    data = Documents([[0] * EACH] * SHARDS)
    source = layers.over(Repeated(data) if endless else data)
    options: dict[str, Any] = {"seed": 5, "collate_fn": list, "global_batch_size": draw.choice([2, 4, 6, 10])}
    if endless:
        options |= {"partitions": 2, "block": 6}
    topology, load = draw.choice([(1, 1), (1, 2), (2, 1), (2, 3)]), {"layers": "restart"} if state else {}
    return AllWorkers(lambda: ShardLoader(source, **options), topology, before, state=state, **load)


def lagging(before: list[Any], now: AllWorkers) -> Any:
    """The aggregated state as it is after states of some batches ago were advanced."""
    states = [{**was, "done": loader.state_dict()["done"]} for was, loader in zip(before, now.workers, strict=True)]
    return saved(now.made().aggregate_state_dict(states))


def read(workers: AllWorkers, steps: int, seen: Counter[int]) -> bool:
    """Return False at the epoch's end."""
    for _ in range(steps):
        rows = workers.step_rows()
        if rows is None:
            return False
        seen.update(int(token) // 100 for box in rows for line in box for token in line.tolist() if token != PAD)
    return True


def history(seed: int, endless: bool, changes: int) -> tuple[list[Segment], Counter[str]]:
    draw, segments, met = random.Random(seed), list[Segment](), Counter[str]()
    layers = Layers.drawn(draw, None)
    workers = fleet(layers, endless, draw)
    while True:
        seen = Counter[int]()
        goes_on = read(workers, draw.randint(1, 4), seen)
        before = [saved(loader.state_dict()) for loader in workers.workers]
        goes_on = goes_on and read(workers, draw.choice([0, 0, 3]), seen)
        if not goes_on:
            break
        if len(segments) == changes:
            read(workers, 10 if endless else 1 << 20, seen)
            break
        state = lagging(before, workers) if endless and draw.random() < 0.5 else workers.state()
        new = Layers.drawn(draw, layers)
        try:
            workers = fleet(new, endless, draw, workers, state)
        except StateMismatchError as error:
            met[error.message.split(",")[0]] += 1
            new = new._replace(tokenizer=layers.tokenizer, divisor=layers.divisor, length=layers.length + 1)
            workers = fleet(new, endless, draw, workers, state)
        first = state["epoch"] * EACH
        cut = {(shard, first + index) for shard, index in workers.state().get("cut", [])}
        if (new.tokenizer, new.divisor) != (layers.tokenizer, layers.divisor):  # the first that they may have kept
            over = {d for one in segments for d, had in one.seen.items() if had == one.layers.tokens(d)}
            cut = {
                (shard, next(at for at in range(index, 999) if layers.keeps(d := number(shard, at)) and d not in over))
                for shard, index in cut
            }
        segments.append(Segment(layers, seen, cut))
        met["cut"] += len(cut)
        met["changes"] += 1
        layers = new
    segments.append(Segment(layers, seen, set()))
    return segments, met


def check(segments: list[Segment], endless: bool) -> None:
    documents = sorted({document for segment in segments for document in segment.seen})
    furthest = Counter[int]()
    for document in documents:
        shard, index = place(document)
        furthest[shard] = max(furthest[shard], index)
    for segment in segments[:-1]:
        partly = {place(d) for d in documents if 0 < segment.seen[d] < segment.layers.tokens(d)}
        assert partly == segment.cut
    for document in range(SHARDS * EACH * (4 if endless else 1)):
        shard, index = place(document)
        counts = [(segment.seen[document], segment.layers.tokens(document)) for segment in segments]
        whole = sum(had == full > 0 for had, full in counts)
        assert whole <= 1, f"document {document} was seen twice: {counts}"
        if endless and index > furthest[shard] - HELD:
            continue  # it may still come
        if all(segment.layers.keeps(document) for segment in segments):
            assert whole == 1, f"document {document} was not seen: {counts}"


@pytest.mark.parametrize("endless", [True, False])
@pytest.mark.filterwarnings("ignore:the epoch's last batch has fewer samples")
def test_each_document_is_seen_once(endless: bool) -> None:
    met = Counter[str]()
    for seed in range(24):
        segments, found = history(seed, endless, 6)
        check(segments, endless)
        met += found
    assert met.keys() == {"changes", "cut", "layers='restart' needs the old functions"}
    assert met["changes"] >= 100
    assert min(met.values()) >= 10


def mapped(tokenizer: Callable[..., Any], source: Any) -> Any:
    return Packed(Mapped(source, tokenizer), length=7)


@pytest.mark.parametrize(
    ("new", "options", "what"),
    [
        (
            lambda data: mapped(plain, Given([[[1]]] * SHARDS)),
            {},
            r"needs the saved run's documents .* lengths\[0\] was",
        ),
        (lambda data: Repeated(mapped(plain, data)), {}, "the position depends on partitions and endless"),
        (lambda data: Mapped(data, twice), {}, "needs layers of unknown lengths"),
        (lambda data: mapped(twice, data), {"seed": 6}, "seed was 5 and is 6 now"),
    ],
)
def test_what_cannot_begin_anew(new: Callable[[Any], Any], options: dict[str, Any], what: str) -> None:
    data = Documents([[0] * EACH] * SHARDS)
    usual: dict[str, Any] = {"seed": 5, "batch_size": 4, "collate_fn": list}
    old = ShardLoader(mapped(plain, data), **usual)
    next(iter(old))
    loader = ShardLoader(new(data), **usual | options)
    with pytest.raises(StateMismatchError, match=what):
        loader.load_state_dict(old.state_dict(), layers="restart")


def test_rows_are_read_again_by_their_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the positions are too large for the keys of a run whose layers stayed."""
    data = Repeated(Documents([[0] * EACH] * SHARDS))

    def loader(length: int) -> ShardLoader:
        source = WindowShuffled(Packed(data, length=length, split=False, pad=PAD, window=5), 4)
        return ShardLoader(source, batch_size=4, keys="keys")

    old, new = loader(9), loader(20)
    rows = iter(old)
    state = [old.state_dict() for _ in zip(range(9), rows, strict=False)][-1]
    key = next(rows)["keys"][0]
    monkeypatch.setattr("penstock.data.sharded.shard_keys.LARGEST", 0)
    new.load_state_dict(old.aggregate_state_dict([state]), layers="restart")
    for _, batch in zip(range(9), new, strict=False):
        for row, own in zip(batch["batch"], batch["keys"], strict=True):
            assert new.restore_sample(own).tolist() == row.tolist()
    with pytest.raises(StateMismatchError, match="must have the digest"):
        new.restore_sample(key)


def test_functions_below_repeated_stay() -> None:
    data = Documents([[0] * EACH] * SHARDS)
    old = ShardLoader(Repeated(mapped(plain, data)), seed=5, batch_size=4, collate_fn=list)
    next(iter(old))
    loader = ShardLoader(Repeated(mapped(twice, data)), seed=5, batch_size=4, collate_fn=list)
    with pytest.raises(StateMismatchError, match=r"source.source.function was 'plain' and is 'twice' now"):
        loader.load_state_dict(old.state_dict(), layers="restart")
    with pytest.raises(StateMismatchError, match="or load with layers='restart', if you change layers"):
        loader.load_state_dict(old.state_dict())
