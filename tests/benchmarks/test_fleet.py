"""The fleet's generator against a real coordinator, in the small; and what is told of its figures."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from typing import Any

import pytest
from benchmarks.fleet_load import Fleet
from benchmarks.fleet_report import FULL, TARGETS, judge

DOCUMENT = Path(__file__).parent.parent.parent / "benchmarks" / "README.md"
DEADLINE_S = 60.0


def test_a_small_fleet_goes_through_all_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_TOKEN", "a-token-for-tests-only")

    async def body() -> None:
        async with Fleet(8, 2, 0.3, lease_s=DEADLINE_S) as fleet:
            await fleet.register()
            opened = await fleet.open()
            assert (opened["assignments"], opened["settled"]) == (8, 2)
            assert 0 < opened["to_assignment_s"]["p50"] <= opened["assigned_s"]
            steady = await fleet.steady()
            assert steady["heartbeat_s"]["samples"] > 0
            assert steady["coordinator_cpu_s"] > 0
            assert steady["rss_mib"] > 10
            moved = await fleet.moves()
            assert moved["to_assignment_s"]["samples"] == 7
            state = await fleet.states(5000, 1)
            assert (state["records"], state["bytes"]) == (8, 40_000)
            assert 0 < state["first_s"]["p50"] <= state["last_s"]["p50"]
            status = await fleet.status()
            assert status["bytes"] > 500
            back = await fleet.restart()
            assert (back["live"], back["lost"]) == (10, 0)
            assert fleet.tally.failures == []

    asyncio.run(asyncio.wait_for(body(), DEADLINE_S))


@pytest.fixture
def results() -> dict[str, Any]:
    heartbeats = {"p50": 0.002, "p99": 0.05, "max": 0.2, "samples": 100}
    phase = {"span_s": 10.0, "heartbeat_s": heartbeats, "rss_mib": 300.0, "peak_mib": 400.0, "cores": 0.4}
    sizes = [
        {
            "workers": count,
            "lost": 0,
            "steady": phase | {"beats_per_s": count / 5},
            "state_large": copy.deepcopy(phase),
            "snapshots": copy.deepcopy(phase),
        }
        for count in (100, 1000, FULL)
    ]
    machine = {"cores": 2, "processor": "P", "memory_gib": 8, "kernel": "6", "python": "3.11"}
    noise = {"busy_before": 0.1, "load_before": 0.2, "others": 0.1}
    return {
        "date": "2026-01-01",
        "command": "c",
        "commit": "",
        "machine": machine,
        "noise": noise,
        "sizes": sizes,
        "connection": {"connections": 100, "kib_each": 55.5},
        "failures": [],
    }


def test_targets_are_judged_by_the_full_fleet(results: dict[str, Any]) -> None:
    assert [verdict.met for verdict in judge(results)] == [True] * len(TARGETS)
    results["sizes"][2]["snapshots"]["heartbeat_s"]["p99"] = 0.3
    results["sizes"][2]["lost"] = 1
    del results["sizes"][2]["state_large"]
    words = {verdict.what: verdict.word for verdict in judge(results)}
    assert words["the same while snapshots of 76 kB come in"] == "MISSED"
    assert words["slots lost without a fault"] == "MISSED"
    assert words["memory at most, states of 76 kB"] == "not measured"
    results["sizes"].pop()
    assert {verdict.met for verdict in judge(results)} == {None}
