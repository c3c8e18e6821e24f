"""The recipe docs/recipe_nodes.md by its own commands, on two machines: network namespaces with names of their own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from documented import REPO, blocks
from hosts import Network, why_not
from waiting import until

from penstock.client import DataExecutor, DataLoader
from penstock.client.testing import FakeAppliance

PAGE = list(blocks(REPO / "docs/recipe_nodes.md"))
BLOCKS = [block for block in PAGE if block.language == "python"]
FIRST, SECOND = (block.text for block in PAGE if block.language == "sh")
(DATA,) = (block.text for block in blocks(REPO / "docs/start.md") if block.note.startswith("file data.py"))
STEPS, EVERY = 150, 10

MACHINE = 'hostname "$1"; mount --bind "$2" /etc/hosts; exec bash -c "$3"'
SCP = '#!/bin/sh\nshift\nfor last; do :; done\nwhile [ $# -gt 1 ]; do cp -p "$1" ../second/; shift; done\n'


class Machines:
    """`first` and `second`, with a home each."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.network = Network("first", "second")
        stack.callback(self.network.close)
        self.folder, self._stack = folder, stack
        self._hosts = folder / "hosts"
        self._hosts.write_text("".join(f"{a} {host}\n" for host, a in self.network.addresses.items()))
        for host in self.network.addresses:
            home = folder / host
            home.mkdir()
            (home / "data.py").write_text(DATA)
            (home / "train.py").write_text(BLOCKS[0].text.replace("/shared", str(folder / "shared")))
        (folder / "scp").write_text(SCP)
        (folder / "scp").chmod(0o700)

    def start(self, host: str, commands: str) -> subprocess.Popen[str]:
        for number, address in enumerate(self.network.addresses.values(), 1):
            commands = commands.replace(f"10.0.0.{number}", address)
        commands = commands.replace("--nproc-per-node 8", "--nproc-per-node 1").replace("--slots 16", "--slots 2")
        home = self.folder / host
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PENSTOCK_", "PYTHONPATH"))}
        kept |= {"HOME": str(home), "PATH": f"{self.folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"}
        command = [*self.network.inside(host), "unshare", "--uts", "--mount", "bash", "-c", MACHINE, "bash", host]
        with (self.folder / f"{host}.log").open("ab") as log:
            started = subprocess.Popen(
                [*command, str(self._hosts), commands],
                cwd=home,
                env={**kept, "OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=log,
                text=True,
            )
        self._stack.callback(started.wait)
        self._stack.callback(lambda: self.kill(host))
        return started

    def kill(self, host: str) -> None:
        """Kill every process of a machine."""
        found = subprocess.run(
            ["ip", "netns", "pids", self.network.inside(host)[-1]], capture_output=True, text=True, check=True
        )
        for pid in map(int, found.stdout.split()):
            os.kill(pid, signal.SIGKILL)

    def log(self, host: str) -> str:
        return (self.folder / f"{host}.log").read_text()


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    if reason := why_not():
        pytest.skip(reason)
    with ExitStack() as stack:
        yield Machines(tmp_path, stack)


def whole(monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[int | None]:
    """Return the digests of the ranks' batches, made in this process."""
    monkeypatch.syspath_prepend(str(folder))
    import data  # type: ignore[import-not-found]

    found = []
    for box in range(2):
        with FakeAppliance(num_workers_per_box=1, seed=1, box=box, num_boxes=2):
            executor = DataExecutor(DataLoader(data.input_fn, batch_size=32), num_steps=STEPS)
            for _ in executor:
                pass
            found.append(executor.digest)
    del sys.modules["data"]
    return found


IN_ONE_SHELL = "{}\necho $? > ended\nwhile [ ! -e again ]; do sleep 0.1; done\n{}"


@pytest.mark.timeout(400)
def test_a_machine_is_killed_and_comes_back(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    home, away = (machines.folder / host for host in machines.network.addresses)
    first = machines.start("first", IN_ONE_SHELL.format(FIRST, FIRST.splitlines()[-1]))
    until((away / "client.pem").exists, 60)
    machines.start("second", SECOND)
    until(lambda: any((machines.folder / "shared/checkpoints").glob("step-*")), 100)
    machines.kill("second")
    until((home / "ended").exists, 60)
    assert (home / "ended").read_text() == "1\n", machines.log("first")
    (home / "again").touch()
    second = machines.start("second", SECOND)
    assert [first.wait(200), second.wait(200)] == [0, 0], machines.log("first") + machines.log("second")
    said = re.findall(
        rf"rank (\d): steps (\d+) to {STEPS}, digest (\d+)", machines.log("first") + machines.log("second")
    )
    assert [(rank, int(start) in range(EVERY + 1, STEPS, EVERY)) for rank, start, _ in sorted(said)] == [
        ("0", True),
        ("1", True),
    ]
    assert [int(digest) for _, _, digest in sorted(said)] == whole(monkeypatch, home)
