"""User code as another user than the worker's: what it may do, and that everything works that works without."""

from __future__ import annotations

import os
import pwd
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import users
from cluster import TOKEN, Cluster, running
from family import eventually, runners

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.proto.errors import InvalidArgumentError
from penstock.worker.processes.runner_user import RunnerUser, find_user

NOBODY = "nobody"
BATCHES = 5000
"""More than lie ready when the runner is killed."""


def _why_not() -> str:
    if os.geteuid() != 0:
        return "only root can start runners as another user"
    try:
        find_user(NOBODY)
    except InvalidArgumentError as error:
        return error.message
    return ""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if why := _why_not():
        pytest.skip(why)
    with running(tmp_path_factory.mktemp("state")) as cluster:
        cluster.add_worker(4, "--runner-user", NOBODY, allow="users", name="w")
        yield cluster
        cluster.stop()


def told(loader: DataLoader, appliance: Appliance, steps: int) -> list[Any]:
    return [batch.tolist() for batch in DataExecutor(loader, num_steps=steps, appliance=appliance)]


def test_user_code_has_another_users_rights(cluster: Cluster, tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text("a secret")
    secret.chmod(0o600)
    nobody = pwd.getpwnam(NOBODY)
    with Appliance(cluster.address, token=TOKEN, job="rights", timeout_s=60.0) as appliance:
        loader = DataLoader(users.tells, 6, str(secret), cluster.workers[0].pid)
        assert told(loader, appliance, 4) == [
            [number, nobody.pw_uid, nobody.pw_gid, False, False, False, True] for number in (1, 2, 3, 4)
        ]


@pytest.mark.filterwarnings("ignore:.*was recovered:UserWarning")
def test_a_lost_runner_and_a_state_in_between(cluster: Cluster) -> None:
    """At a step that was not announced: the state comes of a helper process, which is that user's too."""
    options: dict[str, Any] = {"token": TOKEN, "timeout_s": 60.0, "seed": 1}
    with Appliance(cluster.address, job="lost", **options) as appliance:
        loader = DataLoader(users.tells, BATCHES, "/nowhere", 1)
        seen = []
        for batch in DataExecutor(loader, num_steps=BATCHES, appliance=appliance):
            seen.append(int(batch[0]))
            if len(seen) == 50:
                state = loader.state_dict()
                (runner,) = runners(cluster.workers[0].pid)
                os.kill(runner, signal.SIGKILL)
        assert seen == list(range(1, BATCHES + 1))
    eventually(lambda: not runners(cluster.workers[0].pid), "the run is over")
    with Appliance(cluster.address, job="resumed", **options) as appliance:
        loader = DataLoader(users.tells, BATCHES, "/nowhere", 1)
        loader.load_state_dict(state)
        assert [row[0] for row in told(loader, appliance, 100)] == list(range(51, 151))


def test_torchs_own_processes_work(cluster: Cluster) -> None:
    nobody = pwd.getpwnam(NOBODY).pw_uid
    with Appliance(cluster.address, token=TOKEN, job="processes", timeout_s=60.0) as appliance:
        rows = told(DataLoader(users.in_processes), appliance, 4)
    assert rows == [[[index, nobody], [index + 1, nobody]] for index in (0, 2, 4, 6)]


def test_a_user_that_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidArgumentError, match=r"must be a user of this machine, got 'no-such-user'"):
        find_user("no-such-user")
    with pytest.raises(InvalidArgumentError, match="must be another user than root"):
        find_user("0")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(InvalidArgumentError, match=r"as user 1000 it cannot become nobody; start it as nobody, or as"):
        find_user(NOBODY)


def test_a_user_travels_as_text() -> None:
    user = RunnerUser("a user", 7, 8, [8, 9], "/home/a user")
    assert RunnerUser.decode(user.encode()) == user
