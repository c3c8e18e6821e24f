"""Fixtures of this folder: one set of certificates, and coordinators and workers that use them."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cluster import INPUTS, Daemon, start_daemon
from pki import Pair, Pki

from penstock.proto.rpc.channel import RunningServer, server_aio
from penstock.proto.rpc.tls import Tls
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1.coordinator_pb2_grpc import CoordinatorServicer, add_CoordinatorServicer_to_server

DEADLINE_S = 60.0
SECRETS = {"client": "client-secret-c1c1", "worker": "worker-secret-w2w2", "admin": "admin-secret-a3a3"}
TOKENS = "\n".join(f"{role}:{token}" for role, token in SECRETS.items())


@pytest.fixture(scope="session")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    if shutil.which("openssl") is None:
        pytest.skip("the command openssl is not here to make certificates with")
    return Pki(tmp_path_factory.mktemp("pki"))


@pytest.fixture(scope="session")
def pair(pki: Pki) -> Pair:
    """Certificate and key of servers and honest callers."""
    return pki.issue("good")


@dataclass
class Started:
    """A process that has said its line."""

    process: Daemon
    line: str
    log: Path


@dataclass
class Starter:
    """Starts daemons, and stops what it started."""

    folder: Path
    started: list[Started]

    def __call__(self, module: str, *arguments: str, token: str = TOKENS, own: bool = False) -> Started:
        """`own`: not forked, so that its command line and environment are its own."""
        log = self.folder / f"{module}-{len(self.started)}.log"
        path = os.pathsep.join(filter(None, [INPUTS, os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PENSTOCK_TOKEN": token, "PYTHONPATH": path}
        with log.open("w") as out:
            process, line = start_daemon(module, arguments, environment, own=own, stderr=out.fileno())
        self.started.append(Started(process, line, log))
        return self.started[-1]

    def coordinator(self, *arguments: str) -> Started:
        return self("penstock.appliance", *arguments)

    def worker(self, address: str, *arguments: str, own: bool = False) -> Started:
        usual = ("--coordinator", address, "--slots", "2", "--allow", "streams")
        return self("penstock.worker", *usual, *arguments, own=own)

    def stop(self) -> None:
        for started in reversed(self.started):
            started.process.terminate()
        for started in self.started:
            try:
                started.process.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                started.process.kill()
                started.process.wait(DEADLINE_S)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starter]:
    starter = Starter(tmp_path, [])
    yield starter
    starter.stop()


@pytest.fixture(scope="module")
def start_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    starter = Starter(tmp_path_factory.mktemp("processes"), [])
    yield starter
    starter.stop()


class AnyStatus(CoordinatorServicer):
    """A coordinator of two calls."""

    async def Status(self, request: Any, context: Any) -> pb.StatusReply:
        return pb.StatusReply()

    async def PutBlob(self, parts: Any, context: Any) -> pb.PutBlobReply:
        return pb.PutBlobReply(blob=str(len([part async for part in parts])))


@asynccontextmanager
async def answering(
    address: str, tokens: str, tls: Tls | None = None, servicer: CoordinatorServicer | None = None
) -> AsyncIterator[RunningServer]:
    """Serve it, or another one, in this loop."""
    added = servicer or AnyStatus()  # type: ignore[abstract]
    served = await server_aio(address, tokens, lambda server: add_CoordinatorServicer_to_server(added, server), tls=tls)
    try:
        yield served
    finally:
        await served.stop(0)


@pytest.fixture
def socket_address() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        yield f"unix:{folder}/s"


def tls_flags(ca: str = "", pair: Pair | None = None, name: str = "") -> list[str]:
    given = {"ca": ca, "cert": pair.cert if pair else "", "key": pair.key if pair else "", "name": name}
    return [f"--tls-{what}={value}" for what, value in given.items() if value]
