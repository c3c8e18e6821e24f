"""The settings file: which one it is, who may have written it, and what may stand in it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.proto.errors import AuthenticationError, InvalidArgumentError
from penstock.proto.rpc.credentials.tokens import read_token
from penstock.runtime.config.job_settings import JobSettings, check_file
from penstock.runtime.config.settings_file import read_settings_file, token_file_of_settings


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A settings file, in PENSTOCK_CONFIG; the test writes it."""
    path = tmp_path / "penstock.toml"
    monkeypatch.setenv("PENSTOCK_CONFIG", str(path))
    return path


def test_named_then_user_then_machine_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_CONFIG")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "penstock.toml").write_text("[cluster]\n")
    found = read_settings_file()
    assert found is None or found.path == Path("/etc/penstock/penstock.toml")  # never the working directory's
    own = tmp_path / "penstock" / "config.toml"
    own.parent.mkdir()
    own.write_text("[client]\n")
    found = read_settings_file()
    assert found is not None
    assert found.path == own
    monkeypatch.setenv("PENSTOCK_CONFIG", str(tmp_path / "penstock.toml"))
    found = read_settings_file()
    assert found is not None
    assert found.path.parent == tmp_path
    monkeypatch.setenv("PENSTOCK_CONFIG", os.devnull)
    assert read_settings_file() is None


def test_one_that_is_named_must_be_there(written: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"penstock.toml cannot be read: No such file"):
        read_settings_file()


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_one_that_others_can_change_is_refused(written: Path, mode: int) -> None:
    written.write_text("[worker]\n")
    written.chmod(mode)
    with pytest.raises(InvalidArgumentError, match=rf"changed by others: chmod go-w {written}"):
        read_settings_file()
    written.chmod(0o644)
    assert read_settings_file() is not None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_one_of_another_user_is_refused(written: Path) -> None:
    written.write_text("[worker]\n")
    os.chown(written, 12345, -1)
    with pytest.raises(InvalidArgumentError, match="belongs to another user"):
        read_settings_file()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "[clutser]\n",
            r"penstock.toml: the settings file must not have a section \[clutser\]; did you mean cluster\?",
        ),
        ('[cluster]\n\ntoken = "s3cret"\n', r"penstock.toml: this file must not hold a token"),
        ("[client]\nreplai = true\n", r"penstock.toml: \[client\] has no setting 'replai'; did you mean replay\?"),
        ("[client]\nbox = 1\n", r"penstock.toml: box must not be in \[client\]: this setting is for one job"),
        ("[cluster\n", r"penstock.toml must be TOML: .*line 1"),
        ("[cluster]\ntoken_file = 7\n", r"penstock.toml: token_file must be a path"),
    ],
)
def test_unknown_setting_is_named(written: Path, text: str, says: str) -> None:
    written.write_text(text)

    def read() -> None:
        check_file(JobSettings)
        token_file_of_settings()

    with pytest.raises(InvalidArgumentError, match=says) as raised:
        read()
    assert "s3cret" not in str(raised.value)


def test_the_token_file_comes_last(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written.write_text('[cluster]\ntoken_file = "token"\n')
    token = written.parent / "token"
    token.write_text("from-the-file\n")
    with pytest.raises(AuthenticationError, match="can be read by others"):
        read_token("client")
    token.chmod(0o600)
    assert read_token("client") == "from-the-file"
    monkeypatch.setenv("PENSTOCK_TOKEN", "from-the-variable")
    assert read_token("client") == "from-the-variable"
