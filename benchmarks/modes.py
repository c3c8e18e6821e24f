"""Modes (compared ways to deliver batches), and the handles of the main program on their players, the processes that
measure the modes.

A player is started once and keeps its process for the whole run, so that the modes can take turns within each round:
while one measures, the others wait for a line on standard input. If the Python environment of a peer (another library)
does not exist, the mode is reported as missing, by name. A player that fails is reported, once for each case, and used
again for the next case.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.cases import Case, Times
from benchmarks.processes import kill_tree

__all__ = ["ALONE", "DATALOADER", "MEMCPY", "MODES", "PENSTOCK", "RAW_TCP", "STATEFUL", "TCP", "TF", "Mode", "Stage"]

ROOT = Path(__file__).parent.parent
START_S, MEASURE_S, STOP_S = 120.0, 90.0, 15.0
"""Seconds within which a player must have started, must answer one request to measure, and must have ended."""

PENSTOCK, TCP = "Penstock, same host", "Penstock, TCP lane"
DATALOADER, STATEFUL = "torch DataLoader, 1 worker", "torchdata StatefulDataLoader, 1 worker"
TF = "tf.data service, 1 worker"
MEMCPY, RAW_TCP, ALONE = "memcpy", "raw TCP", "the source alone"


@dataclass(frozen=True)
class Mode:
    name: str
    command: tuple[str, ...]
    """Module that the player runs, and its command-line arguments."""
    peer: str = ""
    """Name of the Python environment in which the player runs, below the folder of the peers' environments; "": the
    environment of this process."""


MODES = {
    mode.name: mode
    for mode in (
        Mode(PENSTOCK, ("benchmarks.penstock_path", "auto")),
        Mode(TCP, ("benchmarks.penstock_path", "tcp")),
        Mode(DATALOADER, ("benchmarks.peers.torch_loader", "DataLoader", "1")),
        Mode("torch DataLoader, 2 workers", ("benchmarks.peers.torch_loader", "DataLoader", "2")),
        Mode(STATEFUL, ("benchmarks.peers.torch_loader", "StatefulDataLoader", "1"), "torchdata"),
        Mode(TF, ("benchmarks.peers.tf_service",), "tf"),
        Mode("Ray Data", ("benchmarks.peers.ray_data",), "ray"),
        Mode("mosaicml StreamingDataLoader, 1 worker", ("benchmarks.peers.mosaic",), "streaming"),
        Mode(MEMCPY, ("benchmarks.floors", "memcpy")),
        Mode(RAW_TCP, ("benchmarks.floors", "tcp")),
        Mode(ALONE, ("benchmarks.peers.torch_loader", "DataLoader", "0")),
    )
}


class PlayerError(Exception):
    """Error that is raised if a player (process that measures one mode) could not answer a request."""


class PlayerGoneError(PlayerError):
    """Error that is raised if a player (process that measures one mode) has ended, or was killed because it did not
    answer."""


class Player:
    """Handle on a player, a process that measures one mode and answers requests line by line."""

    def __init__(self, mode: Mode, python: Path, log: Path) -> None:
        self.mode = mode
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [str(python), "-m", *mode.command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=ROOT,
                env=environment,
            )
        self._log = log
        self._rest = b""

    def send(self, request: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise PlayerGoneError(f"the player of {self.mode.name} has ended: see {self._log.name}") from error

    def receive(self, seconds: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        out, deadline = self._process.stdout.fileno(), time.monotonic() + seconds
        while b"\n" not in self._rest:
            if not select.select([out], [], [], max(0.0, deadline - time.monotonic()))[0]:
                self.kill()
                raise PlayerGoneError(
                    f"the player of {self.mode.name} did not answer within {seconds:.0f} s: see {self._log.name}"
                )
            piece = os.read(out, 1 << 16)
            if not piece:
                raise PlayerGoneError(f"the player of {self.mode.name} has ended: see {self._log.name}")
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PlayerError(answer["error"].strip().splitlines()[-1])
        return answer

    def kill(self) -> None:
        kill_tree(self._process.pid, itself=True)
        self._process.wait()
        self._shut()

    def close(self) -> None:
        """Let the player end by itself, so that it stops its child processes. Then kill those that still run."""
        self._shut(stdin_only=True)
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._shut()

    def _shut(self, *, stdin_only: bool = False) -> None:
        for pipe in (self._process.stdin, None if stdin_only else self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:
                    pass  # a request was still in the buffer, and the player has ended


class Stage:
    """Set of all players (processes that measure one mode each) of a run.

    peers: folder with the Python environments of other libraries. logs: folder for the output of players.
    """

    def __init__(self, peers: Path, logs: Path) -> None:
        self.missing: dict[str, str] = {}
        """Reasons why modes are not measured, by the name of the mode."""
        self.failures: list[str] = []
        self.versions: dict[str, dict[str, str]] = {}
        """Versions of packages, by the name of the Python environment and the package. Penstock's own environment is
        "penstock"."""
        self._peers = peers
        self._logs = logs
        self._players: dict[str, Player] = {}

    def start(self, names: list[str]) -> None:
        """Start the players of these modes, all at once. Players that run already are left alone."""
        fresh = []
        for name in names:
            mode = MODES[name]
            python = self._peers / mode.peer / "bin" / "python" if mode.peer else Path(sys.executable)
            if not python.exists():
                self.missing[name] = "run make bench-peers"
            elif name not in self._players and name not in self.missing:
                fresh.append(name)
                log = self._logs / f"{'-'.join(mode.command).replace('benchmarks.', '')}.log"
                self._players[name] = Player(mode, python, log)
        for name in fresh:
            try:
                self._players[name].send({"do": "hello"})
                versions = self._players[name].receive(START_S)["versions"]
            except PlayerError as error:
                self._lose(name, f"it did not start: {error}")
            else:
                self.versions.setdefault(MODES[name].peer or "penstock", {}).update(versions)

    def _lose(self, name: str, why: str) -> None:
        self.missing[name] = why
        self.failures.append(f"{name}: {why}")
        self._players.pop(name).kill()

    def measure(self, name: str, case: Case, times: Times) -> dict[str, Any] | None:
        """Let the player of the mode `name` measure a case, and return its answer. Return None if that failed; the
        reason is then in `missing` or `failures`."""
        player = self._players.get(name)
        if player is None:
            return None
        try:
            player.send({"do": "measure", "case": case.to_json(), "times": asdict(times)})
            return player.receive(MEASURE_S)
        except PlayerGoneError as error:
            self._lose(name, str(error))
        except PlayerError as error:
            self.failures.append(f"{name}, {case.name}: {error}")
        return None

    def close(self) -> None:
        for player in self._players.values():
            player.close()
        self._players.clear()
