"""A forked child cannot speak for its parent, and one that comes back to code of ours ends."""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from penstock.proto.errors import ForkedProcessError
from penstock.runtime.process import forks

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")


def status_of(work: Callable[[], object]) -> int:
    """The exit status of a forked child that does this; 99 if it raised."""
    child = os.fork()
    if not child:
        code = 99
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class Thing:
    """A socket and a piece of shared memory, as runners have them."""

    def __init__(self) -> None:
        self.ours, self.theirs = socket.socketpair()
        self.fd = os.memfd_create("shared")
        os.ftruncate(self.fd, mmap.PAGESIZE)
        self.map = mmap.mmap(self.fd, mmap.PAGESIZE)
        self.map[:5] = b"ours!"

    def forked(self) -> None:
        forks.unshare(self.map, self.fd)
        forks.silence(self.fd)
        forks.silence(self.ours.fileno())


@pytest.fixture
def thing() -> Iterator[Thing]:
    thing = Thing()
    forks.keep(thing)
    with thing.ours, thing.theirs:
        yield thing
    thing.map.close()
    os.close(thing.fd)


def test_forked_child_writes_its_own_memory(thing: Thing) -> None:
    def work() -> None:
        assert thing.map[:5] == b"ours!"
        thing.map[:5] = b"hers!"
        os.write(thing.fd, b"hers!")
        assert thing.map[:5] == b"hers!"

    assert status_of(work) == 0
    assert thing.map[:5] == b"ours!"


def test_a_forked_child_cannot_speak(thing: Thing) -> None:
    def work() -> None:
        with pytest.raises(OSError, match="socket"):
            thing.ours.send(b"I")
        assert status_of(lambda: os.write(thing.ours.fileno(), b"nor my child")) == 0

    assert status_of(work) == 0
    thing.ours.send(b"parent")
    assert thing.theirs.recv(64) == b"parent"


_NO_DESCRIPTORS = """
import os, resource, socket
from penstock.runtime.process import forks

ours, theirs = socket.socketpair()

class Thing:
    def forked(self):
        forks.silence(ours.fileno())

thing = Thing()
forks.keep(thing)
resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
child = os.fork()
if not child:
    try:
        ours.send(b"I")
    except OSError:
        os._exit(7)
    os._exit(8)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""


def test_child_without_descriptors_is_disarmed() -> None:
    """In an interpreter of its own: at-fork handlers of others, such as grpc's, abort without free descriptors."""
    subprocess.run([sys.executable, "-P", "-c", _NO_DESCRIPTORS], check=True, timeout=60)


@pytest.mark.parametrize(
    ("end", "status", "says"),
    [
        (lambda: sys.exit(3), 3, ""),
        (lambda: [].pop(), 1, "IndexError: pop from empty list"),
        (lambda: None, 1, "returned into Penstock's code"),
    ],
)
def test_a_child_that_comes_back_ends(
    end: Callable[[], object], status: int, says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    def work() -> None:
        try:
            end()
        finally:
            forks.leave()

    assert status_of(work) == status
    assert says in capfd.readouterr().err


def test_only_children_of_user_code_hosts_stray() -> None:
    def strayed() -> None:
        os._exit(7 if forks.strayed else 8)

    def host() -> None:
        forks.host_user_code()
        assert not forks.strayed
        os._exit(status_of(strayed))

    assert status_of(strayed) == 8
    assert status_of(host) == 7


def test_children_after_user_code_are_not_strayed(thing: Thing) -> None:
    def host() -> None:
        with forks.hosting(thing):
            user_codes = os.fork()  # the child comes back, and ends
        assert os.waitpid(user_codes, 0)[1] == 1 << 8
        assert status_of(lambda: thing.ours.send(b"task")) == 0

    forks._kept.discard(thing)
    assert status_of(host) == 0
    assert thing.theirs.recv(64) == b"task"


def test_owned_objects_are_refused_in_children() -> None:
    owner = forks.OwnerProcess()
    owner.check("a loader")

    def work() -> None:
        with pytest.raises(ForkedProcessError, match=rf"a loader must be used in process {owner.pid}.*spawn"):
            owner.check("a loader")

    assert status_of(work) == 0
