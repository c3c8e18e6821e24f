"""Folders of a fleet and of a coordinator: they say which processes are signalled, what is started, and the token, so
others must not be able to write to them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.deploy.console.command_token import coordinator_tokens
from penstock.deploy.console.exit_codes import CommandError
from penstock.deploy.engines.engine import Fleet
from penstock.deploy.engines.fleet_folder import FleetFolder
from penstock.proto.errors import JournalError
from penstock.runtime.process.identity import Identity

OTHER = 12_345


@pytest.fixture
def folder(tmp_path: Path) -> FleetFolder:
    """Folder of a fleet that is up, owned by this process."""
    made = FleetFolder(tmp_path / "fleet")
    made.make()
    lock = made.lock()
    assert lock is not None
    made.hold(lock, Identity.of(os.getpid()))
    os.close(lock)
    made.save(
        Fleet(
            engine="local",
            name="penstock",
            dir=str(made.path),
            coordinator="127.0.0.1:1",
            token_file=str(made.token),
        )
    )
    assert made.fleet() is not None
    assert made.holder() is not None
    return made


@pytest.mark.parametrize("why", ["must not be writable by other users", "must belong to this user"])
def test_a_folder_of_others_is_not_read(folder: FleetFolder, why: str) -> None:
    if why == "must not be writable by other users":
        folder.path.chmod(0o777)
    elif os.getuid() == 0:
        os.chown(folder.path, OTHER, OTHER)
    else:
        pytest.skip("only root can make another user's folder")
    for read in (folder.fleet, folder.holder):
        with pytest.raises(CommandError, match=why):
            read()


@pytest.fixture
def _no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PENSTOCK_TOKEN", "PENSTOCK_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PENSTOCK_CONFIG", os.devnull)


@pytest.mark.usefixtures("_no_token")
def test_no_token_is_put_where_others_write(tmp_path: Path) -> None:
    """Store no token: a user who then closes the folder, as the error asks, would use a token that others may have
    planted."""
    tmp_path.chmod(0o777)
    with pytest.raises(JournalError, match="must have mode 0700"):
        coordinator_tokens(None, tmp_path)
    assert not [*tmp_path.iterdir()]
    tmp_path.chmod(0o700)
    assert coordinator_tokens(None, tmp_path) == coordinator_tokens(None, tmp_path)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make another user's file")
@pytest.mark.usefixtures("_no_token")
def test_a_planted_token_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    planted = tmp_path / "token"
    planted.write_text("known-to-others\n")
    planted.chmod(0o600)
    os.chown(planted, OTHER, OTHER)
    with pytest.raises(JournalError, match="who could know the token"):
        coordinator_tokens(None, tmp_path)
