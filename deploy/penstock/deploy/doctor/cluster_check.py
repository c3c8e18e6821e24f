"""Checks of `penstock doctor cluster`: whether the workers can be reached from here and can run the job.

The coordinator's data about each worker are checked, and a lane (the connection for batches) to every worker is tried
from here, many at a time. That the coordinator cannot be reached is an error of the call, as in every command.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from penstock.deploy.doctor.findings import Finding, ok, problem, warning
from penstock.proto.lane.frames import LANE_PROTOCOL
from penstock.proto.lane.tcp import sealed
from penstock.proto.lane.tls_socket import connect_tls
from penstock.proto.rpc.addresses import host_id, is_local
from penstock.proto.rpc.calls import CoordinatorClient
from penstock.proto.rpc.tls import Tls, host_of
from penstock.proto.state.allowed_modules import module_of, under
from penstock.proto.v1 import lane_pb2
from penstock.runtime.telemetry.cluster_view import LATELY_S, ClusterView, EventView, WorkerView, view

__all__ = [
    "JobRequirements",
    "check_cluster",
    "check_lost",
    "check_skew",
    "check_slots",
    "check_worker",
]

CONNECT_S = 3.0
"""Longest time in seconds to wait for a TCP connection within a cluster."""
NO_ANSWER = f"the worker accepts connections, but does not answer within {CONNECT_S:g} s"
"""Text of the finding about a worker that hangs or is stopped. The kernel still accepts connections for it."""
LATE_HEARTBEAT_S = 2.0
"""Age of a worker's last heartbeat above which a warning is given, in seconds. Heartbeats come every second in a small
fleet, so at this age one is missing, but the lease (the silence after which a worker counts as dead) has not ended."""
LARGE_FLEET = 1000
"""Number of workers above which LATE_HEARTBEAT_S grows in proportion, because heartbeats are rarer in such a fleet (see
lease_policy)."""
AT_A_TIME = 64
SKEW_S, FAR_OFF_S = 2.0, 300.0
"""Limits of the difference between two clocks, in seconds. A difference above SKEW_S is reported. Above FAR_OFF_S, one
side may take valid certificates for invalid."""


@dataclass(frozen=True)
class JobRequirements:
    """Requirements of a job that the cluster must meet. None: no requirement; but if one of `boxes` and `workers` is
    given, None for the other counts as 1."""

    boxes: int | None = None
    """Number of boxes."""
    workers: int | None = None
    """Number of workers of each box."""
    input_fn: str | None = None


def check_cluster(client: CoordinatorClient, address: str, tls: Tls | None, job: JobRequirements) -> Iterator[Finding]:
    """Yield all findings about a cluster. Raises the error of the call if the coordinator cannot be reached."""
    before = time.time()
    reply = client.status(deadline_s=10.0)
    yield check_skew(reply.wall_s - before, time.time() - before)
    found = view(reply)
    workers = found.workers
    if not any(worker.live for worker in workers):
        yield from check_lost(found)
        yield problem(
            "workers",
            f"none of {len(workers)} is live" if workers else "no worker is registered",
            f"Run `penstock worker --coordinator {address} --slots N --allow MODULE` on each input node.",
        )
        return
    here = host_id()
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        answers = pool.map(lambda worker: _lane_error(worker.tcp_address, tls) if worker.live else "", workers)
        for worker, refused in zip(workers, answers, strict=True):
            yield check_worker(
                worker,
                refused,
                worker.host_id == here,
                reply.version,
                LATE_HEARTBEAT_S * max(1.0, len(workers) / LARGE_FLEET),
            )
    yield from check_lost(found)
    yield check_slots(workers, job)


def _connect_error(address: str | None) -> str:
    """Return the reason why no TCP connection to an address can be made; "" if one can be made. `address`: None or ""
    for a worker that has no address for lanes from other machines."""
    if not address:
        return "the worker has no address for lanes from other machines"
    try:
        with socket.create_connection(host_of(address), CONNECT_S):
            return ""
    except TimeoutError:
        return f"no answer in {CONNECT_S:g} s"
    except OSError as error:
        return error.strerror or str(error)


def _lane_error(address: str | None, tls: Tls | None) -> str:
    """Return the reason why a worker's lanes (connections for batches) cannot be reached from here; "" if they can.
    Connect and send a Hello (the request that opens a lane) for a run that does not exist: any answer, also a refusal,
    shows that the worker can be reached. `address`: None or "" for a worker without an address for lanes."""
    refused = _connect_error(address)
    if refused or not address:
        return refused
    hello = lane_pb2.Hello(protocol=LANE_PROTOCOL, run="`penstock doctor`")
    host, port = host_of(address)
    try:
        sock = socket.create_connection((host, port), CONNECT_S)
        with sock, connect_tls(sock, tls, host) if tls is not None else sock as lane:
            lane.sendall(sealed(hello.SerializeToString()))
            return "" if lane.recv(1) else "the worker closes the connection without an answer"
    except TimeoutError:
        return NO_ANSWER
    except OSError as error:
        return error.strerror or str(error)


def check_skew(ahead_s: float, took_s: float) -> Finding:
    """Compare the coordinator's clock with this machine's. `ahead_s`: time in the coordinator's answer, minus this
    machine's time before the call, in seconds; `took_s`: duration of the call in seconds."""
    if ahead_s < -1e8:
        return warning("clock", "the coordinator does not report its time", "Its release is older: upgrade it.")
    # The coordinator read its clock at some time within the call.
    off = max(0.0, ahead_s - took_s, -ahead_s)
    sign = "ahead of" if ahead_s > 0 else "behind"
    found = (
        f"the coordinator's clock is {off:.1f} s {sign} this machine's"
        if off
        else "the clocks of the coordinator and this machine agree"
    )
    if off > FAR_OFF_S:
        return problem("clock", found, "timedatectl set-ntp true, on both: each checks certificates by its own clock.")
    if off > SKEW_S:
        return warning("clock", found, "timedatectl set-ntp true, on both: the times in their logs do not agree.")
    return ok("clock", found)


def check_worker(
    worker: WorkerView, error: str, here: bool, coordinator_version: str, quiet_s: float = LATE_HEARTBEAT_S
) -> Finding:
    """Return the finding about a worker.

    Args:
        worker: worker as the coordinator reports it.
        error: reason why the worker's lanes cannot be reached from here; "" if they can be reached.
        here: True if the worker is on this host, where lanes need no network.
        coordinator_version: release of the coordinator.
        quiet_s: age of the worker's last heartbeat above which a warning is given, in seconds.
    """
    check = f"worker {worker.worker}"
    if not worker.live:
        return warning(
            check,
            f"{worker.state}, last heartbeat {worker.heard_of}",
            "Look at the worker's log and start the worker again, unless it was ended on purpose.",
        )
    used = f"{worker.slots_used} of {worker.slots} slots used"
    found = f"{worker.state}, last heartbeat {worker.heard_of}, {used}, lanes at {worker.tcp_address or 'no address'}"
    if error == NO_ANSWER:
        return problem(
            check,
            f"{found}; {error}",
            "The worker hangs or is stopped: look at its state in ps and at its log, and start it again.",
        )
    if error and not here:
        if worker.tcp_address and is_local(worker.tcp_address):
            remedy = "The worker listens on its own machine only: start it with --listen ITS-ADDRESS:0."
        else:
            remedy = "Open that port in the firewall (--listen HOST:PORT keeps the port), or change --listen there."
        return problem(check, f"{found}, which cannot be reached from here: {error}", remedy)
    if worker.seen_s_ago > quiet_s:
        return warning(
            check,
            found,
            "Its machine is overloaded, the worker hangs, or packets are lost: look at its log, and check again.",
        )
    if worker.draining:
        return warning(check, found, "The worker is draining and takes no new slots (`penstock worker drain --undo`).")
    if worker.version and worker.version.split(".")[:2] != coordinator_version.split(".")[:2]:
        return warning(
            check, f"{found}; it runs Penstock {worker.version}", f"pip install penstock=={coordinator_version} there."
        )
    return ok(check, f"{found}; on this host" if here else found)


def check_lost(found: ClusterView) -> Iterator[Finding]:
    """Yield a finding for each worker that was lost lately and has not come back."""
    there = {worker.worker for worker in found.workers}
    lost: dict[str | None, EventView] = {}
    for event in found.events:
        if event.kind == "worker lost" and event.age_s <= LATELY_S and event.worker not in there:
            lost[event.worker] = event  # the newest event wins: they come oldest first
    for name, event in lost.items():
        yield warning(
            f"worker {name}",
            f"lost {event.when}: {event.text}",
            "Look at the worker's log and start the worker again, unless it was ended on purpose.",
        )


def check_slots(workers: Sequence[WorkerView], job: JobRequirements) -> Finding:
    """Check whether the workers that may run the job have enough free slots for it. Workers that are lost or draining
    do not count."""
    ready = [worker for worker in workers if worker.state == "live"]
    module = module_of(job.input_fn) if job.input_fn else ""
    may = [worker for worker in ready if not module or not worker.allow or under(module, worker.allow)]
    if module and ready and not may:
        prefixes: Mapping[str, None] = dict.fromkeys(prefix for worker in ready for prefix in worker.allow)
        return problem(
            "slots",
            f"no worker may run {job.input_fn}: the workers' --allow is {', '.join(prefixes)}",
            f"Start workers with --allow {module.partition('.')[0]}.",
        )
    free = sum(worker.slots - worker.slots_used for worker in may)
    whose = f"on {len(may)} of {len(ready)} workers" + (f" that may run {job.input_fn}" if module else "")
    if job.boxes is None and job.workers is None:
        found = f"{free} free {whose}"
        return ok("slots", found) if free else warning("slots", found, "A new job would wait: start more workers.")
    need = (job.boxes or 1) * (job.workers or 1)
    found = f"{free} free {whose}; {job.boxes or 1} x {job.workers or 1} = {need} are needed"
    if free < need:
        return problem("slots", found, f"penstock worker --slots {need - free} ... on another node.")
    return ok("slots", found)
