"""Control groups of a daemon's children: on a folder that stands for the kernel's, and on what this kernel has."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from coroutines import in_loop

from penstock.worker.processes import control_groups
from penstock.worker.processes.child_processes import ForkServer
from penstock.worker.processes.control_groups import ControlGroups, OutOfMemory, out_of_memory, own_group, why_not
from penstock.worker.processes.progress_page import ProgressPage
from penstock.worker.processes.temporary_folders import TemporaryFolders
from penstock.worker.slots.memory_watch import killed_for_memory

MOUNTS = """\
22 28 0:20 / /proc rw,relatime - proc proc rw
30 28 0:26 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw
31 30 0:27 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
32 30 0:28 / /sys/fs/cgroup/pids rw,relatime - cgroup cgroup rw,pids
"""
MIB = 1 << 20


@pytest.mark.parametrize(
    ("cgroups", "mounts", "found"),
    [
        ("0::/\n", MOUNTS, "/sys/fs/cgroup/unified"),
        ("8:pids:/x\n0::/user.slice/run-1.scope\n", MOUNTS, "/sys/fs/cgroup/unified/user.slice/run-1.scope"),
        ("0::/a/b\n", "1 2 0:1 /a /mnt/one\\040two rw - cgroup2 cgroup2 rw\n", "/mnt/one two/b"),
        ("0::/other\n", "1 2 0:1 /a /mnt rw - cgroup2 cgroup2 rw\n", None),
        ("0::/../outside\n", MOUNTS, None),
        ("8:pids:/x\n", MOUNTS, None),
        ("0::/\n", "", None),
    ],
)
def test_own_group_is_found(cgroups: str, mounts: str, found: str | None) -> None:
    assert own_group(cgroups, mounts) == (None if found is None else Path(found))


_rmdir = os.rmdir


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A group that was delegated, with the process 1 alone. Its files go with a folder, as the kernel has it."""
    for name, text in {
        "cgroup.procs": "1\n",
        "cgroup.controllers": "cpu memory pids\n",
        "cgroup.subtree_control": "",
    }.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(os, "rmdir", _as_the_kernel)
    return tmp_path


def _as_the_kernel(group: str | Path) -> None:
    procs = Path(group, "cgroup.procs")
    if (procs.exists() and procs.read_text().strip()) or any(entry.is_dir() for entry in Path(group).iterdir()):
        raise OSError(16, "Device or resource busy")
    for entry in Path(group).iterdir():
        entry.unlink()
    _rmdir(group)


def test_a_delegated_group_is_divided(own: Path) -> None:
    groups, why = ControlGroups.take(own, [1], memory=300 * MIB, processes=64)
    assert groups is not None, why
    assert (own / "penstock-daemon/cgroup.procs").read_text() == "1"
    for group in (own, own / "penstock-runners"):
        assert (group / "cgroup.subtree_control").read_text() == "+memory +pids"
    assert (own / "penstock-runners/pids.max").read_text() == "64"
    made = Path(groups.make())
    assert made.parent == own / "penstock-runners"
    assert (made / "memory.max").read_text() == str(300 * MIB)
    assert (made / "memory.oom.group").read_text() == "1"
    assert groups.make() != str(made)


def test_groups_are_left_as_they_were_found(own: Path) -> None:
    groups, _ = ControlGroups.take(own, [1])
    assert groups is not None
    groups.make()
    (own / "penstock-daemon/cgroup.procs").write_text("")  # as the kernel does when the daemon moves back
    groups.close([1])
    assert sorted(entry.name for entry in own.iterdir()) == [
        "cgroup.controllers",
        "cgroup.procs",
        "cgroup.subtree_control",
    ]
    assert (own / "cgroup.procs").read_text() == "1"
    assert (own / "cgroup.subtree_control").read_text() == "-memory -pids"


def test_without_limits_there_are_none(own: Path) -> None:
    """No limits are set, also where a killed daemon had set some."""
    groups, _ = ControlGroups.take(own, [1])
    assert groups is not None
    assert Path(groups.make(), "memory.max").read_text() == "max"
    assert (own / "penstock-runners/pids.max").read_text() == "max"


def test_a_busy_group_is_killed_and_goes_later(own: Path) -> None:
    groups, _ = ControlGroups.take(own, [1])
    assert groups is not None
    group = Path(groups.make())
    (group / "cgroup.procs").write_text("77")
    assert not groups.remove(str(group))
    groups.kill(str(group))
    assert (group / "cgroup.kill").read_text() == "1"
    (group / "cgroup.procs").write_text("")
    groups.make()
    assert not group.exists()
    groups.kill(str(group))  # it has gone


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"cgroup.controllers": "cpu pids\n"}, "does not have the controller memory"),
        ({"cgroup.procs": "1\n2\n0\n"}, "has 2 processes that do not belong to the worker"),
        ({"cgroup.procs": None}, "the worker must be allowed to write to"),
    ],
)
def test_what_is_not_ours_is_left_alone(own: Path, change: dict[str, str | None], why: str) -> None:
    for name, text in change.items():
        if text is None:
            (own / name).unlink()
        else:
            (own / name).write_text(text)
    before = {entry.name: entry.read_text() for entry in own.iterdir()}
    groups, refused = ControlGroups.take(own, [1])
    assert groups is None
    assert why in refused
    assert {entry.name: entry.read_text() for entry in own.iterdir()} == before


def test_no_hierarchy_is_no_group() -> None:
    assert "not in a mounted cgroup v2 hierarchy" in why_not(None, [1])


def test_a_division_that_fails_is_undone(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Path.write_text

    def refuses(path: Path, text: str) -> int:
        if path.name == "cgroup.subtree_control" and "+" in text:
            raise OSError(16, "Device or resource busy", str(path))
        if path == own / "cgroup.procs":  # the kernel takes the process out of where it was
            write(own / "penstock-daemon/cgroup.procs", "")
        return write(path, text)

    monkeypatch.setattr(Path, "write_text", refuses)
    groups, why = ControlGroups.take(own, [1])
    assert groups is None
    assert "cannot be divided: Device or resource busy" in why
    assert not any(entry.is_dir() for entry in own.iterdir())
    assert (own / "cgroup.procs").read_text() == "1"


@pytest.mark.parametrize(
    ("events", "whose"),
    [
        ("low 0\nhigh 0\nmax 9\noom 0\noom_kill 0\n", OutOfMemory.NO),
        ("low 0\nhigh 0\nmax 9\noom 1\noom_kill 2\noom_group_kill 1\n", OutOfMemory.OWN),
        ("low 0\nhigh 0\nmax 0\noom 0\noom_kill 1\n", OutOfMemory.ABOVE),
        ("nonsense\n", OutOfMemory.NO),
        (None, OutOfMemory.NO),
    ],
)
def test_an_out_of_memory_kill_is_known(tmp_path: Path, events: str | None, whose: OutOfMemory) -> None:
    if events is not None:
        (tmp_path / "memory.events").write_text(events)
    assert out_of_memory(str(tmp_path)) is whose


class FakeSlot(SimpleNamespace):
    def lose(self, why: str) -> None:
        self.why = why


@pytest.mark.parametrize("young", [True, False])
def test_a_kill_by_its_group_is_a_memory_limit(young: bool) -> None:
    """Recycle the runner; if the next one also ends before its second batch, that is a MemoryLimitError."""
    slot = FakeSlot(name="s", recycle=False, outgrown=False, progress_page=SimpleNamespace(total=7))
    slot.host = SimpleNamespace(runner_memory=150 * MIB)
    killed_for_memory(cast(Any, slot), OutOfMemory.OWN, young=young)
    assert "killed by the kernel after batch 7" in slot.why
    assert "above the limit of 150 MiB (penstock worker --runner-memory)" in slot.why
    assert (slot.recycle, slot.outgrown) == (young, young)
    killed_for_memory(cast(Any, slot), OutOfMemory.ABOVE, young=young)
    assert "its machine, container or systemd unit had no memory left" in slot.why


# ------------------------------------------------------------------------------------------------ on this kernel


@pytest.fixture
def real() -> Iterator[Path]:
    """A new group of this kernel's, with no controllers asked for."""
    mounts = [line.split(" - ") for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    points = [before.split(" ")[4] for before, after in mounts if after.startswith("cgroup2 ")]
    try:
        group = Path(tempfile.mkdtemp(prefix="penstock-test-", dir=points[0]))
    except (IndexError, OSError) as error:
        pytest.skip(f"no cgroup v2 hierarchy that this user can write to: {error}")
    yield group
    with_kill = group / "cgroup.kill"
    if with_kill.exists():
        with_kill.write_text("1")
    for folder in [*sorted(group.glob("*/*/")), *sorted(group.glob("*/")), group]:
        until = time.monotonic() + 10
        while folder.exists():
            try:
                os.rmdir(folder)
            except OSError:
                assert time.monotonic() < until
                time.sleep(0.02)


DAEMON = """
import os, subprocess, sys, time
from pathlib import Path
from penstock.worker.processes import control_groups
own, controllers = Path(sys.argv[1]), sys.argv[2].split()
(own / "cgroup.procs").write_text("0")
found, ours = control_groups.here()
assert found == own, found
groups, why = control_groups.ControlGroups.take(found, ours, memory=64 << 20, controllers=controllers)
assert groups is not None, why
assert control_groups.here()[0] == own / "penstock-daemon"
group = groups.make()
child = os.fork()
if child == 0:
    control_groups.enter(group)
    exec(sys.argv[3])
    os._exit(0)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print("ended", status, control_groups.out_of_memory(group).name, groups.remove(group), flush=True)
groups.kill(group)
until = time.monotonic() + 10
while not groups.remove(group):
    assert time.monotonic() < until
    time.sleep(0.02)
groups.close(ours)
print("left", sorted(entry.name for entry in own.iterdir() if entry.is_dir()), flush=True)
"""
LEAVES_ONE = "os.fork() == 0 and (os.setsid(), os.close(1), os.close(2), time.sleep(600))"
TAKES_MEMORY = "held = bytearray(b'x' * (512 << 20))"


def daemon(own: Path, controllers: str, code: str) -> str:
    command = [sys.executable, "-c", DAEMON, str(own), controllers, code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_group_takes_all_that_a_child_left(real: Path) -> None:
    """A process in a session of its own, whose parent is gone."""
    if not (real / "cgroup.kill").exists():
        pytest.skip("this kernel has no cgroup.kill: before Linux 5.14")
    assert daemon(real, "", LEAVES_ONE).splitlines() == ["ended 0 NO False", "left []"]


def test_the_kernel_holds_the_memory_limit(real: Path) -> None:
    found = (real / "cgroup.controllers").read_text().split()
    if "memory" not in found:
        pytest.skip(f"this hierarchy has no memory controller, only {found}: it is of cgroup v1 here")
    (real.parent / "cgroup.subtree_control").write_text("+memory")
    assert daemon(real, "memory", TAKES_MEMORY).splitlines() == ["ended -9 OWN True", "left []"]


@in_loop
async def test_forked_children_are_in_their_group(real: Path) -> None:
    groups = ControlGroups(real, 0, 0, ())
    (real / control_groups.RUNNERS).mkdir()
    folders, page = TemporaryFolders(), ProgressPage.create()
    fork_server = ForkServer(folders, groups)
    try:
        await fork_server.start()
        child = await fork_server.fork("helper", "a child", page, lambda message: None)
        line = next(line for line in Path(f"/proc/{child.pid}/cgroup").read_text().splitlines() if "0::" in line)
        until = time.monotonic() + 10
        while not line.endswith(f"{real.name}/{control_groups.RUNNERS}/1"):
            assert time.monotonic() < until, line
            await asyncio.sleep(0.02)
            text = Path(f"/proc/{child.pid}/cgroup").read_text()
            line = next(line for line in text.splitlines() if "0::" in line)
        os.kill(child.pid, signal.SIGKILL)
        await asyncio.wait_for(child.exited, 30)
        assert child.out_of_memory is OutOfMemory.NO
        assert not Path(child.group).exists()
    finally:
        fork_server.close()
        await fork_server.wait()
        page.close()
        folders.close()
