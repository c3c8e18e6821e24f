"""A directory for each child, and what becomes of those of a daemon that was killed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from penstock.worker.tempdirs import TempDirs

DAEMON = """
import sys
from penstock.worker.tempdirs import TempDirs
dirs = TempDirs()
print(dirs.make(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The system's temporary directory, in this process and below."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_each_child_has_its_own_and_all_go_at_the_end(there: Path) -> None:
    dirs = TempDirs()
    one, two = dirs.make(), dirs.make()
    assert one != two
    (Path(one) / "listener").touch()
    dirs.remove(one)
    assert not Path(one).exists()
    assert Path(two).stat().st_mode & 0o777 == 0o700
    dirs.close()
    assert list(there.iterdir()) == []


def test_those_of_a_killed_daemon_are_removed_by_the_next_and_those_of_a_live_one_are_not(there: Path) -> None:
    daemon = subprocess.Popen([sys.executable, "-c", DAEMON], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with daemon:
        assert daemon.stdout is not None
        its = Path(daemon.stdout.readline().decode().strip())
        TempDirs().close()
        assert its.is_dir()
        daemon.kill()
        daemon.wait()
        TempDirs().close()
        assert not its.exists()


def test_without_a_place_for_them_there_are_none(there: Path) -> None:
    (there / f"penstock-{os.getuid()}").touch()
    dirs = TempDirs()
    assert dirs.make() == ""
    dirs.remove("")
    dirs.close()
