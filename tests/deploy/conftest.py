"""The command as a user runs it: real processes, free ports, a deadline on every wait."""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

PENSTOCK = str(Path(sys.executable).with_name("penstock"))
INPUTS = str(Path(__file__).parents[1] / "inputs")
TOKEN = "a-token-for-tests-only-0123456789"
DEADLINE_S = 60.0
WARNINGS = "error,ignore:'set_vital' is deprecated:UserWarning"
"""Warnings are errors in what we start, too, but for the one of pyproject.toml."""


FORKING = """
import gc, json, os, sys
import penstock.appliance.edge.server, penstock.deploy.operations.run_daemon
import penstock.deploy.doctor.loader_check, penstock.deploy.doctor.loader_report
import penstock.deploy.operations.show_state, penstock.deploy.operations.show_status, penstock.worker.daemon.daemon
from penstock.deploy.cli.main import main
gc.freeze()  # no command walks what is imported, or copies its pages
for line in sys.stdin:
    arguments, cwd, environment, out, err = json.loads(line)
    pid = os.fork()
    if not pid:
        os.setpgid(0, 0)
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(environment)
        for fd, path in enumerate((os.devnull, out, err)):
            opened = os.open(path, os.O_WRONLY if fd else os.O_RDONLY)
            os.dup2(opened, fd)
            os.close(opened)
        sys.argv[:] = ["penstock", *arguments]
        sys.exit(main())
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
"""An interpreter that has imported what `penstock` needs, and forks a process for each command."""


@functools.cache
def forking() -> subprocess.Popen[str]:
    """The one of this test process, which ends with it."""
    environment = {**os.environ, "PYTHONWARNINGS": WARNINGS}
    server = subprocess.Popen(
        [sys.executable, "-c", FORKING], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(_end, server)
    return server


def _end(server: subprocess.Popen[str]) -> None:
    with server:  # closes its pipes, and waits
        server.kill()


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

    process: subprocess.Popen[bytes]
    log: Path
    line: str = ""

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send the signal to it and everything in its session, as a terminal would; its exit code."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)
        return self.process.wait(DEADLINE_S)


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

    def run(self, *arguments: str, deadline_s: float = DEADLINE_S, **environment: str | None) -> Finished:
        """Run to its end. A variable that is None is removed."""
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
        """The same as `run`, in a process that is forked, with all that it needs imported: a fortieth of a second of a
        core, not half a one. For what is no question of how the command starts."""
        out, err = self.folder / "called.out", self.folder / "called.err"
        for path in (out, err):
            path.write_text("")
        server = forking()
        assert server.stdin is not None
        assert server.stdout is not None
        request = [arguments, str(self.folder), self.env(environment), str(out), str(err)]
        print(json.dumps(request), file=server.stdin, flush=True)
        ready, _, _ = select.select([server.stdout], [], [], DEADLINE_S)
        if not ready:
            server.kill()
            forking.cache_clear()
            raise AssertionError(f"penstock {' '.join(arguments)} did not end:\n{err.read_text()}")
        code = int(server.stdout.readline())
        return Finished([PENSTOCK, *arguments], code, out.read_text(), err.read_text())

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
        log = self.folder / f"log{len(self.started)}"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [PENSTOCK, *arguments],
                env=self.env(environment),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=out,
                start_new_session=True,
            )
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
