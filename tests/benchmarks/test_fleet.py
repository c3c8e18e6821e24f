"""The fleet's generator against a real coordinator, in the small; and what is told of its figures."""

from __future__ import annotations

import asyncio

import pytest
from benchmarks.fleet_load import Fleet

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
