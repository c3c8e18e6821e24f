"""Peers of another release: agreed or refused at their first words, never in mid-run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import streams
from cluster import running
from neighbours import beside

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.proto.rpc import calls
from penstock.proto.rpc.version import PROTOCOL, PROTOCOL_KEY, VERSION, VERSION_KEY

OTHER = f"""
import sys
import penstock.proto.rpc.version as version
version.VERSION, version.PROTOCOL = "0.99.0", {PROTOCOL + 1}
from penstock.worker.__main__ import main
sys.argv[0] = "penstock.worker"
sys.exit(main())
"""


def test_a_job_one_minor_apart_is_served(appliance: Appliance, monkeypatch: pytest.MonkeyPatch) -> None:
    major, minor, *rest = VERSION.split(".")
    newer = ".".join([major, str(int(minor) + 1), *rest])
    monkeypatch.setattr(calls, "_RELEASE", ((PROTOCOL_KEY, str(PROTOCOL)), (VERSION_KEY, newer)))
    with beside(appliance, num_workers_per_box=1) as apart:
        assert len(list(DataExecutor(DataLoader(streams.counter, 3), appliance=apart))) == 3


def test_worker_of_another_protocol_is_refused(tmp_path: Path) -> None:
    with running(tmp_path / "state") as cluster:
        arguments = ["--coordinator", cluster.address, "--slots", "2", "--allow", "streams", "--insecure"]
        ended = subprocess.run(
            [sys.executable, "-c", OTHER, *arguments],
            env=cluster.environment,
            capture_output=True,
            text=True,
            timeout=30,
        )
    assert ended.returncode != 0
    (line,) = ended.stderr.strip().splitlines()
    for said in ("0.99.0", VERSION, str(PROTOCOL), str(PROTOCOL + 1), "install the same release"):
        assert said in line
