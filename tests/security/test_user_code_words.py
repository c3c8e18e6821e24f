"""User code that says too much of itself costs itself, and not its worker, which has slots of other jobs."""

from __future__ import annotations

import contextlib

import pytest
import streams
import wordy
from tests.security.conftest import SECRETS, Starter

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.proto.errors import PenstockError


def test_user_code_cannot_end_its_worker(start: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_TOKEN", SECRETS["client"])
    address = start.coordinator().line
    worker = start.worker(address, "--allow", "wordy")

    def batches(job: str, loader: DataLoader) -> int:
        with Appliance(address, num_workers_per_box=1, job=job, timeout_s=10) as appliance:
            return sum(1 for _ in DataExecutor(loader, num_steps=5, appliance=appliance))

    with contextlib.suppress(PenstockError):  # an error or its batches: that is the job's own
        batches("wordy", DataLoader(wordy.long_name))
    assert batches("other", DataLoader(streams.Counter, 5)) == 5
    assert worker.process.poll() is None
