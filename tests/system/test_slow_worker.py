"""One worker is slow: the order is kept, and who is waited for has a name."""

from __future__ import annotations

from pathlib import Path

import streams
from cluster import TOKEN, running

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.proto.calls import CoordinatorClient

SLOW_S = 0.04


def test_a_slow_worker_is_named_and_waited_for(tmp_path: Path) -> None:
    with (
        running(tmp_path) as cluster,
        Appliance(
            cluster.address, num_workers_per_box=2, job="job", token=TOKEN, timeout_s=30, box=0, num_boxes=1
        ) as appliance,
        CoordinatorClient(cluster.address, TOKEN) as client,
    ):
        cluster.add_worker(1, name="first")
        cluster.add_worker(1, name="second")
        executor = DataExecutor(DataLoader(streams.slow, SLOW_S, 100), num_steps=160, appliance=appliance)
        got, waited_for = [], set()
        for batch in executor:
            got.append(int(batch))
            if executor.step % 40 == 0:
                (run,) = client.status().runs
                waited_for.add(run.boxes[0].waiting_for)
        slow = next(slot.worker for slot in run.boxes[0].slots if slot.slot == 0)
        waited = executor.stats.waited_by_worker
    assert got == [number for number in range(80) for _ in range(2)]
    assert max(waited, key=lambda name: waited[name]) == slow
    assert any(slow in who for who in waited_for), waited_for
