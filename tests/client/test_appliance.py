"""The life of appliances: started, shared, dropped, and what is said when a daemon does not start or dies."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import streams
from appliances import made
from census import children
from waiting import until

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.client.api import appliance as module
from penstock.client.api.appliance_settings import Launcher
from penstock.client.api.rendezvous import CoordinatorAccess, SharedAppliance
from penstock.proto.errors import CoordinatorUnavailableError, DeadlineError, PenstockError

SOON_S = 60.0


def daemons_of(appliance: Appliance) -> Path:
    """The folder that is there as long as their process."""
    assert appliance._daemons is not None
    return Path("/proc") / str(appliance._daemons.process.pid)


def test_loaders_share_a_with_that_ends_all() -> None:
    with Appliance(timeout_s=SOON_S, seed=1) as appliance:
        train, evaluation = DataLoader(streams.counter, 2), DataLoader(streams.counter, 3)
        assert [int(batch["number"]) for _ in train for batch in evaluation] == [1, 2, 3] * 2
        assert len(appliance._runs) == 2
        assert appliance._opened == 2
        assert module._default is None
        loader = DataLoader(streams.counter, 3)
        kept = [batch["x"] for batch in DataExecutor(loader, appliance=appliance)]
        dropped = DataLoader(streams.counter, 3)
        next(iter(DataExecutor(dropped, appliance=appliance)))
        assert dropped._session is not None
        run = dropped._session.run
        assert not run.closed
        del dropped
        gc.collect()
        until(lambda: run.closed, what="the run of a loader that is dropped ends")
        process = daemons_of(appliance)
        appliance.close()
    appliance.close()  # once more
    until(lambda: not process.exists(), SOON_S, "they end")
    assert [int(x[0]) for x in kept] == [1, 2, 3], "batches outlive the appliance"
    with pytest.raises(RuntimeError, match="the stream ended at step 3, because its appliance was closed"):
        iter(DataExecutor(loader))
    with pytest.raises(PenstockError, match="this Appliance is closed"):
        iter(DataExecutor(DataLoader(streams.counter), appliance=appliance))


def test_an_appliance_that_is_dropped_is_stopped() -> None:
    appliance = Appliance(timeout_s=SOON_S)
    process = daemons_of(appliance)
    del appliance
    gc.collect()
    until(lambda: not process.exists(), SOON_S, "they end")


def test_default_appliance_is_shared_until_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_NUM_WORKERS_PER_BOX", "0")
    train, evaluation = DataLoader(streams.counter, 2), DataLoader(streams.counter, 3)
    assert len(list(train)) == 2
    appliance = module._default
    assert appliance is not None
    assert len(list(evaluation)) == 3
    assert len(appliance._runs) == 2
    state = train.state_dict()
    train.load_state_dict(state)
    assert len(list(train)) == 2, "the epoch after the one that was over"
    appliance.close()
    assert module.current_appliance() is not appliance
    module.current_appliance().close()


STRANGER = """
import os, socket, sys
os.setgid(12345)
os.setuid(12345)
path = sys.argv[1]
for attempt in (
    lambda: socket.socket(socket.AF_UNIX).connect(path),
    lambda: socket.socket(socket.AF_UNIX).bind(path + "2"),
    lambda: os.listdir(os.path.dirname(path)),
    lambda: os.rename(os.path.dirname(path), os.path.dirname(path) + "-moved"),
):
    try:
        attempt()
    except PermissionError:
        print("refused")
"""


def test_daemons_import_torch_and_their_death_is_told() -> None:
    """The fork server starts with the daemons, and the runners of the first run come from it. Whoever else is on this
    machine cannot reach the daemons, and an error says how they died."""
    with Appliance(timeout_s=SOON_S, num_workers_per_box=1) as appliance:
        daemons = appliance._daemons
        assert daemons is not None
        pid = daemons.process.pid
        until(lambda: children(pid, "fork_server"), what="the daemons start it")
        (begun,) = children(pid, "fork_server")
        (seen,) = DataExecutor(DataLoader(streams.surroundings), appliance=appliance)
        assert (seen["fork_server"], children(pid, "fork_server")) == (begun, [begun])
        steps = iter(DataExecutor(DataLoader(streams.slow, 0.01, 100_000), num_steps=100_000, appliance=appliance))
        next(steps)
        socket = daemons.address.removeprefix("unix:")
        if os.getuid() == 0:
            there = [sys.executable, "-I", "-c", STRANGER, socket]
            assert subprocess.run(there, capture_output=True, check=True).stdout.split() == [b"refused"] * 4
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(PenstockError, match="the embedded coordinator and worker was killed by SIGKILL"):
            for _ in steps:
                pass
    assert not os.path.exists(os.path.dirname(socket))


def test_failed_daemon_is_explained_by_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'no module named penstock, say' >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(broken))
    with (
        Appliance(timeout_s=SOON_S) as appliance,
        pytest.raises(PenstockError, match=r"exited with status 3: .*:\nno module named penstock, say"),
    ):
        iter(DataExecutor(DataLoader(streams.counter), appliance=appliance))


def test_unreachable_coordinator_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REACH_S", 0.3)
    with (
        made("127.0.0.1:9", token="t") as appliance,
        pytest.raises(CoordinatorUnavailableError, match=r"127\.0\.0\.1:9 cannot be reached.*tried for 0\.3 s"),
    ):
        iter(DataExecutor(DataLoader(streams.counter), appliance=appliance))


# ---- ranks that share one


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the meeting of a rank, as one process of a torchrun launch would."""
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_PORT": str(os.getpid()),
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")

    def make(rank: int) -> SharedAppliance:
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        monkeypatch.setattr("penstock.client.api.rendezvous._shared_so_far", 0)
        return SharedAppliance(Launcher())

    return make


def test_ranks_meet_and_rank_0_leaves_last(ranks: Any) -> None:
    host, other = ranks(0), ranks(1)
    assert (host.hosts, other.hosts) == (True, False)
    access = CoordinatorAccess("unix:/x", "token", "job")
    joined: list[CoordinatorAccess] = []
    join = threading.Thread(target=lambda: joined.append(other.join(time.monotonic() + SOON_S, SOON_S)))
    join.start()
    host.publish(access)
    join.join(SOON_S)
    assert joined == [access]
    order: list[str] = []
    leave = threading.Thread(target=host.leave, args=(lambda: order.append("stopped"),))
    leave.start()
    order.append("other leaves")
    other.leave(lambda: order.append("never"))
    leave.join(SOON_S)
    assert order == ["other leaves", "stopped"]


def test_a_rank_that_nobody_answers_says_so(ranks: Any) -> None:
    with pytest.raises(DeadlineError, match=r"local rank 0 .* within 0\.05 s: create the same appliances"):
        ranks(1).join(time.monotonic() + 0.05, 0.05)
