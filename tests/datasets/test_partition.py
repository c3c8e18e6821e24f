"""Batches, rows and turns, against dealing them out by hand."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.data.ordering.partition import Partition, Tail

TAILS: list[Tail] = ["emit", "pad", "drop"]


@given(st.integers(1, 60), st.integers(0, 59), st.integers(1, 20), st.integers(1, 6), st.sampled_from(TAILS), st.data())
def test_every_row_goes_to_one_box_in_order(
    length: int, start: int, batch: int, boxes: int, tail: Tail, data: st.DataObject
) -> None:
    batch = max(batch, boxes)
    start = min(start, length - 1)
    partition = Partition(length, start, batch, boxes, tail)
    dealt: list[int] = []
    for number in range(partition.batches):
        rows = [partition.rows(number, box).tolist() for box in range(boxes)]
        assert rows[0]
        assert all(rows) or (tail == "emit" and partition.batches == 1), "only where there are fewer rows than boxes"
        size = sum(map(len, rows))
        whole = [rows[at % boxes][at // boxes] for at in range(size)]
        assert partition.position(number) == start + number * batch
        dealt += whole
    remaining = list(range(start, length))
    rest = len(remaining) % batch
    if tail == "drop":
        assert dealt == remaining[: len(remaining) - rest]
    elif tail == "pad":
        assert dealt == remaining + [at % length for at in range(length, length + (batch - rest) % batch)]
    else:
        assert dealt == remaining
        assert partition.batches == max(len(remaining) // batch + (rest >= boxes), 1), "few rows join the batch before"
    assert partition.position(partition.batches) == length
