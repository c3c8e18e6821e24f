"""A certificate for each role: what stands in for what, where names are checked against roles."""

from __future__ import annotations

import asyncio
import socket
import ssl

import pytest
from lane_doors import listeners, refusing
from pki import Pair, Pki
from tests.security.conftest import SECRETS, Starter, tls_flags

from penstock.proto.errors import AuthenticationError, NotPermittedError, PenstockError, TlsError
from penstock.proto.lane.frames import LANE_PROTOCOL
from penstock.proto.lane.tcp import sealed
from penstock.proto.lane.tls_socket import connect_tls
from penstock.proto.rpc.calls import AsyncCoordinatorClient, CoordinatorClient
from penstock.proto.rpc.tls import Tls, host_of, load_tls
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import lane_pb2

NAME = "*.penstock"
HELLO = sealed(lane_pb2.Hello(protocol=LANE_PROTOCOL, run="job/0").SerializeToString())


@pytest.fixture(scope="module")
def pairs(pki: Pki) -> dict[str, Pair]:
    return {role: pki.issue(role, f"DNS:{role}.penstock") for role in ("coordinator", "worker", "client", "admin")}


def tls_of(pki: Pki, pair: Pair, name: str = NAME) -> Tls:
    tls = load_tls(pki.ca, pair.cert, pair.key, name)
    assert tls is not None
    return tls


@pytest.fixture(scope="module")
def address(start_once: Starter, pki: Pki, pairs: dict[str, Pair]) -> str:
    """Address of a coordinator with a coordinator's certificate."""
    return start_once.coordinator(*tls_flags(pki.ca, pairs["coordinator"], NAME)).line


async def register(address: str, tls: Tls) -> None:
    async with AsyncCoordinatorClient(address, SECRETS["worker"], tls=tls) as client:
        await client.register(pb.RegisterWorkerRequest(worker="w", session="s", slots=1))


def test_token_needs_a_certificate_of_its_role(address: str, pki: Pki, pairs: dict[str, Pair]) -> None:
    with CoordinatorClient(address, SECRETS["admin"], tls=tls_of(pki, pairs["admin"])) as admin:
        admin.status()
        asyncio.run(register(address, tls_of(pki, pairs["worker"])))
        for role in ("client", "admin", "coordinator"):
            words = rf"RegisterWorker needs a certificate for worker\.penstock .*, got one for {role}\.penstock"
            with pytest.raises(NotPermittedError, match=words):
                asyncio.run(register(address, tls_of(pki, pairs[role])))
    for kind in ("URI:admin.penstock", "email:admin.penstock@admin.penstock", "DNS:worker.penstock,URI:admin.penstock"):
        named = tls_of(pki, pki.issue("named", kind))
        with (
            CoordinatorClient(address, SECRETS["admin"], tls=named) as admin,
            pytest.raises(NotPermittedError, match=r"Status needs a certificate for admin\.penstock"),
        ):
            admin.status()
    with (
        CoordinatorClient(address, SECRETS["client"], tls=tls_of(pki, pairs["worker"])) as client,
        pytest.raises(NotPermittedError, match=r"PutBlob needs a certificate for client\.penstock"),
    ):
        client.put_blob(b"x")


def test_a_worker_is_no_coordinator(start: Starter, pki: Pki, pairs: dict[str, Pair]) -> None:
    """Refuse a worker that knows the workers' token and listens in the coordinator's place."""
    hostile = start.coordinator(*tls_flags(pki.ca, pairs["worker"])).line
    with pytest.raises(TlsError, match=r"another name than tls_name=\*\.penstock"):
        asyncio.run(register(hostile, tls_of(pki, pairs["worker"])))


def test_server_must_have_the_name_of_its_role(pki: Pki, pairs: dict[str, Pair]) -> None:
    for role, serves in (("worker", "coordinator"), ("client", "worker")):
        with pytest.raises(TlsError, match=rf"must be for the name {serves}\.penstock"):
            tls_of(pki, pairs[role]).check_own(serves)
        tls_of(pki, pairs[serves]).check_own(serves)


def hello(address: str, tls: Tls) -> bytes:
    """Return a worker's answer."""
    host, port = host_of(address)
    with connect_tls(socket.create_connection((host, port), 20), tls, host) as lane:
        lane.sendall(HELLO)
        return lane.recv(4096)


def test_a_lane_is_for_clients(pki: Pki, pairs: dict[str, Pair]) -> None:
    asked: PenstockError = AuthenticationError("the daemon was asked")
    with listeners(refusing(asked), tls_of(pki, pairs["worker"])) as (opened, _):
        for role in ("client", "admin"):
            assert b"the daemon was asked" in hello(opened.tcp_address, tls_of(pki, pairs[role]))
        for role in ("worker", "coordinator"):
            assert hello(opened.tcp_address, tls_of(pki, pairs[role])) == b""
    with (
        listeners(refusing(asked), tls_of(pki, pairs["client"], "")) as (opened, _),
        pytest.raises(ssl.SSLCertVerificationError, match="mismatch"),
    ):
        hello(opened.tcp_address, tls_of(pki, pairs["client"]))
