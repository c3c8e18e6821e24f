"""Memory that a process may still take, and the refusal to make a ring from more."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from penstock.proto.lane import ring
from penstock.proto.lane.ring import Ring
from penstock.runtime.process import free_memory

GIB = 1 << 30


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """4 GiB available; the process is in the group /a/b."""
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    4194304 kB\n")
    (tmp_path / "cgroup").write_text("1:name=x:/old\n0::/a/b\n")
    (tmp_path / "groups/a/b").mkdir(parents=True)
    monkeypatch.setattr(free_memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(free_memory, "OWN_GROUP", tmp_path / "cgroup")
    monkeypatch.setattr(free_memory, "GROUPS", tmp_path / "groups")
    return tmp_path


def limit(group: Path, most: str, used: int, droppable: int = 0) -> None:
    (group / "memory.max").write_text(f"{most}\n")
    (group / "memory.current").write_text(f"{used}\n")
    (group / "memory.stat").write_text(f"anon 5\ninactive_file {droppable}\nactive_file 7\n")


def test_it_is_the_least_of_machine_and_groups(machine: Path) -> None:
    assert free_memory.free_memory() == 4 * GIB
    limit(machine / "groups/a/b", "max", GIB)
    assert free_memory.free_memory() == 4 * GIB
    limit(machine / "groups/a", str(3 * GIB), 2 * GIB, GIB // 2)
    assert free_memory.free_memory() == 3 * GIB // 2
    limit(machine / "groups/a/b", str(GIB), 2 * GIB)
    assert free_memory.free_memory() == 0


def test_a_large_ring_is_made_of_free_memory_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel would kill a process for the rest, and not always this one."""
    monkeypatch.setattr(ring, "free_memory", lambda: 100 << 20)
    with pytest.raises(OSError, match=r"it may take 78,643,200 bytes, 75% of the free memory") as caught:
        Ring.create(40 << 20, 2)
    assert caught.value.errno == errno.ENOMEM
    Ring.create(1 << 20, 2).close_fd()
