"""Files of keys, tokens and certificates: the one rule on who may read them."""

from __future__ import annotations

import os
import stat

from penstock.proto.errors import PenstockError


def read_secret(
    what: str, file: str | os.PathLike[str], most: int, error: type[PenstockError], *, secret: bool = True
) -> bytes:
    """Return a file of keys or tokens; or of certificates, which are not secret. Raises `error` if it cannot be read,
    if others can read a secret, or above `most` bytes. `what`: the file in messages."""
    try:
        # Open a named pipe without waiting for its writer. A pipe that the shell made, <(...), already has one.
        with open(file, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as opened:
            os.set_blocking(opened.fileno(), True)
            status = os.fstat(opened.fileno())
            data = opened.read(most + 1)
    except OSError as failed:
        raise error(f"{what} cannot be read: {failed.strerror}. Name a readable file") from None
    mode = stat.S_IMODE(status.st_mode)
    # A file of root may be readable by a group of this user: Kubernetes mounts a Secret into a pod with an fsGroup as
    # root's, with mode 0440.
    from_root = status.st_uid == 0 != os.geteuid()
    if secret and mode & (0o037 if from_root else 0o077):
        raise error(f"{what} can be read by others (mode {mode:04o}): chmod 600 {os.fspath(file)}")
    if len(data) > most:
        raise error(f"{what} must have at most {most} bytes, got more: name the right file")
    return data
