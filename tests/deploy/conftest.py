"""The command as a user runs it: real processes, free ports, a deadline on every wait."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import interpreters
import pytest
from cluster import INPUTS, TOKEN
from interpreters import Forked
from waiting import until

PENSTOCK = str(Path(sys.executable).with_name("penstock"))
DEADLINE_S = 60.0
WARNINGS = "error,ignore:'set_vital' is deprecated:UserWarning"
"""Warnings are errors in what we start, too, but for the one of pyproject.toml."""

IMPORTED = (
    *("penstock.appliance.server.server", "penstock.worker.daemon.daemon", "penstock.deploy.cli.main"),
    *(f"penstock.deploy.operations.{name}" for name in ("run_daemon", "show_state", "show_status")),
    *(f"penstock.deploy.doctor.{name}" for name in ("loader_check", "loader_report")),
)
"""Modules that commands need, and that are imported once for all of them."""
PYTHON = (sys.executable, *(f"-W{one}" for one in WARNINGS.split(",")))
"""The interpreter that commands are forked from."""
READ_AT_START = ("PYTHONPATH", "PYTHONWARNINGS", "PYTHONIOENCODING")
"""Variables by which a command needs an interpreter of its own."""


class Finished(subprocess.CompletedProcess[str]):
    """A command that has ended."""

    @property
    def error(self) -> str:
        """Its one line on standard error."""
        lines = self.stderr.splitlines()
        assert lines, "nothing on standard error"
        return lines[-1]


@dataclass
class Started:
    """A daemon that runs, and the line that it printed when it was ready."""

    process: Any
    """A subprocess.Popen, or what is forked and has its interface."""
    log: Path
    line: str = ""

    def url(self, what: str) -> str:
        """The address that it tells in its JSON log, which a thread writes."""
        until(lambda: any(what in line for line in self.log.read_text().split("\n")[:-1]), DEADLINE_S)
        told: list[str] = [json.loads(line)["message"] for line in self.log.read_text().splitlines() if what in line]
        return told[0].rpartition(" at ")[2].removesuffix("/metrics")

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send the signal to it and everything in its group, as a terminal would; its exit code."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)
        return int(self.process.wait(DEADLINE_S))


@dataclass
class Shell:
    """Runs `penstock` in an environment of its own."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    started: list[Started] = field(default_factory=list)

    def __post_init__(self) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
        path = os.pathsep.join([INPUTS, *filter(None, [os.environ.get("PYTHONPATH")])])
        self.environment = {**kept, "PYTHONPATH": path, "PENSTOCK_TOKEN": TOKEN, "PYTHONWARNINGS": WARNINGS}
        self.environment["PENSTOCK_COORDINATOR_HTTP"] = "off"  # one port for the coordinators of all tests
        self.environment["PENSTOCK_CONFIG"] = os.devnull  # not what a developer has at home
        self.environment["PENSTOCK_INSECURE"] = "true"  # most of them listen on loopback

    def run(self, *arguments: str, deadline_s: float = DEADLINE_S, **environment: str | None) -> Finished:
        """Run the installed program to its end. A variable that is None is removed. For what is a question of how the
        command starts: that costs half a second of a core."""
        done = subprocess.run(
            [PENSTOCK, *arguments],
            env=self.env(environment),
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=deadline_s,
        )
        return Finished(done.args, done.returncode, done.stdout, done.stderr)

    def call(self, *arguments: str, **environment: str | None) -> Finished:
        """The same as `run`, in a process that is forked, with all that it needs imported: a fortieth of a second."""
        out, err = self.folder / "called.out", self.folder / "called.err"
        with out.open("wb") as said, err.open("wb") as failed:
            process = self.fork(arguments, self.env(environment), said.fileno(), failed.fileno())
        try:
            code = process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise AssertionError(f"penstock {' '.join(arguments)} did not end:\n{err.read_text()}") from None
        return Finished([PENSTOCK, *arguments], code, out.read_text(), err.read_text())

    def fork(self, arguments: Sequence[str], environment: Mapping[str, str], stdout: int, stderr: int) -> Forked:
        torch = arguments[:1] in (("replay",), ("state",))  # who decodes states imports it, which takes two seconds
        return interpreters.start(
            "penstock.deploy.__main__",
            arguments,
            environment,
            imports=(*IMPORTED, *(["penstock.proto.state.codec"] if torch else [])),
            torch=torch,
            python=PYTHON,
            stdout=stdout,
            stderr=stderr,
            cwd=str(self.folder),
        )

    def start(self, *arguments: str, **environment: str | None) -> Started:
        """A daemon, once it has printed its line."""
        started = self.begin(*arguments, **environment)
        assert started.process.stdout is not None
        ready, _, _ = select.select([started.process.stdout], [], [], DEADLINE_S)
        started.line = started.process.stdout.readline().decode().strip() if ready else ""
        if not started.line:
            started.stop(signal.SIGKILL)
            raise AssertionError(f"penstock {' '.join(arguments)} did not get ready:\n{started.log.read_text()}")
        return started

    def begin(self, *arguments: str, **environment: str | None) -> Started:
        """A daemon, whether it gets ready or not."""
        log, given = self.folder / f"log{len(self.started)}", self.env(environment)
        process: Any
        with log.open("wb") as out:
            if any(given.get(name) != self.environment.get(name) for name in READ_AT_START):
                process = subprocess.Popen(
                    [PENSTOCK, *arguments],
                    env=given,
                    cwd=self.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=out,
                    process_group=0,
                )
            else:
                process = self.fork(arguments, given, subprocess.PIPE, out.fileno())
        started = Started(process, log)
        self.started.append(started)
        return started

    def env(self, changes: dict[str, str | None]) -> dict[str, str]:
        both = {**self.environment, **changes}
        return {name: value for name, value in both.items() if value is not None}

    def close(self) -> None:
        for started in reversed(self.started):
            started.stop()
            assert started.process.stdout is not None
            started.process.stdout.close()


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """Return one for this test; its processes are stopped after it."""
    shell = Shell(tmp_path)
    yield shell
    shell.close()


@pytest.fixture(scope="module")
def module_shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """A shell that all tests of a module share; what it started is stopped after them."""
    shell = Shell(tmp_path_factory.mktemp("shell"))
    yield shell
    shell.close()


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """A shell with a coordinator that all tests of a module share, in PENSTOCK_COORDINATOR."""
    shell = Shell(tmp_path_factory.mktemp("coordinator"))
    started = shell.start("coordinator", "--listen", "127.0.0.1:0", "--state-dir", "state")
    shell.environment["PENSTOCK_COORDINATOR"] = started.line
    yield shell
    shell.close()
