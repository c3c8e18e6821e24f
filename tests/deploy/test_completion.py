"""Completion: what the function of a shell's script is given; what it asks nobody for is not loaded."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from typing import Any


def offered(shell: Any, line: str, **environment: str) -> str:
    """Return what the script's function is given for a line."""
    words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
    done = shell.call(_PENSTOCK_COMPLETE="complete_bash", **words, **environment)
    assert (done.returncode, done.stderr) == (0, "")
    return " ".join(done.stdout.split())


def test_commands_options_and_values(shell: Any) -> None:
    for line, found in (
        ("penstock st", "status state"),
        ("penstock config w", "worker"),
        ("penstock doctor machine --sl", "--slots"),
        ("penstock worker --al", "--allow"),
    ):
        assert offered(shell, line) == found


def test_runs_that_the_coordinator_knows(coordinator: Any) -> None:
    from penstock.proto.rpc.calls import CoordinatorClient
    from penstock.proto.v1 import coordinator_pb2 as pb
    from penstock.proto.v1.records_pb2 import LoaderSpec

    with CoordinatorClient(
        coordinator.environment["PENSTOCK_COORDINATOR"], coordinator.environment["PENSTOCK_TOKEN"]
    ) as client:
        loader = LoaderSpec(input_fn="streams:slow")
        for job in ("lm", "vision"):
            client.open_run(
                pb.OpenRunRequest(
                    version="0.1.0", job=job, client_id=job, num_boxes=1, num_workers_per_box=1, loader=loader
                )
            )
    for _ in range(5):  # a coordinator that does not answer within a second has none to offer
        found = [offered(coordinator, line) for line in ("penstock state l", "penstock replay vi")]
        if all(found):
            break
    assert found == ["lm/0", "vision/0"]


def test_silent_coordinator_costs_a_second_only(shell: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        assert offered(shell, "penstock state l", PENSTOCK_COORDINATOR=address) == ""
        assert time.monotonic() - began < 60
    assert offered(shell, "penstock state l", PENSTOCK_COORDINATOR="127.0.0.1:1", PENSTOCK_TOKEN="") == ""


def test_completion_loads_neither_grpc_nor_torch() -> None:
    heavy = ("grpc", "google.protobuf", "torch", "numpy")
    code = f"import sys, penstock.deploy.cli.main; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")
