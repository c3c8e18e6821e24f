"""The fleet's generator against a real coordinator, in the small; and what is told of its figures."""

from __future__ import annotations

import asyncio

import pytest
from benchmarks.fleet_load import Fleet

from penstock.runtime.process.open_files import raise_file_limit

DEADLINE_S = 60.0
MANY, ROUNDS = 1000, 5


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


def test_a_state_comes_from_a_thousand_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """A query lets all workers send their state and a heartbeat at once, each on a connection of its own. By default
    gRPC 1.85 cancels calls of them (channel.py); `make versions` runs this with the oldest and the newest release."""
    monkeypatch.setenv("PENSTOCK_TOKEN", "a-token-for-tests-only")
    raise_file_limit()

    async def body() -> None:
        async with Fleet(MANY, MANY // 10, 0.3, lease_s=DEADLINE_S, connections=MANY) as fleet:
            await fleet.register()
            assert (await fleet.open())["assignments"] == MANY
            await fleet.steady()
            state = await fleet.states(1024, ROUNDS)
            assert (state["records"], fleet.tally.lost) == (ROUNDS * MANY, 0)
            # A busy generator may lose a connection; but no call that has arrived is dropped.
            assert not [said for said in (*fleet.tally.retried, *fleet.tally.failures) if "CANCELLED" in said]

    asyncio.run(asyncio.wait_for(body(), 4 * DEADLINE_S))
