"""The coordinator is killed and started again on its state: training goes on, and nothing is forgotten."""

from __future__ import annotations

import signal
from pathlib import Path

import streams
from cluster import TOKEN, running

from penstock.client import Appliance, DataExecutor, DataLoader


def test_killed_and_restarted_in_mid_run(tmp_path: Path) -> None:
    with running(tmp_path / "state") as cluster:
        cluster.add_worker(4)

        def train(job: str, *, kill: bool) -> tuple[list[object], dict[str, object]]:
            with Appliance(
                cluster.address, num_workers_per_box=2, job=job, seed=3, token=TOKEN, timeout_s=60, box=0, num_boxes=1
            ) as appliance:
                loader = DataLoader(streams.stateful, 400)
                executor = DataExecutor(loader, num_steps=120, checkpoint_steps=50, appliance=appliance)
                got: list[object] = []
                for batch in executor:
                    got.append(batch.tolist())
                    if kill and executor.step == 20:
                        cluster.coordinator.send_signal(signal.SIGKILL)
                        cluster.coordinator.wait()
                    if kill and executor.step == 80:
                        cluster.restart_coordinator()
                state = loader.state_dict()
            return got, state

        whole, _ = train("whole", kill=False)
        got, state = train("killed", kill=True)
        assert got == whole
        again = DataLoader(streams.stateful, 400)
        again.load_state_dict(state)
        reference = DataLoader(streams.stateful, 400)
        with Appliance(
            cluster.address, num_workers_per_box=2, job="after", seed=3, token=TOKEN, timeout_s=60, box=0, num_boxes=1
        ) as appliance:
            rest = [batch.tolist() for batch in DataExecutor(again, num_steps=30, appliance=appliance)]
            steps = DataExecutor(reference, num_steps=150, appliance=appliance)
            assert [batch.tolist() for batch in steps][120:] == rest


def test_two_loaders_on_one_appliance_are_two_runs() -> None:
    with Appliance(num_workers_per_box=2) as appliance:
        train, evaluate = DataLoader(streams.counter, 20), DataLoader(streams.shared, 6)
        executor = DataExecutor(train, num_steps=12, appliance=appliance)
        seen = []
        for _ in executor:
            if executor.step % 4 == 0:
                seen.append([batch["number"] for batch in DataExecutor(evaluate, appliance=appliance)])
        assert seen == [list(range(6))] * 3
        assert executor.step == 12
