"""Probe of a container, `python -m penstock.deploy.probe ROLE live|ready`: checks whether its daemon is live or ready.

The gRPC probes of Kubernetes do not support TLS, and a worker has no gRPC server. The probe reads the same PENSTOCK_*
variables as the daemon of its container. It is run every few seconds, so it imports no torch, Typer or pydantic, and
gRPC only for a coordinator.

A coordinator is live if it answers at all, also with TLS, and ready if it answers SERVING. A worker is live if its
heartbeat calls end, and ready if the coordinator answers them (penstock.runtime.process.liveness_file).

Exit status: 0 yes, 1 no or unknown, 2 a mistake on the command line. With 1 and 2 there is a line on standard error.
"""

from __future__ import annotations

import argparse
import os
import sys

from penstock.proto.errors import DeadlineError, InvalidArgumentError, PenstockError

ANSWER_S = 4.0
"""Longest wait for an answer in a readiness probe, in seconds, below its timeout of 5 s, to print the error."""
ALIVE_S = 15.0
"""Longest wait in a liveness probe, in seconds, with a timeout of 20 s: a busy daemon must not be killed."""
LIVE_S = 120.0
"""Seconds since the last heartbeat call above which a worker hangs: several times a call's 15 s (in the largest fleet
5 s, and 10 s to the deadline), for an overloaded machine."""
READY_S = 30.0
_ANY = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m penstock.deploy.probe", description="Check whether this daemon is live or ready."
    )
    parser.add_argument("role", choices=["coordinator", "worker"])
    parser.add_argument("what", choices=["live", "ready"])
    given = parser.parse_args(arguments)
    try:
        if given.role == "coordinator":
            _ask_coordinator(_variable("PENSTOCK_COORDINATOR_LISTEN"), given.what == "ready")
        else:
            _look_at_worker(_variable("PENSTOCK_WORKER_LIVENESS_FILE"), given.what == "ready")
    except PenstockError as error:
        print(f"penstock probe: {error.message}", file=sys.stderr)
        return 1
    return 0


def _variable(name: str) -> str:
    value = os.environ.get(name, "")
    if not value:
        raise InvalidArgumentError(f"the variable {name} must be set in the container. Set it, as the manifests do")
    return value


def _look_at_worker(file: str, ready: bool) -> None:
    from penstock.runtime.process.liveness_file import read_liveness

    liveness = read_liveness(file)
    if ready and liveness.heard_s_ago > READY_S:
        since = "yet" if liveness.heard_s_ago == float("inf") else f"for {liveness.heard_s_ago:.0f} s"
        raise DeadlineError(
            f"the coordinator has not answered the worker {since} (limit {READY_S:g} s). See whether it "
            "runs, and whether the worker reaches it"
        )
    if liveness.turned_s_ago > LIVE_S:
        raise DeadlineError(
            f"the worker has made no progress for {liveness.turned_s_ago:.0f} s, so it hangs or is stopped. Restart it"
        )


def _ask_coordinator(listen: str, ready: bool) -> None:
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

    from penstock.proto.rpc.auth_interceptor import SERVICE
    from penstock.proto.rpc.channel import connect
    from penstock.proto.rpc.tls import load_tls
    from penstock.proto.rpc.wire_errors import translating

    host, _, port = listen.rpartition(":")
    address = f"{_ANY.get(host, host)}:{port}"
    tls = load_tls(*(os.environ.get(f"PENSTOCK_TLS_{what}", "") for what in ("CA", "CERT", "KEY", "NAME")))
    if file := os.environ.get("PENSTOCK_CREDENTIALS", "").replace("*", "coordinator"):
        tls = load_tls(file, file, file, "*.penstock")
    answer_s = ANSWER_S if ready else ALIVE_S
    with connect(address, tls) as channel, translating(address, "Check", answer_s, lambda: False):
        request = health_pb2.HealthCheckRequest(service=SERVICE)
        reply = health_pb2_grpc.HealthStub(channel).Check(request, timeout=answer_s)
    if ready and reply.status != health_pb2.HealthCheckResponse.SERVING:
        name = health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)
        raise DeadlineError(
            f"the coordinator at {address} is not ready: its health service reports {name}. See its log"
        )


if __name__ == "__main__":
    sys.exit(main())
