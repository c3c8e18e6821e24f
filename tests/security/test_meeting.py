"""The meeting of a torchrun launch's ranks, where another user has taken its name first."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from penstock.client.api.appliance_settings import Launcher
from penstock.client.api.rendezvous import CoordinatorAccess, SharedAppliance
from penstock.proto.errors import PenstockError

OTHER = 12_345
SQUAT = """
import os, socket, sys
os.setresuid(*[int(sys.argv[2])] * 3)
held = []
for end in ("", "-0123", "-full"):
    one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    one.bind("\\0" + sys.argv[1] + end)
    one.listen(0)
    held.append(one)
full = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
full.connect(held[-1].getsockname())
print("held", flush=True)
sys.stdin.read()
"""
ACCESS = CoordinatorAccess("unix:/nowhere", "secret", "job")


def meeting(local_rank: int, port: int, monkeypatch: pytest.MonkeyPatch) -> SharedAppliance:
    """Return the meeting of one of two ranks, which are one process here."""
    for name, value in (
        ("RANK", local_rank),
        ("LOCAL_RANK", local_rank),
        ("WORLD_SIZE", 2),
        ("MASTER_PORT", f"{os.getpid()}-{port}"),
    ):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr("penstock.client.api.rendezvous._shared_so_far", 0)
    return SharedAppliance(Launcher())


@pytest.fixture
def squatter(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The port of a launch whose name another user has."""
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    name = meeting(0, 1, monkeypatch)._name
    process = subprocess.Popen(
        [sys.executable, "-c", SQUAT, name, str(OTHER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield 1
    process.communicate("")


def test_ranks_meet_although_the_name_is_taken(squatter: int, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (meeting(rank, squatter, monkeypatch) for rank in (0, 1))
    found: list[CoordinatorAccess] = []
    joining = threading.Thread(target=lambda: found.append(second.join(time.monotonic() + 20, 20)))
    joining.start()  # first: it asks who has the name, until rank 0 is there
    first.publish(ACCESS)
    joining.join(30)
    assert found == [ACCESS]
    second.leave(lambda: None)
    first.leave(lambda: None)


def test_a_second_rank_0_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    first, again = (meeting(0, 2, monkeypatch) for _ in range(2))
    first.publish(ACCESS)
    with pytest.raises(PenstockError, match="only one process with LOCAL_RANK=0"):
        again.publish(ACCESS)
    first.leave(lambda: None)
    again.publish(ACCESS)
    again.leave(lambda: None)
