"""The table of benchmarks.first_batch; how long a first batch takes is nothing for a test."""

from __future__ import annotations

from benchmarks.first_batch import table


def test_the_table_has_medians_and_cpu_seconds() -> None:
    ours = [{"first_s": s, "second_s": s / 10, "cpu_s": {"daemons": s, "runner": 0.5}} for s in (1.0, 3.0, 2.0)]
    lines = table({"cold": ours, "torch": [{"first_s": 0.06, "cpu_s": {}}]})
    assert [line.split()[0] for line in lines[1:]] == ["cold", "second", "torch"]
    assert lines[1].split()[1:8] == ["2.00", "s", "1.00", "s", "3.00", "s", "0.9"]
    assert lines[1].endswith("2.50: daemons 2.00, runner 0.50")
    assert lines[2].split()[1] == "0.20"
    assert lines[3].split()[1:] == ["0.06", "s", "0.06", "s", "0.06", "s", "-", "-"]
