"""Objects that may have a file's name in a folder that others can write to."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from penstock.runtime.files.plain_files import open_plain

WRITE = os.O_RDWR | os.O_CREAT


def test_a_file_is_opened_and_made(tmp_path: Path) -> None:
    handle = open_plain(tmp_path / "new", WRITE, 0o600)
    os.write(handle, b"text")
    assert os.get_blocking(handle)
    assert not os.get_inheritable(handle)
    os.close(handle)
    folder = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    handle = open_plain("new", folder=folder)
    assert os.read(handle, 10) == b"text"
    for one in (handle, folder):
        os.close(one)


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR])
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, flags: int) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "device").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "socket"))
    for name in ("fifo", "device", "socket"):
        with pytest.raises(OSError, match=r"the path must be a regular file|the path must not be a symbolic link"):
            open_plain(tmp_path / name, flags)
    with pytest.raises(OSError, match=r"the path must be a regular file|Is a directory"):
        open_plain(tmp_path, flags)


def test_a_link_is_read_and_never_written_through(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match=r"the path must not be a symbolic link \(to .*target\): remove the link"):
        open_plain(tmp_path / "link", WRITE)
    assert not (tmp_path / "target").exists()
    (tmp_path / "target").write_text("ours")
    os.close(open_plain(tmp_path / "link"))
    with pytest.raises(FileNotFoundError):
        open_plain(tmp_path / "absent")
