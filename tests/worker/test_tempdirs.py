"""The directory of a daemon's children, and what becomes of that of a daemon that was killed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.worker.processes.fork_servers import TemporaryFolder

DAEMON = """
import sys
from penstock.worker.processes.fork_servers import TemporaryFolder
folder = TemporaryFolder()
print(folder.path, flush=True)
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


def test_next_daemon_removes_those_of_killed_one(there: Path) -> None:
    daemon = subprocess.Popen([sys.executable, "-c", DAEMON], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with daemon:
        assert daemon.stdout is not None
        its = Path(daemon.stdout.readline().decode().strip())
        TemporaryFolder().close()
        assert its.is_dir()
        daemon.kill()
        daemon.wait()
        TemporaryFolder().close()
        assert not its.exists()


def test_folders_of_others_are_not_removed(there: Path, tmp_path: Path) -> None:
    folder = TemporaryFolder()
    left = Path(folder.path).parent
    mark, prefix = next(left.glob(".*")).name, f"penstock-{os.getuid()}-"

    home = tmp_path / "home"
    (home / "thesis").mkdir(parents=True, mode=0o700)
    home.chmod(0o700)
    (home / mark).touch()
    (there / f"{prefix}link").symlink_to(home)  # a stranger's link to what looks like ours
    (there / f"penstock-{os.getuid()}").symlink_to(home)
    for name, mode in (("unmarked", 0o700), ("open", 0o755)):
        other = there / f"{prefix}{name}"
        (other / "data").mkdir(parents=True)
        other.chmod(mode)
    (there / f"{prefix}open" / mark).touch()
    linked = there / f"{prefix}linkedmark"
    (linked / "data").mkdir(parents=True)
    linked.chmod(0o700)
    (linked / mark).symlink_to(home / "thesis")
    (there / f"{prefix}file").touch()

    TemporaryFolder().close()
    assert (home / "thesis").is_dir()
    assert sorted(path.name.removeprefix(prefix) for path in there.iterdir() if path != left) == sorted(
        [f"penstock-{os.getuid()}", "file", "link", "linkedmark", "open", "unmarked"]
    )
    folder.close()
