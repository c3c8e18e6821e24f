"""Temporary directories, one for each child process, for multiprocessing's sockets and files; removed when the child
has ended.

multiprocessing makes a directory below the system's temporary directory, and removes it only at a normal exit, so
killed children would leave thousands of directories. A daemon therefore makes each child's directory in a folder of its
own. If the daemon is killed, the next daemon removes this folder (private_folders.py). Only multiprocessing's files are
there: Penstock does not touch the temporary files of user code.
"""

from __future__ import annotations

import logging
import os
import shutil

from penstock.runtime.files.private_folders import PrivateFolder
from penstock.worker.processes.runner_user import RunnerUser

__all__ = ["TemporaryFolders"]

_log = logging.getLogger("penstock.worker")


class TemporaryFolders:
    """Temporary directories of one daemon's children.

    user: owner of the directories; None: the daemon's own user.
    """

    def __init__(self, user: RunnerUser | None = None) -> None:
        self._folder: PrivateFolder | None = None
        self._user = user
        self._count = 0
        try:
            self._folder = PrivateFolder()
            if user is not None:
                os.chmod(self._folder.path, 0o711)  # the directories below are readable by their owner only
        except OSError as error:
            _log.warning(
                "a folder for the temporary files of multiprocessing could not be made, so killed runners leave such "
                "files in the system's temporary directory: %s",
                error,
            )

    def make(self) -> str:
        """Make a directory for a child and return its path. If that fails, return "", and multiprocessing makes a
        directory itself."""
        if self._folder is None:
            return ""
        self._count += 1
        path = self._folder.path / str(self._count)
        try:
            path.mkdir(mode=0o700)
            if self._user is not None:
                self._user.own(str(path))
        except OSError:
            return ""
        return str(path)

    def remove(self, path: str) -> None:
        """Remove the temporary directory of a dead child."""
        if path:
            shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """Remove all directories and their folder, once all children are dead."""
        if self._folder is not None:
            self._folder.close()
