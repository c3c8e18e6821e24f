"""Tokens and certificates that are replaced while processes run: taken up, rotated, and taken away."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import socket
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from coroutines import in_loop
from lane_doors import listeners, refusing
from pki import Pair, Pki
from tests.security.conftest import answering

from penstock.proto.errors import AuthenticationError, CoordinatorUnavailableError, TlsError
from penstock.proto.lane.tls_socket import connect_tls
from penstock.proto.rpc import channel
from penstock.proto.rpc.calls import AsyncCoordinatorClient, CoordinatorClient
from penstock.proto.rpc.credentials.tokens import Tokens, read_again, read_token, read_tokens
from penstock.proto.rpc.tls import Renewing, Tls, expires, host_of, load_tls

OLD, NEW = "o" * 64, "n" * 64


def put(file: Path, text: str) -> None:
    """Replace a file as a whole, as a mounted Secret is."""
    beside = file.with_suffix(".new")
    beside.write_text(text)
    beside.chmod(0o600)
    os.replace(beside, file)


async def until(true: Callable[[], Awaitable[bool]]) -> None:
    while not await true():
        await asyncio.sleep(0.01)


async def let_in(client: AsyncCoordinatorClient) -> bool:
    try:
        await client.status()
    except (AuthenticationError, CoordinatorUnavailableError):
        return False
    return True


async def refused(client: AsyncCoordinatorClient) -> bool:
    return not await let_in(client)


# -------------------------------------------------------------------------------------------------------------- tokens


@in_loop
async def test_tokens_are_rotated_and_taken_away(
    tmp_path: Path, socket_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "RENEW_S", 0.01)
    all_of_them, of_one = tmp_path / "all", tmp_path / "one"
    put(all_of_them, f"admin:{OLD}")
    put(of_one, f"admin:{OLD}")
    async with (
        answering(socket_address, read_tokens(all_of_them)),
        AsyncCoordinatorClient(socket_address, OLD, insecure=True) as old,
        AsyncCoordinatorClient(socket_address, NEW, insecure=True) as new,
        AsyncCoordinatorClient(socket_address, read_token("admin", file=of_one), insecure=True) as follows,
    ):
        with CoordinatorClient(socket_address, read_token("admin", file=of_one), insecure=True) as blocking:
            assert await let_in(old)
            assert await let_in(follows)
            assert await refused(new)
            await asyncio.to_thread(blocking.status)
            put(all_of_them, f"admin:{OLD}\nadmin:{NEW}")
            await until(lambda: let_in(new))
            assert await let_in(old)
            put(of_one, f"admin:{NEW}")
            put(all_of_them, f"admin:{NEW}")
            await until(lambda: refused(old))
            assert await let_in(follows)
            await asyncio.to_thread(blocking.status)


def test_file_that_became_invalid_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "tokens"
    put(file, f"admin:{OLD}")
    tokens, mine = Tokens(read_tokens(file)), read_token("admin", file=file)
    for bad, words in (
        ("", "is empty"),
        ("role:x", "with a role of"),
        (f"worker:{NEW}", "no token for the role admin"),
    ):
        put(file, bad)
        with caplog.at_level(logging.WARNING):
            assert read_again(mine) == mine == OLD
        assert words in caplog.text
    caplog.clear()
    assert tokens.renew()  # the file of a coordinator may hold other roles
    assert tokens.roles_of(NEW) == {"worker"}
    file.unlink()
    for _ in range(3):
        assert not tokens.renew()
    assert len(caplog.records) == 1
    put(file, f"admin:{OLD}")
    assert tokens.renew()
    assert tokens.roles_of(OLD) == {"admin"}
    assert not tokens.roles_of(NEW)
    assert OLD not in caplog.text
    assert read_again("of no file") == "of no file"


# -------------------------------------------------------------------------------------------------------- certificates


class Files:
    """A CA, a certificate and its key under names that stay, as processes are given them."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.ca, self.cert, self.key = (str(folder / name) for name in ("ca.pem", "cert.pem", "key.pem"))

    def hold(self, *cas: Pki, pair: Pair | None = None) -> None:
        if cas:
            put(Path(self.ca), "".join(Path(ca.ca).read_text() for ca in cas))
        if pair is not None:
            put(Path(self.key), Path(pair.key).read_text())
            put(Path(self.cert), Path(pair.cert).read_text())

    def load(self) -> Tls:
        tls = load_tls(self.ca, self.cert, self.key, "*.penstock")
        assert tls is not None
        return tls


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory, pki: Pki) -> Pki:
    """Another CA, which comes after the first."""
    return Pki(tmp_path_factory.mktemp("other"))


def test_mismatched_files_are_not_taken_up(
    tmp_path: Path, pki: Pki, pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    files, late = Files(tmp_path / "files"), pki.issue("late")
    files.hold(pki, pair=pair)
    held = Renewing(files.load())
    before = held.tls
    assert not held.renew()
    shutil.copyfile(late.cert, files.cert)
    for _ in range(3):
        assert not held.renew()
    assert held.tls is before
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "is not the key of" in caplog.text
    files.hold(pair=late)
    assert held.renew()
    assert held.tls.cert == Path(late.cert).read_bytes()
    assert not held.renew()
    of_role = Renewing(files.load(), "worker")
    files.hold(pair=pki.issue("later", "DNS:client.penstock"))
    assert not of_role.renew(), "it is no certificate of a worker"


@in_loop
async def test_coordinator_takes_up_its_new_tls_files(
    tmp_path: Path, socket_address: str, pki: Pki, pair: Pair, other: Pki
) -> None:
    """The CA is replaced: both are trusted first, then new certificates are made, then the old CA is taken away."""
    files, mine = Files(tmp_path / "files"), Files(tmp_path / "mine")
    files.hold(pki, pair=pair)
    mine.hold(pki, pair=pair)
    newer = other.issue("newer")
    async with answering(socket_address, OLD, files.load()) as served:
        assert served.files is not None
        assert served.files.expires_at == expires(mine.load()).timestamp()
        async with AsyncCoordinatorClient(socket_address, OLD, tls=mine.load()) as stays:
            assert await let_in(stays)
            files.hold(pki, other)
            mine.hold(pki, other)
            for each in (pair, newer):
                mine.hold(pair=each)
                async with AsyncCoordinatorClient(socket_address, OLD, tls=mine.load()) as client:
                    assert await let_in(client)
            files.hold(other, pair=newer)
            assert await let_in(stays), "its connection lasts"
        mine.hold(other)
        async with AsyncCoordinatorClient(socket_address, OLD, tls=mine.load()) as client:
            assert await let_in(client)
        mine.hold(pki, other, pair=pair)
        async with AsyncCoordinatorClient(socket_address, OLD, tls=mine.load()) as client:
            assert await refused(client), "the CA of its certificate is not trusted any more"


@in_loop
async def test_callers_reconnect_with_their_new_files(
    tmp_path: Path, socket_address: str, pki: Pki, pair: Pair, other: Pki
) -> None:
    files, mine = Files(tmp_path / "files"), Files(tmp_path / "mine")
    files.hold(pki, pair=pair)
    mine.hold(pki, pair=pair)
    newer = other.issue("of-the-other-ca")
    async with AsyncCoordinatorClient(socket_address, OLD, tls=mine.load()) as client:
        blocking = CoordinatorClient(socket_address, OLD, tls=mine.load())
        async with answering(socket_address, OLD, files.load()):
            assert await let_in(client)
            await asyncio.to_thread(blocking.status)
        files.hold(other, pair=newer)
        async with answering(socket_address, OLD, files.load()):
            for _ in range(3):
                assert await refused(client)
                with pytest.raises(CoordinatorUnavailableError):
                    await asyncio.to_thread(blocking.status)
            mine.hold(other, pair=newer)
            await until(lambda: let_in(client))
            while True:
                try:
                    await asyncio.to_thread(blocking.status)
                except CoordinatorUnavailableError:
                    continue
                break
        blocking.close()


def test_a_workers_lanes_show_what_its_files_hold(tmp_path: Path, pki: Pki, pair: Pair, other: Pki) -> None:
    files = Files(tmp_path / "files")
    files.hold(pki, pair=pair)
    mine = load_tls(pki.ca, pair.cert, pair.key)
    newer = other.issue("of-a-worker", days=9)
    trusting = load_tls(other.ca, newer.cert, newer.key)
    assert mine is not None
    assert trusting is not None
    with listeners(refusing(TlsError("not reached")), files.load()) as (opened, _):
        host, port = host_of(opened.tcp_address)

        before = opened.certificate_expires_at
        assert before == expires(mine).timestamp()

        def shake(tls: Tls) -> None:
            connect_tls(socket.create_connection((host, port), 20), tls, host).close()

        shake(mine)
        files.hold(other, pair=newer)
        shake(trusting)
        assert opened.certificate_expires_at == expires(trusting).timestamp() != before
        with pytest.raises(ssl.SSLCertVerificationError):
            shake(mine)
