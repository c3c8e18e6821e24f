"""`penstock up` and `penstock down` on this machine: real daemons under a real supervisor, killed in turn."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from documented import REPO
from tests.deploy.conftest import PENSTOCK
from waiting import until

from penstock.deploy.console.exit_codes import CommandError
from penstock.deploy.engines import keeper, local
from penstock.deploy.engines.engine import Fleet as FleetRecord
from penstock.deploy.engines.engine import Scaling
from penstock.deploy.engines.fleet_folder import FleetFolder
from penstock.deploy.engines.keeper import FleetKeeper
from penstock.runtime.process.identity import Identity

UP = ("up", "--detach", "--slots", "1", "--allow", "streams", "--dir", "fleet")


class Fleet:
    """A running fleet, as its record shows it."""

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        self.folder = FleetFolder(shell.folder / "fleet")
        self.seen: list[Identity] = []

    def record(self) -> FleetRecord:
        fleet = self.folder.fleet()
        assert fleet is not None
        return fleet

    def processes(self) -> dict[str, Identity | None]:
        """Return processes by name; None: between two lives, or for good."""
        record = self.record()
        living = {daemon.name: daemon.identity for daemon in record.daemons} | {"sup": record.supervisor}
        self.seen += [identity for identity in living.values() if identity is not None]
        return living

    def workers(self) -> dict[str, str]:
        """Return the live workers, with the addresses of their lanes."""
        done = self.shell.call("status", "--json", PENSTOCK_COORDINATOR=self.record().coordinator)
        if done.returncode == 11:  # the coordinator is between two lives
            return {}
        assert done.returncode == 0, done.stderr
        workers = json.loads(done.stdout)["workers"]
        return {one["worker"]: one["tcp_address"] for one in workers if one["live"] and not one["draining"]}

    def gone(self) -> bool:
        """All processes that were ever seen."""
        return all(_ended(identity) for identity in self.seen)


def _ended(identity: Identity) -> bool:
    process = identity.open()
    return process is None or process.ended  # or nobody has collected it yet


@pytest.fixture(scope="module")
def module_fleet(module_shell: Any) -> Iterator[Fleet]:
    fleet = Fleet(module_shell)
    yield fleet
    module_shell.call("down", "--dir", "fleet")
    assert fleet.gone()


@pytest.fixture
def fleet(module_fleet: Fleet) -> Fleet:
    """The fleet of this module, started again if a test has ended it."""
    fleet = module_fleet
    if not fleet.folder.supervised:
        done = fleet.shell.call(*UP)
        assert done.returncode == 0, done.stderr
        address, token = fleet.record().coordinator, fleet.folder.token
        assert done.stdout == f"export PENSTOCK_COORDINATOR={address}\nexport PENSTOCK_TOKEN_FILE={token}\n"
    fleet.processes()
    return fleet


def test_fleet_answers_and_its_folder_is_private(fleet: Fleet) -> None:
    assert set(fleet.workers()) == {"penstock-1", "penstock-2"}
    assert stat.S_IMODE(fleet.folder.token.stat().st_mode) == 0o600
    assert stat.S_IMODE(fleet.folder.path.stat().st_mode) == 0o700
    for path in [*fleet.folder.path.iterdir(), *fleet.folder.logs.iterdir()]:
        assert path.is_dir() or path.is_socket() or stat.S_IMODE(path.stat().st_mode) == 0o600, path
    token = fleet.folder.token.read_text().strip()
    for identity in fleet.processes().values():
        assert identity is not None
        assert token not in Path(f"/proc/{identity.pid}/cmdline").read_text()
    for log in fleet.folder.logs.iterdir():
        assert token not in log.read_text()


JOB = """
import streams

from penstock.client import Appliance, DataExecutor, DataLoader

if __name__ == "__main__":
    with Appliance(job="contained", num_workers_per_box=1, seed=5, box=0, num_boxes=1) as appliance:
        print(len(list(DataExecutor(DataLoader(streams.counter, 6), appliance=appliance))))
"""


CONTAINER = """
set -e
root=$1 fleet=$2; shift 2
mount -t tmpfs -o mode=755 none "$root"
while [ "$1" != -- ]; do mkdir -p "$root$1"; mount --rbind "$1" "$root$1"; shift; done; shift
mkdir "$root/proc" "$root/fleet"
mount -t proc none "$root/proc"
mount --bind "$fleet" "$root/fleet"
exec chroot "$root" "$@"
"""
"""Script that runs a command below a root of its own, with the fleet's folder at /fleet and some folders of ours."""


def test_a_container_takes_part_through_the_folder(fleet: Fleet, tmp_path: Path) -> None:
    """It has its own root, processes and network, without a way out: calls and batches pass the sockets in the fleet's
    folder. Another user than the folder's owner is refused by name."""
    for folder in ("root", "code"):
        (tmp_path / folder).mkdir()
    (tmp_path / "code" / "job.py").write_text(JOB)
    ours = {Path("/usr"), Path("/etc"), Path("/dev"), Path(sys.base_prefix), Path(sys.prefix), REPO, tmp_path / "code"}
    ours |= {path for path in map(Path, ("/bin", "/lib", "/lib64")) if path.exists()}
    own = ["unshare", "--mount", "--propagation=private", "--pid", "--fork", "--net", "sh", "-c", CONTAINER, "sh"]
    own += [str(tmp_path / "root"), str(fleet.folder.path), *map(str, sorted(ours)), "--"]
    where = {"PENSTOCK_COORDINATOR": "unix:/fleet/socket", "PENSTOCK_TOKEN": None, "PENSTOCK_INSECURE": None}
    environment = fleet.shell.env(where)

    def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        everything = {**environment, **variables}
        return subprocess.run([*own, *command], env=everything, capture_output=True, text=True, timeout=120)

    if (tried := run("true")).returncode:
        pytest.skip(f"a container needs unshare(1): {tried.stderr}")
    job = run(sys.executable, str(tmp_path / "code" / "job.py"), PENSTOCK_TOKEN_FILE="/fleet/token")
    assert (job.returncode, job.stdout) == (0, "6\n"), job.stderr
    other = ("setpriv", "--reuid=61234", "--regid=61234", "--clear-groups")
    refused = run(*other, PENSTOCK, "status", PENSTOCK_TOKEN="stolen")
    assert refused.returncode == 16
    assert "/fleet/socket cannot be reached: Permission denied. Run as the owner of its folder" in refused.stderr


def test_second_fleet_in_a_folder_is_refused(fleet: Fleet) -> None:
    foreground = [part for part in UP if part != "--detach"]
    for arguments, environment, says in (
        (UP, {}, "already runs in"),
        (foreground, {}, "already runs in"),
        (UP, {"PENSTOCK_TOKEN": "of-another-fleet"}, "with another token"),
    ):
        record, token = fleet.record(), fleet.folder.token.read_text()
        done = fleet.shell.call(*arguments, **environment)
        assert (done.returncode, done.stdout) == (2, "")
        assert says in done.error
        assert "penstock down" in done.error
        assert (fleet.record(), fleet.folder.token.read_text()) == (record, token)


def test_killed_daemons_come_back_by_name(fleet: Fleet) -> None:
    before, lanes = fleet.processes(), fleet.workers()
    address = fleet.record().coordinator
    for name in ("coordinator", "penstock-2"):
        victim = before[name]
        assert victim is not None
        assert victim.send(signal.SIGKILL)
    until(lambda: set(now := fleet.workers()) == set(lanes) and now["penstock-2"] != lanes["penstock-2"])
    assert fleet.record().coordinator == address
    restarts = {daemon.name: daemon.restarts for daemon in fleet.record().daemons}
    assert restarts == {"coordinator": 1, "penstock-1": 0, "penstock-2": 1}
    assert "penstock-2 was killed by SIGKILL; starting it again" in (fleet.folder.logs / "supervisor.log").read_text()


def test_nothing_outlives_a_killed_supervisor(fleet: Fleet) -> None:
    supervisor = fleet.processes()["sup"]
    assert supervisor is not None
    assert supervisor.send(signal.SIGKILL)
    until(fleet.gone)
    assert fleet.shell.call(*UP).returncode == 0  # over the record of the one that was killed
    assert set(fleet.workers()) == {"penstock-1", "penstock-2"}


def test_scaling_ends_drained_workers_first(fleet: Fleet) -> None:
    """A fleet of N is N workers that can work: those that drain, have left or have failed do not count."""

    def scaled(workers: int) -> set[str]:
        done = fleet.shell.call(*UP, "--workers", str(workers))
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"export PENSTOCK_COORDINATOR={fleet.record().coordinator}\n")
        running = {daemon.name for daemon in fleet.record().daemons if daemon.name != "coordinator"}
        assert set(fleet.workers()) == running
        fleet.processes()
        return running

    before = fleet.processes()
    assert scaled(3) == {"penstock-1", "penstock-2", "penstock-3"}
    address = fleet.record().coordinator
    assert fleet.shell.call("worker", "drain", "penstock-1", PENSTOCK_COORDINATOR=address).returncode == 0
    assert scaled(2) == {"penstock-2", "penstock-3"}  # not the one with the highest number
    assert before["penstock-1"] is not None
    assert _ended(before["penstock-1"])
    stopped = fleet.processes()["penstock-3"]
    assert stopped is not None
    assert stopped.send(signal.SIGTERM)
    until(lambda: {daemon.name: daemon.state for daemon in fleet.record().daemons}["penstock-3"] == "left")
    assert scaled(2) == {"penstock-1", "penstock-2"}  # one that left is replaced
    assert scaled(1) == {"penstock-1"}
    assert fleet.processes()["coordinator"] == before["coordinator"]
    for more, says in ((("--slots", "2"), "--slots is 1"), (("--allow", "x"), "--allow is 'streams'")):
        done = fleet.shell.call(*UP, "--workers", "2", *more)
        assert (done.returncode, done.stdout) == (2, "")
        assert f"only --workers of a running fleet can be changed, but {says}" in done.error
    assert scaled(2) == {"penstock-1", "penstock-2"}


def test_of_two_sizes_asked_at_once_the_later_one_holds(fleet: Fleet) -> None:
    """The other command says so, instead of waiting for workers that nobody starts."""
    with ThreadPoolExecutor() as pool:
        first = pool.submit(local.scale, fleet.folder, Scaling(workers=3, request="first"), 60)
        until(lambda: fleet.record().scaled == "first" or first.done())
        assert local.scale(fleet.folder, Scaling(workers=2, request="second"), 60).scaled == "second"
        with pytest.raises(CommandError, match=r"another command has asked for 2 workers"):
            first.result()
    assert set(fleet.workers()) == {"penstock-1", "penstock-2"}


def test_fleet_lives_on_while_no_daemon_can_be_started(fleet: Fleet) -> None:
    processes, log = fleet.processes(), fleet.folder.logs / "supervisor.log"
    supervisor, victim = processes["sup"], processes["penstock-2"]
    assert supervisor is not None
    assert victim is not None
    before = resource.prlimit(
        supervisor.pid, resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    )
    assert victim.send(signal.SIGKILL)
    says = "penstock-2 cannot be started (Too many open files); starting it again"
    until(lambda: says in log.read_text() or _ended(supervisor))
    assert not _ended(supervisor)
    resource.prlimit(supervisor.pid, resource.RLIMIT_NOFILE, before)
    until(lambda: set(fleet.workers()) == {"penstock-1", "penstock-2"})
    assert fleet.processes()["coordinator"] == processes["coordinator"]


def test_down_leaves_no_process_and_is_idempotent(fleet: Fleet) -> None:
    done = fleet.shell.call("down", "--dir", "fleet", "--json")
    assert done.returncode == 0, done.stderr
    ended = [line.split()[0] for line in json.loads(done.stdout)["ended"]]
    assert ended == ["supervisor", "coordinator", "penstock-1", "penstock-2"]
    assert fleet.gone()
    log = (fleet.folder.logs / "coordinator.log").read_text()
    assert log.splitlines()[-1].endswith("stopped on request")
    again = fleet.shell.call("down", "--dir", "fleet")
    assert (again.returncode, again.stdout) == (0, f"no fleet is running in {fleet.folder.path}\n")
    never = fleet.shell.call("down", "--dir", "elsewhere")
    assert never.returncode == 2
    assert "no fleet was started" in never.error


def test_the_foreground_ends_with_ctrl_c(shell: Any) -> None:
    started = shell.start(*(part for part in UP if part != "--detach"), "--workers", "1", "--json")
    fleet = Fleet(shell)
    fleet.processes()
    assert started.stop(signal.SIGINT) == 0
    assert fleet.gone()
    printed = json.loads(started.line + started.process.stdout.read().decode())
    assert printed["environment"]["PENSTOCK_TOKEN_FILE"] == str(fleet.folder.token)


def test_failed_start_says_why_and_leaves_nothing(shell: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = shell.call(*UP, "--listen", f"127.0.0.1:{taken.getsockname()[1]}")
    assert done.returncode == 13
    assert "the coordinator exited with status 13" in done.error
    assert "is in use by another process" in done.error
    assert FleetFolder(shell.folder / "fleet").fleet() is None


def test_crash_looping_daemon_is_given_up_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_TOKEN", "a-token-for-tests-only-0123456789")
    monkeypatch.setattr(keeper, "PAUSE_S", 0.01)
    monkeypatch.setattr(keeper, "MAX_FAILED_STARTS", 3)
    command = ["coordinator", "--listen", "127.0.0.1:0", "--state-dir", ":memory:"]

    def changed() -> None:
        if kept.state == "ready":
            os.kill(kept.pid, signal.SIGKILL)

    kept = FleetKeeper("coordinator", lambda line: command, tmp_path / "log", restart_always=True, changed=changed)
    with pytest.raises(CommandError, match=r"the coordinator was killed by SIGKILL \(3 times in a row\): .*listening"):
        asyncio.run(kept.run())
    assert (kept.restarts, kept.state) == (2, "failed")


def test_told_to_end_it_starts_no_fleet(shell: Any) -> None:
    folder = FleetFolder(shell.folder / "fleet")
    for _ in range(5):
        starting = shell.begin(*UP)
        until(partial(_is_held_by_another, folder, Identity.of(starting.process.pid)))  # before there is a record
        done = shell.call("down", "--dir", "fleet")
        assert (done.returncode, done.stdout.split("(")[0]) == (0, "ended: supervisor ")
        if (status := starting.process.wait(20)) != 0:
            break
        shell.call("down", "--dir", "fleet")  # it had started before it was told
    assert status == 130
    said = starting.log.read_text().splitlines()[-1]
    assert "while it was starting" in said
    assert (folder.supervised, folder.fleet()) == (False, None)


def _is_held_by_another(folder: FleetFolder, one: Identity) -> bool:
    return folder.holder() not in (None, one)


def test_a_fleet_ends_with_its_last_worker(shell: Any) -> None:
    assert shell.call(*UP, "--workers", "1").returncode == 0
    fleet = Fleet(shell)
    told = fleet.processes()["penstock-1"]
    assert told is not None
    assert told.send(signal.SIGTERM)
    until(fleet.gone)
    assert fleet.folder.fleet() is None
