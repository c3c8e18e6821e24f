"""Contract of every source in logical shards (sharded/protocol.py), as checks that take any source.

A check gets a factory: it is called anew wherever another process would be, so that nothing passes from one source to
the next but what was saved. Samples are compared as encoded, to the bit. Of an endless shard the first MOST are looked
at. A loader sees cursors alone; what it deals out of any stack of layers is checked in test_layers_stacks.py.

To have a source checked, add a line with its factory to SOURCES in test_contract.py.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

from all_workers import AllWorkers, Shape, saved

from penstock.data.sharded.protocol import Cursor, ShardedSource
from penstock.data.sharded.runs import take
from penstock.data.sharded.shard_loader import ShardLoader
from penstock.data.sharded.sources.opaque import without_snapshots
from penstock.proto.state.codec import encode_state

__all__ = ["CURSOR_CHECKS", "SEED", "Fleet", "Make", "Shape", "batches_of"]

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


def skips_as_it_reads(make: Make) -> None:
    """In a chain of cursors, of which each hands over: positions are saved by restored cursors, too."""
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
    """Cursors of one source in turn, two of each shard, do not disturb each other; nor does one that is closed, once or
    twice."""
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


def uses_its_seed_alone(make: Make) -> None:
    """Check that the process's random generators neither decide samples nor are changed, and that nothing is left of
    another seed that the source was read with."""
    from penstock.proto.state.generators import capture_rng, restore_rng, seed_rng

    source, before = make(), capture_rng()
    first = samples_of(source, 0)
    assert capture_rng() == before
    try:
        seed_rng(99)
        again = make()
        samples_of(again, 0, SEED + 1)
        assert samples_of(again, 0) == first
    finally:
        restore_rng(before)


CURSOR_CHECKS: list[Callable[[Make], None]] = [
    describes_itself,
    says_its_lengths_truly,
    goes_on_from_every_token,
    saves_one_form_for_each_position,
    skips_as_it_reads,
    takes_runs_as_it_reads,
    reads_shards_beside_each_other,
    uses_its_seed_alone,
]


class Fleet(AllWorkers):
    """All workers of a topology that read a source."""

    def __init__(self, make: Make, shape: Shape, before: Fleet | None = None, **options: Any) -> None:
        """`options`: of the ShardLoader."""
        self.make = make
        options = {"seed": SEED, "collate_fn": list, **options}
        super().__init__(lambda: ShardLoader(self.make(), **options), shape, before)


def batches_of(taken: list[list[Any]]) -> list[list[bytes]]:
    return [[encoded(sample) for sample in batch] for batch in taken]
