"""What daemons give back once they have nothing to do."""

from __future__ import annotations

from pathlib import Path

import large_state
import pytest
from census import own_memory
from cluster import running
from waiting import until

from penstock.client import DataExecutor, DataLoader
from penstock.proto.state.codec import encode_state

MIB = 1 << 20
STATE = 200


@pytest.mark.timeout(300)
def test_daemons_give_back_what_a_large_state_took(tmp_path: Path) -> None:
    """Without that, the coordinator keeps 170 MiB and the worker 400, for as long as they live."""
    with running(tmp_path / "state") as cluster:
        worker = cluster.add_worker(1, allow="large_state")
        daemons = [cluster.coordinator.pid, worker.pid]
        before = [own_memory(pid) for pid in daemons]
        with cluster.box("large", num_workers_per_box=1, replay_s=0.0) as appliance:
            loader = DataLoader(large_state.loader, STATE)
            batches = iter(DataExecutor(loader, num_steps=50, appliance=appliance))
            next(batches)
            while len(encode_state(loader.state_dict())) < STATE * MIB:  # the worker may have kept none yet
                next(batches)
            held = [own_memory(pid) for pid in daemons]
            assert held[1] > before[1] + 0.9 * STATE * MIB  # the worker answers with it
            loader.close()

        def grown() -> list[int]:
            return [(own_memory(pid) - then) // MIB for pid, then in zip(daemons, before, strict=True)]

        until(lambda: max(grown()) < 40, 25, lambda: f"coordinator and worker have grown by {grown()} MiB")
