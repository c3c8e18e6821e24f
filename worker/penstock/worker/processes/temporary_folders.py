"""A temporary directory for each child process, for multiprocessing's sockets and files; removed when the child has
ended.

multiprocessing makes a directory below the system's temporary directory, and removes it only at a normal exit. Killed
children would leave thousands of them. A daemon therefore gives each child a directory in its own folder. If the daemon
is killed, the next daemon removes this folder (private_folders.py). Only multiprocessing's files lie there: Penstock
leaves the temporary files of user code alone.
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
                os.chmod(self._folder.path, 0o711)  # what is below it is for its owner alone
        except OSError as error:
            _log.warning("children have no directory of their own for multiprocessing: %s", error)

    def make(self) -> str:
        """Make a directory for a child and return its path. Return "" if it cannot be made; multiprocessing then makes
        its own."""
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
        """Remove the folder of all directories. Call it when all children are dead."""
        if self._folder is not None:
            self._folder.close()
