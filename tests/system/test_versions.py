"""Peers of another release: agreed or refused at their first words, never in mid-run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import streams
from cluster import Cluster, running

from penstock.client import DataExecutor, DataLoader
from penstock.proto.errors import VersionSkewError
from penstock.proto.rpc import authenticated_calls
from penstock.proto.rpc.version import PROTOCOL, PROTOCOL_KEY, VERSION, VERSION_KEY

OTHER = """
import sys
import penstock.proto.rpc.version as version
version.VERSION, version.PROTOCOL = "{version}", {protocol}
from penstock.{package}.__main__ import main
sys.argv[0] = "penstock.{package}"
sys.exit(main())
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("state")) as cluster:
        yield cluster


def test_a_worker_one_minor_apart_serves(cluster: Cluster) -> None:
    major, minor, *rest = VERSION.split(".")
    program = OTHER.format(version=".".join([major, str(int(minor) + 1), *rest]), protocol=PROTOCOL, package="worker")
    arguments = ["--coordinator", cluster.address, "--slots", "2", "--allow", "streams", "--name", "newer"]
    worker = subprocess.Popen([sys.executable, "-c", program, *arguments], env=cluster.environment)
    cluster.workers.append(worker)
    with cluster.box("apart", timeout_s=30) as appliance:
        batches = list(DataExecutor(DataLoader(streams.counter, 3), appliance=appliance))
    assert len(batches) == 6


def test_worker_of_another_protocol_is_refused(cluster: Cluster) -> None:
    program = OTHER.format(version="0.99.0", protocol=PROTOCOL + 1, package="worker")
    arguments = ["--coordinator", cluster.address, "--slots", "2", "--allow", "streams"]
    ended = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=cluster.environment,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert ended.returncode != 0
    (line,) = ended.stderr.strip().splitlines()
    for said in ("0.99.0", VERSION, str(PROTOCOL), str(PROTOCOL + 1), "install the same release"):
        assert said in line


def test_job_of_another_protocol_is_refused(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    newer = ((PROTOCOL_KEY, "99"), (VERSION_KEY, "0.99.0"))
    monkeypatch.setattr(authenticated_calls, "_RELEASE", newer)
    with cluster.box("newer") as appliance, pytest.raises(VersionSkewError) as caught:
        next(iter(DataExecutor(DataLoader(streams.counter, 3), appliance=appliance)))
    for said in ("0.99.0", VERSION, "99"):
        assert said in str(caught.value)
