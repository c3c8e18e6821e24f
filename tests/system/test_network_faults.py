"""Connections that are cut, fall silent in one direction or both, or are slow: each of the three kinds that there are.

A proxy stands in the middle (tests/support/proxy.py). What is silent is not closed: nobody is told, and only deadlines
and leases find out.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import traps
from appliances import made
from census import alive, census, runners
from cluster import TOKEN, Cluster, running
from proxy import Proxy, proxied_lanes
from waiting import until

from penstock.client import DataExecutor, DataLoader
from penstock.proto import errors

pytestmark = pytest.mark.filterwarnings("ignore:.*was recovered:UserWarning")
CLIENT_LEASE_S = 5.0
"""Half of the usual one, for some tests wait until it is over; no loop here holds the GIL for seconds."""


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Without workers."""
    lease = ["--client-lease-s", str(CLIENT_LEASE_S)]
    with running(tmp_path_factory.mktemp("state"), options=lease) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def between(coordinator: Cluster) -> Iterator[Proxy]:
    """Yield a proxy between the coordinator and the first worker."""
    with Proxy(coordinator.address) as proxy:
        yield proxy
        coordinator.workers[0].terminate()  # while it can still say so
        coordinator.workers[0].wait(10)


@pytest.fixture(scope="module")
def cluster(coordinator: Cluster, between: Proxy) -> Cluster:
    """Return a cluster with one worker."""
    coordinator.add_worker(4, allow="traps", name="first", through=between.address)
    return coordinator


@pytest.fixture(scope="module")
def whole(cluster: Cluster) -> list[int | None]:
    """The run without a fault."""
    return train(cluster.address, "whole", {})


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[Proxy]]]:
    """Route TCP lanes through proxies from now on, one for each worker."""
    with proxied_lanes(monkeypatch) as proxies:
        yield proxies


STEPS = 240


def train(
    address: str, job: str, at: dict[int, Callable[[], Any]], *, lane: Any = "tcp", timeout_s: float = 60
) -> list[int | None]:
    """The digest after each step; `at` some of them something is done."""
    digests: list[int | None] = []
    settings: dict[str, Any] = {"num_workers_per_box": 2, "job": job, "seed": 5, "box": 0, "num_boxes": 1}
    with made(address, token=TOKEN, timeout_s=timeout_s, lane=lane, **settings) as appliance:
        loader = DataLoader(traps.trapped, "stateful 0", [], "")
        while len(digests) < STEPS:
            executor = DataExecutor(loader, num_steps=STEPS - len(digests), appliance=appliance)
            try:
                for _ in executor:
                    digests.append(executor.digest)
                    at.pop(executor.step, lambda: None)()
            except errors.DeadlineError as error:
                at[-1](error)  # type: ignore[call-arg]
    return digests


# ---- the lane


def test_lane_cut_anywhere_in_its_frames(cluster: Cluster, whole: list[int], lanes: Any) -> None:
    def cut_from_now_on() -> None:
        for number, proxy in enumerate(lanes()):
            proxy.cut_after = 1009 + 331 * number
            proxy.cut()

    def spare() -> None:
        for proxy in lanes():
            assert proxy.connections >= 5
            proxy.cut_after = 0

    assert train(cluster.address, "cut", {10: cut_from_now_on, 150: spare}) == whole


def test_a_lane_that_is_slow(cluster: Cluster, whole: list[int], lanes: Any) -> None:
    def slow() -> None:
        for proxy in lanes():
            proxy.delay_s, proxy.bytes_per_s = 0.02, 100_000.0

    assert train(cluster.address, "slow", {10: slow}) == whole


@pytest.mark.parametrize("direction", ["up", "down"])
def test_silent_lane_is_named_and_recovers(cluster: Cluster, whole: list[int], lanes: Any, direction: str) -> None:
    said: list[str] = []

    def heal(error: errors.DeadlineError) -> None:
        said.append(str(error))
        for proxy in lanes():
            proxy.heal()

    def silence() -> None:
        for proxy in lanes():
            proxy.silence(direction)

    at: dict[int, Any] = {10: silence, -1: heal}
    assert train(cluster.address, f"silent {direction}", at, timeout_s=4) == whole
    assert any("waited 4 s for step" in text and "on worker first" in text for text in said), said


# ---- the control connections


def test_jobs_without_the_coordinator_continue(cluster: Cluster, whole: list[int]) -> None:
    """Cut two jobs off for longer than their lease. From one nothing is heard, so its workers are taken from it, and
    given back; the other one only gets no replies."""

    def deaf(directions: tuple[str, ...]) -> list[int | None]:
        with Proxy(cluster.address) as proxy:
            threads = []

            def silence() -> None:
                proxy.silence(*directions)
                threads.append(threading.Timer(CLIENT_LEASE_S + 2, proxy.heal))
                threads[0].start()

            def to_the_last() -> None:
                threads[0].join()

            at: dict[int, Any] = {10: silence, 60: to_the_last}
            return train(proxy.address, f"deaf {directions}", at, lane="auto")

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(deaf, [("up", "down"), ("down",)])) == [whole, whole]


def test_worker_cut_off_is_replaced(cluster: Cluster, between: Proxy, whole: list[int]) -> None:
    """Cut a worker off in each direction, under a job on each kind of lane. It goes on sending batches of an old
    generation, which nobody reads, until it hears of it."""
    lanes = ("auto", "tcp")
    with Proxy(cluster.address) as other:
        proxies, daemons = [between, other], [cluster.workers[0]]

        def join() -> None:
            daemons.append(cluster.add_worker(4, allow="traps", name="second", through=other.address))

        def replaced(number: int, direction: str) -> Callable[[], None]:
            def act() -> None:
                held = runners(daemons[number].pid)
                proxies[number].silence(direction)
                time.sleep(4.5)
                assert alive(held), "it has not heard of it"

            return act

        def healed(number: int) -> Callable[[], None]:
            def act() -> None:
                proxies[number].heal()
                until(lambda: not census(daemons[number].pid)["processes"], 20, "runners of slots that had moved go on")

            return act

        # The first worker's slots go to the second, and then back. A ring holds 32 batches of each of the two slots:
        # at the next fault the loop has had to wait for the new ones.
        faults = {5: join, 10: replaced(0, "up"), 110: healed(0), 120: replaced(1, "down"), 230: healed(1)}
        meetings = {step: threading.Barrier(len(lanes), action, timeout=60) for step, action in faults.items()}

        def cut_off(lane: str) -> list[int | None]:
            at: dict[int, Callable[[], Any]] = {step: meeting.wait for step, meeting in meetings.items()}
            return train(cluster.address, f"cut off {lane}", at, lane=lane)

        try:
            with ThreadPoolExecutor(len(lanes)) as pool:
                assert list(pool.map(cut_off, lanes)) == [whole] * len(lanes)
        finally:
            for proxy in proxies:
                proxy.heal()
            for daemon in daemons[1:]:
                daemon.terminate()
                daemon.wait(10)
