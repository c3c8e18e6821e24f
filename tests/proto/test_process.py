"""Child processes: how they are started, watched and ended, with real ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from penstock.runtime.process.identity import Identity
from penstock.runtime.process.line_reader import LinePipe
from penstock.runtime.process.spawn import Spawned, environment, spawn

SOON_S = 60.0


def started(code: str, **options: object) -> Spawned:
    return spawn([sys.executable, "-P", "-c", code], **options)  # type: ignore[arg-type]


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def said(code: str, *, fds: bool = False, **options: object) -> bytes | None:
    """The first line that a child prints; with `fds`, on a descriptor that it is told as `fd`."""
    with LinePipe() as pipe:
        if fds:
            child = started(f"fd = {pipe.theirs.fileno()}\n{code}", fds=[pipe.theirs], **options)
        else:
            child = started(code, stdout=pipe.theirs, **options)
        line = pipe.line(SOON_S)
        child.result()
        child.close()
    return line


# ---- spawn


def test_a_child_gets_what_is_named_only() -> None:
    secret = os.open("/dev/null", os.O_RDONLY)
    os.set_inheritable(secret, True)
    try:
        code = "import os, sys; os.write(fd, f'{sorted(map(int, os.listdir(\"/proc/self/fd\")))} {fd}\\n'.encode())"
        line = said(code, fds=True)
    finally:
        os.close(secret)
    assert line is not None
    listed, fd = line.decode().removeprefix("[").split("] ")
    # one more is that of the listing itself
    assert {0, 1, 2, int(fd)} <= set(map(int, listed.split(", ")))
    assert len(listed.split(", ")) == 5


@pytest.mark.parametrize(("session", "leads"), [(True, "True True"), (False, "True False")])
def test_a_child_leads_a_group(session: bool, leads: str) -> None:
    code = "import os; print(os.getpgrp() == os.getpid(), os.getsid(0) == os.getpid())"
    assert said(code, session=session) == leads.encode()


def test_a_child_reads_nothing_of_ours() -> None:
    kept, (read, write) = os.dup(0), os.pipe()
    os.write(write, b"for us")
    try:
        os.dup2(read, 0)
        assert said("import os; print(os.readlink('/proc/self/fd/0'))") == b"/dev/null"
    finally:
        os.dup2(kept, 0)
        for fd in (kept, read, write):
            os.close(fd)


def test_nothing_stays_open_of_one_that_ended() -> None:
    before = descriptors()
    assert said("print('here')") == b"here"
    child = started("pass")
    assert child.result() == 0
    del child  # not closed
    assert descriptors() == before


def test_variables_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "RANKED", "TORCHELASTIC_RUN_ID", "PENSTOCK_TOKEN_FILE"):
        monkeypatch.setenv(name, "x")
    names = environment("RANK", "TORCHELASTIC_*", "PENSTOCK_TOKEN*").keys()
    assert "RANKED" in names
    assert not {"RANK", "TORCHELASTIC_RUN_ID", "PENSTOCK_TOKEN_FILE"} & names


# ---- watch and end


def test_a_polite_end_then_a_kill() -> None:
    assert (child := started("import time; time.sleep(60)")).end(SOON_S)
    assert child.status == -signal.SIGTERM
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    with LinePipe() as pipe:
        child = started(deaf, stdout=pipe.theirs)
        assert pipe.line(SOON_S) == b""
        assert child.end(0.1)
    assert child.status == -signal.SIGKILL
    assert not child.send(signal.SIGTERM)


def test_children_are_waited_for_without_pidfds(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(pid: int) -> int:
        raise PermissionError("seccomp")

    monkeypatch.setattr(os, "pidfd_open", refused)
    child = started("import time; time.sleep(60)")
    assert child.fileno() == -1
    assert not child.wait(0.1)
    assert child.end(SOON_S)
    assert child.status == -signal.SIGTERM


def test_an_identity_is_not_its_number() -> None:
    child = started("import time; time.sleep(60)")
    identity = Identity.of(child.pid)
    assert Identity(child.pid, identity.started + 1, identity.boot).open() is None
    assert not Identity(child.pid, identity.started, "another boot").send(signal.SIGKILL)
    assert child.status is None
    assert identity.send(signal.SIGKILL)
    assert child.result() == -signal.SIGKILL
    assert not identity.send(signal.SIGKILL)
    with pytest.raises(ProcessLookupError):
        Identity.of(child.pid)


# ---- a child's life below its parent

LIVES = """
import asyncio, os, sys, time
from penstock.runtime.process.lifetime import Parent

async def live():
    asked = asyncio.Event()
    Parent(os.getppid()).on_end(asked.set)
    print("lives", flush=True)
    await asked.wait()
    print("ends", flush=True)

asyncio.run(live())
"""


def test_signals_to_the_whole_job_do_not_end_a_linked_child() -> None:
    """Send them at its start, before its handlers, and later. Then ask it to end, while a fork holds the socket."""
    with LinePipe() as pipe:
        child = started(LIVES, stdout=pipe.theirs, linked=True)
        ending = (signal.SIGTERM, signal.SIGINT)
        assert all(map(child.send, ending))
        assert pipe.line(SOON_S) == b"lives"
        for _ in range(20):
            assert all(map(child.send, ending))
        fork = os.fork()
        if not fork:
            time.sleep(2 * SOON_S)
            os._exit(0)
        assert not child.wait(0.3)
        child.ask_to_end()
        child.ask_to_end()
        assert pipe.line(SOON_S) == b"ends"
        assert child.result() == 0
        os.kill(fork, signal.SIGKILL)
        os.waitpid(fork, 0)
        child.close()


def test_a_linked_child_ends_with_its_parent() -> None:
    with LinePipe() as pipe:
        middle = f"""
import sys, time
from penstock.runtime.process.spawn import spawn
kept = spawn([sys.executable, "-P", "-c", {LIVES!r}], linked=True)
time.sleep(60)
"""
        parent = started(middle, stdout=pipe.theirs)
        assert pipe.line(SOON_S) == b"lives"
        parent.kill()
        assert pipe.line(SOON_S) == b"ends"
        parent.result()
        parent.close()


def test_only_its_parent_is_its_parent() -> None:
    code = """
import os
from penstock.runtime.process.lifetime import Parent
Parent(os.getppid()).close()
try:
    Parent(os.getpid())
except ProcessLookupError:
    print("has ended")
"""
    assert said(code) == b"has ended"


USERS_CHILDREN = """
import os, signal, subprocess, time
from penstock.runtime.process import lifetime
from penstock.runtime.process.spawn import fork

def ends(pid, number):
    os.kill(pid, number)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def forked():
    pid = os.fork()
    if not pid:
        signal.alarm(20)
        while True:
            time.sleep(60)
    return pid

def quiet():
    time.sleep(60)

lifetime.outlive_signals()
ours = fork(quiet)
assert {ends(forked(), signal.SIGTERM) for _ in range(200)} == {-signal.SIGTERM}
pid = forked()
time.sleep(0.3)  # Python forgets an interrupt within its hooks of a fork
assert ends(pid, signal.SIGINT) == -signal.SIGINT
program = subprocess.run(["grep", "-E", "Sig(Ign|Blk)", "/proc/self/status"], capture_output=True, text=True).stdout
masks = [int(line.split()[1], 16) for line in program.splitlines()]
assert not any(mask & (1 << number - 1) for mask in masks for number in lifetime.ENDING), program
os.kill(ours, signal.SIGTERM)
os.kill(ours, signal.SIGINT)
assert ends(ours, signal.SIGKILL) == -signal.SIGKILL
print("as usual")
"""


def test_signals_have_their_usual_effect_on_children_of_user_code() -> None:
    """Let a process that outlives them fork, as multiprocessing does, and start a program; each signal is sent at
    once."""
    assert said(USERS_CHILDREN) == b"as usual"


# ---- lines


# ---- forks, in an interpreter without threads

FORKING = """
import os, signal, subprocess, sys, time
from penstock.runtime.process.end import has_ended, reap
from penstock.runtime.process.spawn import fork

def leaves_one_behind():
    subprocess.Popen(["sleep", "60"], stdout=wake)
    return 7

def fails():
    raise LookupError("in the child")

listen, wake = os.pipe()
pid = fork(leaves_one_behind)
assert os.getpgid(pid) == pid
print(reap(pid), reap(fork(fails)), reap(fork(lambda: os.kill(os.getpid(), 9))), flush=True)
os.close(wake)
print(os.read(listen, 1), flush=True)  # at its end all who held the other one are gone
if fork(lambda: time.sleep(60)):
    print(os.getpid(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_forked_children_end_with_all_they_left() -> None:
    """End forked children with their parent, however the parent ends."""
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", FORKING], capture_output=True, text=True, timeout=50)
    lines = done.stdout.splitlines()
    assert lines[:2] == ["7 1 -9", "b''"], done.stderr
    assert done.stderr.count("LookupError: in the child") == 1
    # capture_output reads to the end of the pipe, which the last child would have held for a minute
    assert time.monotonic() - began < 40
