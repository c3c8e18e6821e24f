"""User code as another user than the worker's: what it may do, and that everything works that works without.

The worker has the capabilities that root has in a container: what needs more does not work where it is wanted.
"""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import users
from cluster import TOKEN, Cluster, running
from family import runners
from other_users import CONTAINER, opened, why_not, with_capabilities
from waiting import until

from penstock.client import DataExecutor, DataLoader
from penstock.proto.errors import InvalidArgumentError, PenstockError
from penstock.worker.processes.runner_user import find_user

NOBODY = "nobody"
UNNAMED = "61234"
"""A user that the system's database does not have, as in a container; and of whom nothing else runs."""
MOST = 20
"""Processes that the user may have."""
BATCHES = 2000
"""More than lie ready when the runner is killed."""


@pytest.fixture(scope="module")
def container() -> Sequence[str]:
    before = [*opened(), *with_capabilities(*CONTAINER)]
    if why := why_not(before):
        pytest.skip(why)
    return before


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, container: Sequence[str]) -> Iterator[Cluster]:
    """Its runners' user cannot enter the worker's temporary folder."""
    limits = ["--runner-user", UNNAMED, "--runner-processes", str(MOST)]
    with tempfile.TemporaryDirectory(dir="/tmp") as private:  # of a name that is short enough for sockets below it
        with running(tmp_path_factory.mktemp("state"), TMPDIR=private) as cluster:
            cluster.add_worker(4, *limits, allow="users", name="w", before=container)
            yield cluster
        assert os.listdir(private) == []


def told(cluster: Cluster, job: str, loader: DataLoader, steps: int) -> list[Any]:
    with cluster.box(job, num_workers_per_box=1) as appliance:
        return [batch.tolist() for batch in DataExecutor(loader, num_steps=steps, appliance=appliance)]


def secret(folder: Path) -> str:
    path = folder / "token"
    path.write_text("a secret")
    path.chmod(0o600)
    folder.chmod(0o711)
    return str(path)


def refused(before: Sequence[str], *arguments: str) -> str:
    """Return the error of a worker that does not start."""
    command = [sys.executable, "-m", "penstock.worker", "--coordinator", "127.0.0.1:1", "--slots", "1", *arguments]
    environment = {**os.environ, "PENSTOCK_TOKEN": TOKEN}
    done = subprocess.run([*before, *command], env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1, done
    return done.stderr


# ---- what it may do


def test_user_code_has_another_users_rights(cluster: Cluster, tmp_path: Path) -> None:
    daemon, user = cluster.workers[0].pid, int(UNNAMED)
    for number, path in enumerate((secret(tmp_path), f"/proc/{daemon}/environ")):
        rows = told(cluster, f"rights{number}", DataLoader(users.tells, 6, path, daemon), 1)
        assert rows == [[1, user, user, False, False, False, True]]


def test_it_may_start_processes_up_to_its_limit(cluster: Cluster) -> None:
    assert len(told(cluster, "elsewhere", DataLoader(users.in_processes), 4)) == 4
    (((started,),)) = told(cluster, "many", DataLoader(users.many, 3 * MOST), 1)
    assert 0 < started < MOST  # the runner itself is one


@pytest.mark.filterwarnings("ignore:.*was recovered:UserWarning")
def test_no_capability_is_kept(tmp_path: Path, container: Sequence[str]) -> None:
    """Hold although the kernel was told to spare them when a process changes its user. The memory is bounded, too."""
    kept = [*container, "setpriv", "--securebits", "+no_setuid_fixup"]
    batches = 20
    options = ["--runner-user", NOBODY, "--no-sandbox", "--runner-memory", str(batches * users.HELD // 4)]
    with running(tmp_path / "state") as cluster:
        daemon = cluster.add_worker(1, *options, allow="users", before=kept).pid
        ((_, *rights),) = told(cluster, "kept", DataLoader(users.tells, 2, secret(tmp_path), daemon), 1)
        with pytest.raises(PenstockError, match="--runner-memory"):  # for it replays, and so leaks as much again
            told(cluster, "grows", DataLoader(users.grows, batches), batches)
    nobody = pwd.getpwnam(NOBODY)
    assert rights == [nobody.pw_uid, nobody.pw_gid, False, False, False, True]


# ---- what works as without


@pytest.mark.filterwarnings("ignore:.*was recovered:UserWarning")
def test_a_lost_runner_and_a_state_in_between(cluster: Cluster) -> None:
    """Save at a step that was not announced: the state comes from a helper process, which runs as the same user."""
    with cluster.box("lost", num_workers_per_box=1) as appliance:
        loader = DataLoader(users.tells, BATCHES, "/nowhere", 1)
        seen = []
        for batch in DataExecutor(loader, num_steps=BATCHES, appliance=appliance):
            seen.append(int(batch[0]))
            if len(seen) == 50:
                state = loader.state_dict()
                (runner,) = runners(cluster.workers[0].pid)
                os.kill(runner, signal.SIGKILL)
        assert seen == list(range(1, BATCHES + 1))
    until(lambda: not runners(cluster.workers[0].pid), what="the run is over")
    with cluster.box("resumed", num_workers_per_box=1) as appliance:
        loader = DataLoader(users.tells, BATCHES, "/nowhere", 1)
        loader.load_state_dict(state)
        rows = [batch.tolist() for batch in DataExecutor(loader, num_steps=100, appliance=appliance)]
        assert [row[0] for row in rows] == list(range(51, 151))


# ---- what is refused, and what is said


def test_processes_are_counted_by_user() -> None:
    assert "runner_processes=5 needs runner_user" in refused([], "--runner-processes", "5")


def test_a_user_that_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidArgumentError, match=r"must be a user of this machine, got 'no-such-user'"):
        find_user("no-such-user")
    with pytest.raises(InvalidArgumentError, match="must be a user other than root"):
        find_user("0")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(
        InvalidArgumentError, match=r"this worker runs as user 1000. Start the worker as root, or as nobody"
    ):
        find_user(NOBODY)


def test_capabilities_that_lack_are_named(container: Sequence[str]) -> None:
    few = [*container, *with_capabilities(*(name for name in CONTAINER if name not in ("kill", "setuid")))]
    said = refused(few, "--runner-user", NOBODY)
    assert "that this worker lacks: CAP_KILL, CAP_SETUID" in said
    assert "docker run --cap-add" in said


def test_users_that_are_not_mapped_are_refused() -> None:
    rootless = [*opened(), "unshare", "--user", "--map-root-user"]
    if why := why_not(rootless):
        pytest.skip(why)
    assert "In a rootless container choose a user of" in refused(rootless, "--runner-user", NOBODY)
