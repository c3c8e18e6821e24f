"""Peers of another release: agreed or refused at their first words, never in mid-run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import streams
from cluster import TOKEN, Cluster, running

from penstock.client import DataExecutor, DataLoader
from penstock.proto.rpc.version import PROTOCOL, VERSION

OTHER = """
import sys
import penstock.proto.rpc.version as version
version.VERSION, version.PROTOCOL = "{version}", {protocol}
from penstock.{package}.__main__ import main
sys.argv[0] = "penstock.{package}"
sys.exit(main())
"""
CALLER = """
import penstock.proto.rpc.version as version
version.VERSION, version.PROTOCOL = "0.99.0", version.PROTOCOL + 1
from penstock.proto.rpc.calls import CoordinatorClient
CoordinatorClient("{address}", "{token}").status()
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
    with cluster.box("apart") as appliance:
        batches = list(DataExecutor(DataLoader(streams.counter, 3), appliance=appliance))
    assert len(batches) == 6


@pytest.mark.parametrize(
    ("program", "says"),
    [
        (OTHER.format(version="0.99.0", protocol=PROTOCOL + 1, package="worker"), "install the same release"),
        (CALLER, "VersionSkewError"),
    ],
    ids=["worker", "job"],
)
def test_another_protocol_is_refused(cluster: Cluster, program: str, says: str) -> None:
    program = program.replace("{address}", cluster.address).replace("{token}", TOKEN)
    arguments = ["--coordinator", cluster.address, "--slots", "2", "--allow", "streams"]
    ended = subprocess.run(
        [sys.executable, "-c", program, *arguments], env=cluster.environment, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode != 0
    last = ended.stderr.strip().splitlines()[-1]
    for said in ("0.99.0", VERSION, str(PROTOCOL), str(PROTOCOL + 1), says):
        assert said in last
