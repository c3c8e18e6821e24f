"""A directory for each child, and what becomes of those of a daemon that was killed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.worker.processes.fork_servers import TemporaryFolders

DAEMON = """
import sys
from penstock.worker.processes.fork_servers import TemporaryFolders
dirs = TemporaryFolders()
print(dirs.make(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The system's temporary directory, in this process and below; its name is short, as sockets need it.
    `tmp_path` is made first, elsewhere."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield Path(folder)


def test_each_child_has_one_and_all_are_removed(there: Path) -> None:
    dirs = TemporaryFolders()
    one, two = dirs.make(), dirs.make()
    assert one != two
    (Path(one) / "listener").touch()
    dirs.remove(one)
    assert not Path(one).exists()
    assert Path(two).stat().st_mode & 0o777 == 0o700
    dirs.close()
    assert list(there.iterdir()) == []


def test_next_daemon_removes_those_of_killed_one(there: Path) -> None:
    daemon = subprocess.Popen([sys.executable, "-c", DAEMON], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with daemon:
        assert daemon.stdout is not None
        its = Path(daemon.stdout.readline().decode().strip())
        TemporaryFolders().close()
        assert its.is_dir()
        daemon.kill()
        daemon.wait()
        TemporaryFolders().close()
        assert not its.exists()


def test_folders_of_others_are_not_removed(there: Path, tmp_path: Path) -> None:
    dirs = TemporaryFolders()
    left = Path(dirs.make()).parent
    mark, prefix = next(left.glob(".*")).name, f"penstock-{os.getuid()}-"

    home = tmp_path / "home"
    (home / "thesis").mkdir(parents=True, mode=0o700)
    home.chmod(0o700)
    (home / mark).touch()
    (there / f"{prefix}link").symlink_to(home)  # a stranger's link to what looks like ours
    (there / f"penstock-{os.getuid()}").symlink_to(home)
    for name, mode in (("unmarked", 0o700), ("open", 0o755)):
        folder = there / f"{prefix}{name}"
        (folder / "data").mkdir(parents=True)
        folder.chmod(mode)
    (there / f"{prefix}open" / mark).touch()
    linked = there / f"{prefix}linkedmark"
    (linked / "data").mkdir(parents=True)
    linked.chmod(0o700)
    (linked / mark).symlink_to(home / "thesis")
    (there / f"{prefix}file").touch()

    TemporaryFolders().close()
    assert (home / "thesis").is_dir()
    assert sorted(path.name.removeprefix(prefix) for path in there.iterdir() if path != left) == sorted(
        [f"penstock-{os.getuid()}", "file", "link", "linkedmark", "open", "unmarked"]
    )
    dirs.close()


def test_link_is_removed_but_not_its_target(there: Path, tmp_path: Path) -> None:
    (tmp_path / "data").touch()
    dirs = TemporaryFolders()
    left = Path(dirs.make()).parent
    (left / "link").symlink_to(tmp_path)
    (left / "1" / "link").symlink_to(tmp_path)
    dirs.close()
    assert not left.exists()
    assert (tmp_path / "data").exists()


def test_without_a_place_for_them_there_are_none(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(there / "gone"))
    dirs = TemporaryFolders()
    assert dirs.make() == ""
    dirs.remove("")
    dirs.close()
