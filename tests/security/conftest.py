"""Fixtures of this folder: one set of certificates, and coordinators and workers that use them."""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from pki import Pair, Pki

INPUTS = str(Path(__file__).parents[1] / "inputs")
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

    process: subprocess.Popen[str]
    line: str
    log: Path


@dataclass
class Starter:
    """Starts `python -m MODULE` and stops what it started."""

    folder: Path
    started: list[Started]

    def __call__(self, module: str, *arguments: str, token: str = TOKENS) -> Started:
        reading, writing = os.pipe()
        log = self.folder / f"{module}-{len(self.started)}.log"
        path = os.pathsep.join(filter(None, [INPUTS, os.environ.get("PYTHONPATH")]))
        with log.open("w") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments, "--ready-fd", str(writing)],
                pass_fds=[writing],
                env={**os.environ, "PENSTOCK_TOKEN": token, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stderr=out,
                text=True,
            )
        os.close(writing)
        with os.fdopen(reading) as pipe:
            assert select.select([pipe], [], [], DEADLINE_S)[0], f"{module} did not get ready"
            started = Started(process, pipe.readline().strip(), log)
        self.started.append(started)
        return started

    def coordinator(self, *arguments: str) -> Started:
        return self("penstock.appliance", *arguments)

    def worker(self, address: str, *arguments: str, slots: int = 2, allow: str = "streams") -> Started:
        return self("penstock.worker", "--coordinator", address, "--slots", str(slots), "--allow", allow, *arguments)

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


def tls_flags(ca: str = "", pair: Pair | None = None, name: str = "") -> list[str]:
    given = {"ca": ca, "cert": pair.cert if pair else "", "key": pair.key if pair else "", "name": name}
    return [f"--tls-{what}={value}" for what, value in given.items() if value]
