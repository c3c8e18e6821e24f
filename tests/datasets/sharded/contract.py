"""Contract of every source in logical shards (sharded/protocol.py), as checks that take any source.

Those of CURSOR_CHECKS look at the source alone, those of LOADER_CHECKS at what a ShardLoader deals out of it. A check
gets a factory: it is called anew wherever another process would be, so that nothing passes from one source to
the next but what was saved. Samples are compared as encoded, to the bit. Of an endless shard the first MOST are looked
at.

To have a source checked, add a line with its factory to SOURCES in test_contract.py.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from all_workers import AllWorkers, Shape, saved

from penstock.data.sharded.protocol import Cursor, SavedPosition, ShardedSource
from penstock.data.sharded.runs import take
from penstock.data.sharded.shard_loader import ShardLoader
from penstock.data.sharded.sources.opaque import without_snapshots
from penstock.proto.state.codec import encode_state

__all__ = ["CURSOR_CHECKS", "LOADER_CHECKS", "Fleet", "Make", "Shape", "encoded", "epochs_of", "samples_of"]

Make = Callable[[], ShardedSource]
SEED = 11
MOST = 16
"""Samples of a shard that are looked at."""


def encoded(sample: Any) -> bytes:
    """Return a sample as bytes, so that samples of any kind can be compared."""
    return encode_state(sample)


def epochs_of(source: ShardedSource) -> range:
    """Return the epochs of a source that the checks look at."""
    return range(1 if source.endless else 2)


def read(cursor: Cursor, most: int = MOST) -> list[bytes]:
    """The next samples of a cursor, which is closed."""
    try:
        return [encoded(sample) for sample in itertools.islice(cursor, most)]
    finally:
        cursor.close()


def samples_of(source: ShardedSource, epoch: int, seed: int = SEED) -> list[list[bytes]]:
    """Return the samples of each shard, encoded."""
    return [read(source.open(shard, epoch, seed)) for shard in range(source.num_shards)]


def shards_of(source: ShardedSource) -> Iterator[tuple[int, int, list[bytes]]]:
    """(epoch, shard, its samples) of all that are looked at."""
    for epoch in epochs_of(source):
        for shard, samples in enumerate(samples_of(source, epoch)):
            yield epoch, shard, samples


def follows_the_seed(make: Make) -> None:
    """Another seed may give another order, and the first one is then as it was."""
    source = make()
    first = samples_of(source, 0)
    samples_of(source, 0, SEED + 1)
    assert samples_of(source, 0) == first


def describes_itself(make: Make) -> None:
    source = make()
    described = json.dumps(source.described(), sort_keys=True, allow_nan=False)
    assert json.dumps(make().described(), sort_keys=True) == described
    samples_of(source, 0)
    assert json.dumps(source.described(), sort_keys=True) == described
    assert source.num_shards == make().num_shards >= 1
    assert isinstance(source, ShardedSource)


def says_its_lengths_truly(make: Make) -> None:
    source = make()
    for epoch in epochs_of(source):
        lengths = source.lengths(epoch)
        if source.endless:
            assert lengths is None
            assert all(len(shard) == MOST for shard in samples_of(source, epoch))
        elif lengths is not None:
            counted = [len(read(source.open(s, epoch, SEED), 1 << 20)) for s in range(source.num_shards)]
            assert [int(length) for length in lengths] == counted


def goes_on_from_every_token(make: Make) -> None:
    """Taken twice at each place, used when the cursor has long moved on, by another source."""
    source = make()
    for epoch, shard, whole in shards_of(source):
        cursor, positions = source.open(shard, epoch, SEED), []
        for place in range(len(whole) + 1):
            position, again = cursor.saved_position(), cursor.saved_position()
            assert encode_state(position) == encode_state(again)
            positions.append((position, encode_state(position)))
            if place < len(whole):
                assert encoded(next(cursor)) == whole[place], "saving a position changed what comes"
            elif not source.endless:
                assert next(cursor, None) is None
                assert next(cursor, None) is None, "a shard that is over stays over"
        cursor.close()
        other = make()
        for place, (position, bytes_then) in enumerate(positions):
            assert encode_state(position) == bytes_then, f"the position saved at {place} moved on with its cursor"
            rest = read(other.open(shard, epoch, SEED, saved(position)), len(whole) - place + 1)
            assert rest[: len(whole) - place] == whole[place:], f"shard {shard} from its position saved at {place}"
            assert source.endless or len(rest) == len(whole) - place
        ended = other.open(shard, epoch, SEED, saved(positions[-1][0]))
        if not source.endless:
            assert encode_state(ended.saved_position()) == positions[-1][1] or next(ended, None) is None
        ended.close()


def saves_one_form_for_each_position(make: Make) -> None:
    """However it got there, for a restore key is made of it. Of the states of streams none is in a key."""

    def of(cursor: Cursor) -> bytes:
        return encode_state(without_snapshots(saved(cursor.saved_position())))

    source = make()
    for epoch, shard, whole in shards_of(source):
        cursor = source.open(shard, epoch, SEED)
        for place in range(len(whole)):
            skipping = source.open(shard, epoch, SEED)
            again = make().open(shard, epoch, SEED, saved(cursor.saved_position()))
            assert skipping.skip(place) == place
            assert of(skipping) == of(cursor), f"shard {shard}: skipped to {place}"
            assert of(again) == of(cursor), f"shard {shard}: gone on from its position saved at {place}"
            skipping.close()
            again.close()
            next(cursor)
        cursor.close()


def goes_on_in_a_chain_of_tokens(make: Make) -> None:
    """Each cursor reads a little and hands over, so that positions are saved by restored cursors, too."""
    source = make()
    draw = random.Random(1)
    for epoch, shard, whole in shards_of(source):
        got: list[bytes] = []
        position: SavedPosition = None
        while len(got) < len(whole):
            cursor = make().open(shard, epoch, SEED, position)
            if draw.random() < 0.2:
                position = saved(cursor.saved_position())  # before anything was read
                cursor.close()
                cursor = source.open(shard, epoch, SEED, position)
            got += [encoded(next(cursor)) for _ in range(min(draw.randint(1, 4), len(whole) - len(got)))]
            position = saved(cursor.saved_position())
            cursor.close()
        assert got == whole


def skips_as_it_reads(make: Make) -> None:
    source = make()
    draw = random.Random(2)
    for epoch, shard, whole in shards_of(source):
        for _ in range(3):
            cursor, place = source.open(shard, epoch, SEED), 0
            while place < len(whole):
                if draw.random() < 0.3:
                    position = saved(cursor.saved_position())
                    cursor.close()
                    cursor = make().open(shard, epoch, SEED, position)
                count = draw.randint(0, 6)
                left = len(whole) - place
                if source.endless:
                    count = min(count, left)
                assert cursor.skip(count) == min(count, left)
                place += min(count, left)
                if place < len(whole):
                    assert encoded(next(cursor)) == whole[place], f"shard {shard}: skipped to {place}"
                    place += 1
            if not source.endless:
                assert (cursor.skip(3), next(cursor, None), cursor.skip(0)) == (0, None, 0)
            cursor.close()


def takes_runs_as_it_reads(make: Make) -> None:
    """Runs of any size have the samples that come one by one, and the positions between them."""
    draw = random.Random(4)
    source = make()
    for epoch, shard, whole in shards_of(source):
        single, positions = source.open(shard, epoch, SEED), []
        for _ in whole:
            positions.append(encode_state(without_snapshots(saved(single.saved_position()))))
            next(single)
        single.close()
        cursor, place = source.open(shard, epoch, SEED), 0
        while place < len(whole):
            count = draw.randint(1, 9)
            run = take(cursor, count)
            assert 1 <= run.size <= count
            samples = list(run.samples)
            assert len(samples) == run.size
            assert not run.origins or len(run.origins) == run.size
            for number in range(1, min(run.size, len(whole) - place)):
                found = encode_state(without_snapshots(saved(run.position(number))))
                assert found == positions[place + number], f"shard {shard}: position {number} in a run from {place}"
            assert [encoded(sample) for sample in samples[: len(whole) - place]] == whole[place : place + run.size]
            place += run.size
        if not source.endless:
            assert take(cursor, 3).size == 0
        cursor.close()


def reads_shards_beside_each_other(make: Make) -> None:
    """Cursors of one source in turn, two of each shard, do not disturb each other; nor does one that is closed."""
    source = make()
    draw = random.Random(3)
    for epoch in epochs_of(source):
        whole = [*samples_of(source, epoch)] * 2
        cursors = [source.open(shard, epoch, SEED) for _ in range(2) for shard in range(source.num_shards)]
        got: list[list[bytes]] = [[] for _ in cursors]
        order = [number for number, shard in enumerate(whole) for _ in shard]
        draw.shuffle(order)
        for number in order:
            got[number].append(encoded(next(cursors[number])))
            if len(got[number]) == len(whole[number]):
                cursors[number].close()
        for cursor in cursors:
            cursor.close()
        assert got == whole


def can_be_closed_twice(make: Make) -> None:
    source = make()
    for shard in range(source.num_shards):
        cursor = source.open(shard, 0, SEED)
        cursor.close()
        cursor.close()
        cursor = source.open(shard, 0, SEED)
        next(cursor, None)
        cursor.close()
        cursor.close()


def uses_no_global_randomness(make: Make) -> None:
    """Check that the process's random generators neither decide samples nor are changed."""
    from penstock.proto.state.generators import capture_rng, restore_rng, seed_rng

    source, before = make(), capture_rng()
    first = samples_of(source, 0)
    assert capture_rng() == before
    try:
        seed_rng(99)
        assert samples_of(make(), 0) == first
    finally:
        restore_rng(before)


CURSOR_CHECKS: list[Callable[[Make], None]] = [
    follows_the_seed,
    describes_itself,
    says_its_lengths_truly,
    goes_on_from_every_token,
    saves_one_form_for_each_position,
    goes_on_in_a_chain_of_tokens,
    skips_as_it_reads,
    takes_runs_as_it_reads,
    reads_shards_beside_each_other,
    can_be_closed_twice,
    uses_no_global_randomness,
]


# ---- dealt out


class Fleet(AllWorkers):
    """All workers of a topology that read a source."""

    def __init__(self, make: Make, shape: Shape, before: Fleet | None = None, **options: Any) -> None:
        """`options`: of the ShardLoader."""
        self.make = make
        options = {"seed": SEED, "collate_fn": list, **options}
        super().__init__(lambda: ShardLoader(self.make(), **options), shape, before)


def stream_of(source: ShardedSource, epoch: int, count: int, block: int, partitions: int) -> list[bytes]:
    """The first samples of an epoch in the order of the stream, worked out step by step."""
    if not source.endless:
        shards = [read(source.open(shard, epoch, SEED), 1 << 20) for shard in range(source.num_shards)]
        longest = max(map(len, shards))
        return [shard[rank] for rank in range(longest) for shard in shards if rank < len(shard)][:count]
    columns = source.num_shards // partitions
    places: list[list[int]] = [[] for _ in range(source.num_shards)]
    order: list[tuple[int, int]] = []
    used = [0] * columns
    for position in range(10 * count + 5000):  # a source may read ahead of what it is asked for
        column = position // block % columns
        shard = column * partitions + used[column] % partitions
        used[column] += 1
        order.append((shard, len(places[shard])))
        places[shard].append(position)
    needed = [
        max([index + 1 for shard, index in order[:count] if shard == wanted], default=0)
        for wanted in range(len(places))
    ]
    samples = [read(source.open(s, 0, SEED, None, places[s].__getitem__), most) for s, most in enumerate(needed)]
    return [samples[shard][index] for shard, index in order[:count]]


@dataclass(frozen=True)
class Dealt:
    """Way in which a source is divided in these checks, and the batches that are expected."""

    batch: int
    partitions: int
    batches: list[list[bytes]]
    """Global batches: of two epochs of a finite source, without what makes no whole batch."""

    @staticmethod
    def of(make: Make) -> Dealt:
        source = make()
        if source.endless:
            partitions = max(c for c in (1, 2, 3) if source.num_shards % c == 0)
            whole = stream_of(source, 0, 16 * 4, 4, partitions)
            return Dealt(4, partitions, [whole[at : at + 4] for at in range(0, len(whole), 4)])
        epochs = [stream_of(source, epoch, 1 << 20, 0, 0) for epoch in epochs_of(source)]
        batch = min(4, *map(len, epochs))
        assert batch, "an epoch without samples cannot be dealt out"
        return Dealt(
            batch,
            1,
            [epoch[at : at + batch] for epoch in epochs for at in range(0, len(epoch) - batch + 1, batch)],
        )

    def fleet(self, make: Make, shape: Shape, before: Fleet | None = None) -> Fleet:
        return Fleet(make, shape, before, global_batch_size=self.batch, partitions=self.partitions, tail="drop")

    def shapes(self) -> list[Shape]:
        return [shape for shape in [(1, 1), (1, 3), (2, 2), (3, 1), (1, 7)] if shape[0] <= self.batch]


def batches_of(taken: list[list[Any]]) -> list[list[bytes]]:
    return [[encoded(sample) for sample in batch] for batch in taken]


def is_rescaled_at_any_step(make: Make) -> None:
    """Chains of shapes, each going on from the state of the one before; nothing is lost or repeated."""
    dealt = Dealt.of(make)
    for chain in range(2):
        draw = random.Random(chain)
        got: list[list[bytes]] = []
        fleet: Fleet | None = None
        while len(got) < len(dealt.batches):
            fleet = dealt.fleet(make, draw.choice(dealt.shapes()), fleet)
            steps = min(draw.choice([0, 1, 1, 2, 3, 5]), len(dealt.batches) - len(got))
            got += batches_of(fleet.take(steps))
        assert got == dealt.batches, f"chain {chain}"


def outlives_its_workers(make: Make) -> None:
    """Any worker may die at any step; the next one has nothing but its state."""
    dealt = Dealt.of(make)
    draw = random.Random(7)
    for shape in dealt.shapes()[1:3]:
        fleet = dealt.fleet(make, shape)
        got: list[list[bytes]] = []
        while len(got) < len(dealt.batches):
            fleet.lose(draw.randrange(shape[0] * shape[1]))
            got += batches_of(fleet.take(1))
        assert got == dealt.batches


def gives_a_sample_again_by_its_key(make: Make) -> None:
    dealt = Dealt.of(make)
    options: dict[str, Any] = {"global_batch_size": dealt.batch, "partitions": dealt.partitions, "tail": "drop"}
    loader = ShardLoader(make(), seed=SEED, collate_fn=list, keys="keys", **options)
    other = ShardLoader(make(), seed=SEED, **options)
    pairs = itertools.islice(itertools.chain.from_iterable(iter(loader) for _ in epochs_of(loader.source)), 25)
    seen = 0
    for batch in pairs:
        for sample, key in zip(batch["batch"], batch["keys"], strict=True):
            assert encoded(other.restore_sample(key)) == encoded(sample)
            seen += 1
    assert seen >= dealt.batch


LOADER_CHECKS: list[Callable[[Make], None]] = [
    is_rescaled_at_any_step,
    outlives_its_workers,
    gives_a_sample_again_by_its_key,
]
