"""Checks of `penstock doctor cluster`, beyond `penstock status`: can the lanes of workers be reached from here?"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from penstock.deploy.doctor.findings import Finding
from penstock.proto.lane.frames import LANE_PROTOCOL
from penstock.proto.lane.tcp import sealed
from penstock.proto.lane.tls_socket import connect_tls
from penstock.proto.rpc.addresses import host_id, is_local
from penstock.proto.rpc.calls import CoordinatorClient
from penstock.proto.rpc.tls import Tls, host_of
from penstock.proto.v1 import lane_pb2
from penstock.runtime.telemetry.cluster_view import WorkerView, view

CONNECT_S = 3.0
"""Longest wait in seconds for a TCP connection within a cluster."""
NO_ANSWER = f"the worker accepts connections, but does not answer within {CONNECT_S:g} s"
"""Finding about a worker that hangs: the kernel still accepts connections for it."""
AT_A_TIME = 64


def check_cluster(client: CoordinatorClient, address: str, tls: Tls | None) -> Iterator[Finding]:
    """Yield all findings about a cluster. Raises the call's error if the coordinator cannot be reached."""
    workers = [worker for worker in view(client.status(deadline_s=10.0)).workers if worker.live]
    if not workers:
        yield Finding(
            "workers",
            "problem",
            "no worker is live",
            f"Run `penstock worker --coordinator {address} --slots N --allow MODULE` on each input node.",
        )
    here = host_id()
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        errors = pool.map(lambda worker: _lane_error(worker.tcp_address, tls), workers)
        for worker, error in zip(workers, errors, strict=True):
            yield check_worker(worker, error, worker.host_id == here)


def _lane_error(address: str | None, tls: Tls | None) -> str:
    """Return why a worker's lanes cannot be reached, or "": any answer to a Hello for an unknown run suffices."""
    if not address:
        return "the worker has no address for lanes from other machines"
    hello = lane_pb2.Hello(protocol=LANE_PROTOCOL, run="`penstock doctor`")
    host, port = host_of(address)
    connected = False
    try:
        with socket.create_connection((host, port), CONNECT_S) as sock:
            connected = True
            with connect_tls(sock, tls, host) if tls is not None else sock as lane:
                lane.sendall(sealed(hello.SerializeToString()))
                return "" if lane.recv(1) else "the worker closes the connection without an answer"
    except TimeoutError:
        return NO_ANSWER if connected else f"no answer in {CONNECT_S:g} s"
    except OSError as error:
        return error.strerror or str(error)


def check_worker(worker: WorkerView, error: str, here: bool) -> Finding:
    """Return the finding about a live worker. `error`: why its lanes are out of reach; `here`: they need no network."""
    check = f"worker {worker.worker}"
    found = f"lanes at {worker.tcp_address or 'no address'}"
    if error == NO_ANSWER:
        remedy = "The worker hangs or is stopped: look at its state in ps and at its log, and start it again."
    elif not error or here:
        return Finding(check, "ok", f"{found}; on this host" if here else found)
    elif worker.tcp_address and is_local(worker.tcp_address):
        remedy = "The worker listens on its own machine only: start it with --listen ITS-ADDRESS:0."
    else:
        remedy = "Open that port in the firewall (--listen HOST:PORT keeps the port), or change --listen there."
    return Finding(check, "problem", f"{found}, which cannot be reached from here: {error}", remedy)
