"""Credential tokens of a coordinator: never an argument, which every user can read, and never printed or logged. A
coordinator that is given none writes one to a file and logs the file's name."""

from __future__ import annotations

import logging
import os
import secrets
from pathlib import Path

from penstock.proto.errors import InvalidArgumentError, JournalError
from penstock.proto.rpc.credentials.roles import ROLES
from penstock.runtime.config.settings_file import token_file_of_settings

_log = logging.getLogger("penstock.deploy")
FILE = "token"
"""Name of the token file in a coordinator's state directory."""


def token_source() -> str:
    """Return a text that names where the token comes from; "" if no variable or settings file has one."""
    if os.environ.get("PENSTOCK_TOKEN"):
        return "the variable PENSTOCK_TOKEN"
    if named := os.environ.get("PENSTOCK_TOKEN_FILE"):
        return f"the file {named} (PENSTOCK_TOKEN_FILE)"
    if named := token_file_of_settings():
        return f"the file {named} (token_file of the settings file)"
    return ""


def coordinator_tokens(file: str | os.PathLike[str] | None, state_dir: Path | None) -> str:
    """Return the tokens that a coordinator accepts (one, or lines `role:token`): those of `file`, else of the
    environment or the settings file, else a new one for all roles in `state_dir` (None: nothing on disk)."""
    from penstock.proto.rpc.credentials.tokens import (
        read_tokens,  # not before the command says that gRPC is to be quiet
    )

    if file is not None or token_source():
        return read_tokens(file)
    if state_dir is None:
        raise InvalidArgumentError(
            "a coordinator that keeps nothing on disk must be given a token. Set PENSTOCK_TOKEN, or pass --token-file"
        )
    path = state_dir / FILE
    _refuse_planted(path)
    made = make_token(path)
    _log.info(
        "the token is in %s%s; give workers and training jobs PENSTOCK_TOKEN_FILE=%s",
        path,
        " (made now)" if made else "",
        path.absolute(),
    )
    return read_tokens(path)


def _refuse_planted(path: Path) -> None:
    """Raise JournalError if another user owns the token file, or could have placed it."""
    from penstock.appliance.journal.journal import make_private

    try:
        make_private(path.parent)
        owner = path.lstat().st_uid
    except FileNotFoundError:
        return
    except OSError as error:
        raise JournalError(
            f"the state directory {path.parent} must be private to this user and readable: {error}. Choose another "
            "--state-dir"
        ) from error
    if owner != os.geteuid():
        raise JournalError(
            f"{path} must belong to the coordinator's user (id {os.geteuid()}), got user id {owner}, who could know "
            "the token. Remove the file; the next start makes a new token"
        )


def make_token(path: Path, *, by_role: bool = False) -> bool:
    """Write a new token, or one for each role, to a file that only this user can read; False if it exists."""
    if path.exists():
        return False
    beside = path.with_name(f"{FILE}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w") as out:
            for role in (f"{role}:" for role in sorted(ROLES)) if by_role else ("",):
                out.write(f"{role}{secrets.token_urlsafe(32)}\n")
            out.flush()
            os.fsync(out.fileno())
        try:
            os.link(beside, path)  # unlike rename, a link never replaces a file
        except FileExistsError:
            return False
        finally:
            beside.unlink()
    except OSError as error:
        raise JournalError(
            f"the token cannot be written to {path}: {error.strerror}. Let this user write there, or choose "
            "another folder"
        ) from error
    return True
