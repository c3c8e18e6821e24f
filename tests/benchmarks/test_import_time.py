"""The report of `-X importtime` is read right; how long imports take is nothing for a test."""

from __future__ import annotations

from benchmarks.import_time import costs

REPORT = """\
import time: self [us] | cumulative | imported package
import time:       300 |        300 |   numpy
import time:      9000 |       9300 | torch
import time:      1500 |       1500 |   pydantic
import time:       200 |       1700 | penstock.client
"""


def test_costs_are_of_what_comes_behind_torch() -> None:
    assert costs(REPORT) == [("pydantic", 1.5), ("penstock.client", 0.2)]
