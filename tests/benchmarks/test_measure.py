"""The loop that measures, in virtual time, and what it says of a batch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from benchmarks.cases import Case, Times, spin
from benchmarks.measure import batch_bytes, consume, measure


class Clock:
    """Time passes only where batches are taken."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def batches(self, *seconds: float) -> Iterator[int]:
        """Endless; each takes as long as the next of these, over and over."""
        while True:
            for took in seconds:
                self.now += took
                yield 8


@pytest.mark.parametrize("each", [1e-5, 1e-3, 0.05])
def test_the_rate_is_that_of_the_batches(each: float) -> None:
    clock = Clock()
    count, span = consume(clock.batches(each), 1.0, 5, 10.0, clock)
    assert count / span == pytest.approx(1 / each)
    assert 1.0 <= span < 1.0 + 2 * max(each, 0.01)


def test_a_span_lasts_until_it_has_enough_batches() -> None:
    clock = Clock()
    count, span = consume(clock.batches(0.5), 1.0, 8, 10.0, clock)
    assert count == 8
    assert span == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("batch", "nbytes"),
    [
        (torch.zeros(3, 5, dtype=torch.int64), 120),
        (np.zeros(7, np.uint8), 7),
        ({"a": torch.zeros(4), "b": {"c": np.zeros(2)}}, 32),
        (4096, 4096),
    ],
)
def test_bytes_of_a_batch(batch: object, nbytes: int) -> None:
    assert batch_bytes(batch) == nbytes


def test_a_measurement_refuses_other_batches() -> None:
    times = Times(warm_s=0.001, span_s=0.02, latency_s=0.005, at_least=5, at_most_s=1.0)

    def batches() -> Iterator[int]:
        while True:
            spin(200)
            yield 8

    found = measure(batches(), Case("8 bytes", 8), times, [])
    assert found["batches"] >= 5
    assert found["span_s"] >= 0.02
    assert 0 < found["thread_s"] < found["span_s"] + 0.01  # the two are not read at the same moment
    assert found["thread_s"] <= found["cpu_s"]["consumer"] + 0.01
    assert found["memory"]["consumer"]["pss"] > 1
    assert 0 < found["latency_us"]["p50"] <= found["latency_us"]["p99"]
    with pytest.raises(ValueError, match=r"must have 9 bytes, .* got 8"):
        measure(batches(), Case("9 bytes", 9), times, [])
