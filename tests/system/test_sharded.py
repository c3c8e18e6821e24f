"""Sources in logical shards through coordinator, worker daemons and lanes: saved, moved to other topology, and
killed."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import dealt
import pytest
from chains import kill_runners, runners
from neighbours import beside

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.proto.errors import StateMismatchError
from penstock.proto.state.counts import by_key, imbalance_of
from penstock.proto.state.counts import rows_of as rows_of_state

LENGTHS, BATCH = [30, 0, 55, 7, 41, 12, 30], 12
PARTITIONS = 2


def loader_of(kind: str) -> DataLoader:
    if kind == "finite":
        return DataLoader(dealt.listed, LENGTHS, global_batch_size=BATCH)
    return DataLoader(dealt.balanced, global_batch_size=BATCH, partitions=PARTITIONS)


def rows_of(batch: Any) -> list[Any]:
    """The samples with their keys."""
    samples = batch["batch"]
    if isinstance(samples, list):  # collated field by field
        samples = list(zip(*(field.tolist() for field in samples), strict=True))
    else:
        samples = samples.tolist()
    return list(zip(samples, batch["keys"], strict=True))


def digits(batches: list[list[Any]]) -> list[str]:
    return [str(sample % 10) for batch in batches for sample, _ in batch]


def counted_in(state: Any) -> Counter[str]:
    """The samples of all boxes by their last digits, as a state says."""
    return Counter({key: own.samples for key, own in by_key(rows_of_state(state) or {}).items()})


def train(
    shared: Appliance, kind: str, boxes: int, workers: int, steps: int, state: Any, kill_at: int = 0
) -> tuple[list[list[Any]], Any, int]:
    """Global batches in the order of the stream, from one box for each thread; a state; and how many workers were
    recovered. `kill_at`: after this step all runners are killed."""

    def one(box: int) -> tuple[list[Any], Any, int]:
        loader, rows = loader_of(kind), []
        if state is not None:
            loader.load_state_dict(state)
        with beside(shared, box=box, num_boxes=boxes, num_workers_per_box=workers, job=job) as appliance:
            executor = DataExecutor(loader, num_steps=steps, appliance=appliance)
            began = None if state is None or box else counted_in(state)
            for batch in executor:
                rows.append(rows_of(batch))
                if kind == "finite":  # exact at each delivered step; box 0 goes on from what all boxes had
                    found = Counter({key: own.samples for key, own in executor.stats.keys.items()})
                    assert +found == Counter(digits(rows)) + (began or Counter())
                if executor.step == kill_at:
                    kill_runners(before)
            sample, key = rows[-1][0]
            assert loader.restore_sample(key) == sample
            return rows, loader.state_dict(), executor.stats.recoveries

    job, before = f"sharded-{random.getrandbits(40)}", runners()
    with ThreadPoolExecutor(boxes) as pool:
        rows, states, recoveries = zip(*pool.map(one, range(boxes)), strict=True)
    batches = [[step[at % boxes][at // boxes] for at in range(sum(map(len, step)))] for step in zip(*rows, strict=True)]
    return batches, states[0], sum(recoveries)


def alone(kind: str, steps: int) -> list[list[Any]]:
    """The same from one loader in this process."""
    if kind == "finite":
        loader = dealt.listed(LENGTHS, global_batch_size=BATCH, seed=7)
    else:
        loader = dealt.balanced(global_batch_size=BATCH, partitions=PARTITIONS, seed=7)
    passes = itertools.chain.from_iterable(iter(loader) for _ in itertools.count())
    return [rows_of(batch) for batch in itertools.islice(passes, steps)]


@pytest.mark.filterwarnings("ignore:.*was recovered")
def test_killed_saved_and_resumed_elsewhere(appliance: Appliance) -> None:
    """Resume with the same rows and keys, in the sixth epoch and at its very end: 175 rows are 15 batches."""
    got, state, recoveries = train(appliance, "finite", 1, 2, 85, None, kill_at=12)
    assert recoveries
    for boxes, workers, steps in ((2, 1, 5), (1, 1, 4)):
        batches, state, _ = train(appliance, "finite", boxes, workers, steps, state)
        got += batches
        assert counted_in(state) == Counter(digits(got))
        tokens = sum(own.tokens for own in by_key(rows_of_state(state) or {}).values())
        assert tokens == sum(sample % 100 for batch in got for sample, _ in batch)
    assert got == alone("finite", 94)


def test_balanced_rows_are_resumed(appliance: Appliance) -> None:
    """A step has the same rows, whichever box gets them; their keys read the same records."""
    got, state, _ = train(appliance, "balanced", 2, 1, 12, None)
    batches, state, _ = train(appliance, "balanced", 1, 2, 8, state)
    got += batches
    assert [sorted(batch) for batch in got] == [sorted(batch) for batch in alone("balanced", 20)]
    assert imbalance_of(rows_of_state(state) or {}) is not None


@pytest.mark.filterwarnings("ignore:.*was recovered")
def test_layers_begin_anew_at_any_step(appliance: Appliance) -> None:
    """Lines of another length, from a step that was not announced, on other workers, which are killed: each document is
    read once, but for the listed ones, of which the lines before had a part."""

    def tokens(length: int, workers: int, steps: int, state: Any, **load: Any) -> tuple[Counter[int], Any]:
        loader, before, found = DataLoader(dealt.packed, length, global_batch_size=6), runners(), Counter[int]()
        if state is not None:
            loader.load_state_dict(state, **load)
        with beside(appliance, num_workers_per_box=workers) as own:
            executor = DataExecutor(loader, num_steps=steps, appliance=own)
            for number, lines in enumerate(executor):
                found.update(lines[lines > 0].tolist())
                if load and number == 5:
                    kill_runners(before)
            return found, loader.state_dict()

    first, state = tokens(5, 2, 13, None)
    with pytest.raises(StateMismatchError, match="layers='restart'"):
        tokens(31, 3, 1, state)
    second, state = tokens(31, 3, 10, state, layers="restart")
    both = {token // 100 for token in first} & {token // 100 for token in second}
    assert len(both) == len(state["cut"]) > 0
    for document in {token // 100 for token in second}:
        parts = [sum(found[100 * document + at] for at in range(1, 10)) for found in (first, second)]
        assert parts[1] <= 1 + document % 9
        assert (parts[0] > 0) == (document in both)
        assert parts[0] < 1 + document % 9
