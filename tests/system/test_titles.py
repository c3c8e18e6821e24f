"""Names and titles of processes, as `ps` and `top` show them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import streams
from census import descendants
from neighbours import beside

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.runtime.process.end import reap
from penstock.runtime.process.spawn import fork
from penstock.runtime.process.titles import name_process, title_process


def comm(pid: int) -> str:
    """Short name; "" if the process has ended, as helper processes do."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def shown(pid: int) -> str:
    """Title as `ps` shows it."""
    return subprocess.run(["ps", "-o", "args=", "-ww", "-p", str(pid)], capture_output=True, text=True).stdout.strip()


def test_processes_of_a_run_are_named(appliance: Appliance) -> None:
    daemons = appliance._daemons
    assert daemons is not None
    with beside(appliance, job="lm", num_workers_per_box=2) as job:
        steps = iter(DataExecutor(DataLoader(streams.counter, 1000), num_steps=1000, appliance=job))
        for _ in range(4):
            next(steps)
        below = descendants(daemons.process.pid)
        runners = [pid for pid in below if comm(pid) == "penstock-runner" and " lm/" in shown(pid)]
        assert sorted(map(shown, runners)) == ["penstock-runner lm/0 box 0 slot 0", "penstock-runner lm/0 box 0 slot 1"]
        assert comm(daemons.process.pid) == "penstock-embed"
        # Started processes keep their command lines, where secrets are looked for; a title shows none.
        (forks,) = [pid for pid in below if comm(pid) == "penstock-forks"]
        assert "penstock.worker.runner.fork_server" in shown(forks)
        for pid in (forks, *runners):
            told = Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
            assert daemons.token.encode() not in told


@pytest.mark.parametrize("title", ["short", "\N{SNOWMAN}" * 50_000])
def test_title_leaves_the_environment(title: str) -> None:
    """A title of any length changes neither the length of the command line nor what comes after it."""
    was = Path("/proc/self/cmdline").read_bytes()
    environ = Path("/proc/self/environ").read_bytes()

    def child() -> int:
        title_process(title)
        name_process(title)
        now = Path("/proc/self/cmdline").read_bytes()
        text = now.rstrip(b"\0").decode()
        same = len(now) == len(was) and now.endswith(b"\0") and Path("/proc/self/environ").read_bytes() == environ
        return 0 if same and title.startswith(text) and bool(text) == bool(title) else 1

    assert reap(fork(child)) == 0
    assert Path("/proc/self/cmdline").read_bytes() == was
