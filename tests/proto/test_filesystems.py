"""Filesystems: which one holds a path."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.runtime.files.filesystems import filesystem


@pytest.mark.parametrize(
    ("path", "kind"), [("/home/me/state", "ext4"), ("/mnt/share/state", "nfs4"), ("/mnt/a b/state", "fuse.sshfs")]
)
def test_a_path_is_on_the_nearest_mount(path: str, kind: str) -> None:
    mounts = (
        "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
        "40 22 0:50 / /mnt rw - tmpfs none rw\n"
        "41 22 0:51 / /mnt/share rw master:2 - nfs4 server:/export rw\n"
        "42 22 0:52 / /mnt/a\\040b rw - fuse.sshfs me@there:/ rw\n"
    )
    assert filesystem(Path(path), mounts) == kind
