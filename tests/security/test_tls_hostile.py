"""Peers whose TLS is wrong, at the coordinator's port and at a worker's lanes, beside a job that trains."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import streams
from pki import Pair, Pki
from tests.security.conftest import SECRETS, TOKENS, Starter, tls_flags

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.proto.lane.frames import LANE_PROTOCOL
from penstock.proto.lane.tcp import sealed
from penstock.proto.rpc.calls import CoordinatorClient
from penstock.proto.rpc.tls import host_of, load_tls
from penstock.proto.v1 import lane_pb2

NAME = "*.penstock"
PATIENCE_S = 25.0
"""Far above the 10 s that a connection without a Hello or a call may take."""
HELLO = sealed(lane_pb2.Hello(protocol=LANE_PROTOCOL, run="job/0").SerializeToString())
Attack = Callable[[socket.socket], None]


@pytest.fixture(scope="module")
def pairs(pki: Pki) -> dict[str, Pair]:
    pairs = {role: pki.issue(role, f"DNS:{role}.penstock") for role in ("coordinator", "worker", "client", "admin")}
    pairs["expired"] = pki.issue("expired-client", "DNS:client.penstock,DNS:worker.penstock", -1)
    pairs["stranger"] = pki.self_signed("stranger-to-all")
    other = Pki(pki.folder / "other")
    pairs["other"] = other.issue("client", "DNS:client.penstock,DNS:worker.penstock,DNS:coordinator.penstock")
    return pairs


def shaken(pair: Pair | None, newest: ssl.TLSVersion, ends: list[bytes]) -> Attack:
    """Return an attack: TLS with a certificate, no check of the other end, then these bytes until it hangs up."""

    def attack(raw: socket.socket) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.maximum_version = newest
        context.set_alpn_protocols(["h2"])
        if pair is not None:
            context.load_cert_chain(pair.cert, pair.key)
        with context.wrap_socket(raw) as talking:
            for data in ends:
                talking.sendall(data)
            while talking.recv(1 << 16):
                pass

    return attack


def said(data: bytes) -> Attack:
    def attack(raw: socket.socket) -> None:
        raw.sendall(data)
        while raw.recv(1 << 16):
            pass

    return attack


def attacks(pairs: dict[str, Pair]) -> Iterator[Attack]:
    for who in (None, *(pairs[name] for name in ("expired", "stranger", "other", "worker", "coordinator"))):
        for newest in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
            yield shaken(who, newest, [HELLO])
    yield shaken(pairs["client"], ssl.TLSVersion.TLSv1_3, [b"\0" * 100_000])
    yield shaken(pairs["client"], ssl.TLSVersion.TLSv1_3, [])
    for data in (
        b"",
        b"\x16",
        b"\x16\x03\x01\xff\xff" + b"\1" * 30,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        HELLO,
        b"GET / HTTP/1.1\r\n\r\n",
    ):
        yield said(data)


def time_of(address: str, attack: Attack) -> float:
    """Return the seconds until the other end had enough."""
    begun = time.monotonic()
    with socket.create_connection(host_of(address), 20) as raw:
        raw.settimeout(PATIENCE_S)
        try:
            attack(raw)
        except TimeoutError:
            return PATIENCE_S
        except OSError:  # ssl.SSLError too: refused
            pass
    return time.monotonic() - begun


@pytest.mark.timeout(240)
def test_wrong_tls_at_all_ports_hurts_no_job(start: Starter, pki: Pki, pairs: dict[str, Pair]) -> None:
    coordinator = start.coordinator(*tls_flags(pki.ca, pairs["coordinator"], NAME))
    listen = ("--listen", "127.0.0.1:0")
    worker = start.worker(coordinator.line, *tls_flags(pki.ca, pairs["worker"], NAME), *listen)
    admin = load_tls(pki.ca, pairs["admin"].cert, pairs["admin"].key, NAME)
    with CoordinatorClient(coordinator.line, SECRETS["admin"], tls=admin) as client:
        (lanes,) = [one.tcp_address for one in client.status().workers]
    of_job: dict[str, Any] = {
        "tls_cert": pairs["client"].cert,
        "tls_key": pairs["client"].key,
        "tls_ca": pki.ca,
        "tls_name": NAME,
    }
    with (
        ThreadPoolExecutor(48) as pool,
        Appliance(
            coordinator.line, job="job", token=TOKENS, num_workers_per_box=2, lane="tcp", timeout_s=60, **of_job
        ) as appliance,
    ):
        tried = [
            (port, number, pool.submit(time_of, port, attack))
            for port in (coordinator.line, lanes)
            for number, attack in enumerate(attacks(pairs))
        ]
        executor = DataExecutor(DataLoader(streams.paced, 0.02), 300, appliance=appliance)
        batches = [int(batch["x"].flatten()[0]) for batch in executor]
        times = [(port, number, done.result()) for port, number, done in tried]
    assert batches == [value for step in range(1, 151) for value in (step, 1000 + step)]
    assert not [one for one in times if one[2] >= PATIENCE_S]
    for started in (coordinator, worker):
        assert started.process.poll() is None
        lines = started.log.read_text().splitlines()
        assert not [line for line in lines if "Traceback" in line], lines
        assert len(lines) < 12, lines  # of one kind in a short time there is one line, which counts the others
