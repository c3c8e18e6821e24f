"""Calls to a coordinator under TLS, with real processes: who is let in, and what each who is not hears, at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest
from pki import ROLES, Pair, Pki
from tests.security.conftest import SECRETS, Starter, tls_flags

from penstock.proto.errors import PenstockError, TlsError
from penstock.proto.rpc.calls import AsyncCoordinatorClient, CoordinatorClient
from penstock.proto.rpc.tls import Tls, load_tls
from penstock.proto.v1 import coordinator_pb2 as pb

QUICK_S = 8.0
"""Far below any deadline of a call, far above what a busy machine takes for a refusal."""


@pytest.fixture(scope="module")
def mutual(start_once: Starter, pki: Pki, pair: Pair) -> str:
    """The address of a coordinator that asks for certificates."""
    return start_once.coordinator(*tls_flags(pki.ca, pair)).line


@pytest.fixture(scope="module")
def one_way(start_once: Starter, pair: Pair) -> str:
    """Address of a coordinator that has a certificate and requires none."""
    return start_once.coordinator(*tls_flags("", pair)).line


@pytest.fixture(scope="module")
def plain(start_once: Starter) -> str:
    return start_once.coordinator().line


def ask(address: str, tls: Tls | None) -> None:
    with CoordinatorClient(address, SECRETS["admin"], tls=tls, insecure=True) as client:
        client.status()


def errors_of(address: str, tls: Tls | None) -> list[PenstockError]:
    """Return the errors of both kinds of clients; assert that they come quickly."""

    async def register() -> None:
        async with AsyncCoordinatorClient(address, SECRETS["worker"], tls=tls, insecure=True) as client:
            await client.register(pb.RegisterWorkerRequest(worker="w", session="s", slots=1))

    found = []
    calls: list[Callable[[], None]] = [lambda: ask(address, tls), lambda: asyncio.run(register())]
    for call in calls:
        begun = time.monotonic()
        with pytest.raises(PenstockError) as caught:
            call()
        assert time.monotonic() - begun < QUICK_S
        assert "\n" not in caught.value.message
        found.append(caught.value)
    return found


def test_without_a_ca_callers_need_no_certificate(one_way: str, pki: Pki, pair: Pair) -> None:
    ask(one_way, load_tls(pki.ca))
    ask(one_way, load_tls(pki.ca, pair.cert, pair.key))


def test_expected_name_may_differ_from_address(start: Starter, pki: Pki, pair: Pair) -> None:
    elsewhere = pki.issue("elsewhere", ROLES)
    address = start.coordinator(*tls_flags(pki.ca, elsewhere)).line
    ask(address, load_tls(pki.ca, pair.cert, pair.key, "*.penstock"))
    for name, expected in (("", "the address that was called"), ("*.other", "tls_name=*.other with its role for *")):
        for error in errors_of(address, load_tls(pki.ca, pair.cert, pair.key, name)):
            assert isinstance(error, TlsError)
            assert f"{address} shows a certificate for another name than {expected}" in error.message


def test_who_is_not_let_in_hears_why_at_once(mutual: str, pki: Pki, pair: Pair) -> None:
    stranger = pki.self_signed("stranger")
    for given, says in (
        (None, "uses TLS, and this end does not: pass the CA, --tls-ca FILE"),
        (load_tls(pki.ca), "requests a certificate and this end has none"),
        (load_tls(pki.ca, stranger.cert, stranger.key), r"does not accept the certificate tls_cert=.*stranger\.pem"),
        (
            load_tls(pki.self_signed("other-ca").cert, pair.cert, pair.key),
            r"shows a certificate that is not signed by tls_ca=.*other-ca\.pem",
        ),
    ):
        for error in errors_of(mutual, given):
            assert isinstance(error, TlsError)
            with pytest.raises(TlsError, match=f"the coordinator at {mutual} .*{says}"):
                raise error


def test_tls_to_a_plain_coordinator(plain: str, pki: Pki, pair: Pair) -> None:
    for error in errors_of(plain, load_tls(pki.ca, pair.cert, pair.key)):
        assert isinstance(error, TlsError)
        assert f"{plain} does not use TLS, and this end does (tls_ca={pki.ca})" in error.message
