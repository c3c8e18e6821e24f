"""Settings file: one TOML file for coordinator, workers, training jobs and commands of a machine.

    [cluster]          settings that all share: the coordinator's address, the TLS files, the file of the token
    [coordinator]      settings of `penstock coordinator`
    [worker]           settings of `penstock worker`
    [client]           defaults of Appliance(...)
    [up]               settings of `penstock up` and `penstock down`

Its path is PENSTOCK_CONFIG (`--config`; /dev/null: no file), else ~/.config/penstock/config.toml, else
/etc/penstock/penstock.toml: the first that exists. It decides to which address the token is sent and which code may
run, so the working directory is not searched, and a file that other users own or can change is refused. It must not
hold secrets, because such files get copied, mounted and committed. Paths in it are relative to its folder.

pydantic-settings' own TomlConfigSettingsSource ignores a missing file, and opens any kind of file."""

from __future__ import annotations

import difflib
import os
import stat
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.proto.errors import InvalidArgumentError

VARIABLE = "PENSTOCK_CONFIG"
CLUSTER = "cluster"
TABLES = (CLUSTER, "coordinator", "worker", "client", "up")
MAX_FILE = 1 << 20
"""Largest size of a settings file in bytes. A larger file must have been named by mistake."""


@dataclass(frozen=True)
class SettingsFile:
    path: Path
    tables: Mapping[str, Mapping[str, Any]]

    def resolved(self, path: str) -> str:
        return os.path.join(self.path.absolute().parent, os.path.expanduser(path)) if path else path

    def check(self, table: str, known: Collection[str], foreign: Mapping[str, str]) -> None:
        """Raise InvalidArgumentError for a key that is not in `known`. `foreign`: key -> reason, for the message."""
        for key in self.tables.get(table, {}):
            if key in known:
                continue
            if key in foreign:
                raise InvalidArgumentError(f"{self.path}: {key} must not be in [{table}]: {foreign[key]}")
            raise InvalidArgumentError(f"{self.path}: [{table}] has no setting {key!r}{likely(key, known)}")


def likely(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]}?" if near else f" (there are {', '.join(sorted(known))})"


def read_settings_file() -> SettingsFile | None:
    """Return this process's settings file, or None. Raises InvalidArgumentError if it is missing, unreadable, invalid,
    or writable by other users."""
    named = os.environ.get(VARIABLE, "")
    if named:
        return None if named == os.devnull else _read(Path(named))
    for path in _usual():
        try:
            path.stat()
        except OSError:  # the file is missing, or in a folder that this user cannot read
            continue
        return _read(path)
    return None


def _usual() -> tuple[Path, ...]:
    own = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    system = Path("/etc/penstock/penstock.toml")
    return (Path(own, "penstock", "config.toml"), system) if os.path.isabs(own) else (system,)


def _read(path: Path) -> SettingsFile:
    import tomllib  # imported here: most processes have no settings file

    try:
        # Open a pipe without waiting for its writer, to refuse it below.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as opened:
            _refuse_others(path, os.fstat(opened.fileno()))
            raw = opened.read(MAX_FILE + 1)
    except OSError as error:
        raise InvalidArgumentError(
            f"the settings file {path} cannot be read: {error.strerror}. Name another in {VARIABLE} (--config), or "
            f"{os.devnull} for none"
        ) from error
    if len(raw) > MAX_FILE:
        raise InvalidArgumentError(f"the settings file {path} must have at most {MAX_FILE} bytes, got more")
    try:
        tables = tomllib.loads(raw.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise InvalidArgumentError(f"the settings file {path} must be TOML: {error}") from None
    return _checked(SettingsFile(path, tables))


def _refuse_others(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise InvalidArgumentError(f"the settings file {path} must be a regular file, or {os.devnull} for none")
    if found.st_uid not in (0, os.geteuid()):
        raise InvalidArgumentError(f"the settings file {path} belongs to another user: make a copy of your own")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise InvalidArgumentError(f"the settings file {path} can be changed by others: chmod go-w {path}")


def _checked(file: SettingsFile) -> SettingsFile:
    for name, value in file.tables.items():
        keys = value if isinstance(value, dict) else {}
        for key in (name, *keys):
            if key.lower() in ("token", "tokens", "penstock_token"):
                raise InvalidArgumentError(
                    f"{file.path}: this file must not hold a token: put it into a file of its own (chmod "
                    '600), and set token_file = "FILE" in [cluster]'
                )
        if name not in TABLES:
            what = f"a section [{name}]" if isinstance(value, dict) else f"{name!r} outside a section"
            raise InvalidArgumentError(f"{file.path}: the settings file must not have {what}{likely(name, TABLES)}")
        if not isinstance(value, dict):
            address = '. The coordinator\'s address is coordinator = "HOST:PORT" in [cluster]'
            remedy = address if name == "coordinator" else ""
            raise InvalidArgumentError(f"{file.path}: {name} must be a section, [{name}], got a value{remedy}")
    return file


def token_file_of_settings() -> str:
    """Return the path of the token file that the settings file names; "" if it names none."""
    file = read_settings_file()
    named = file.tables.get(CLUSTER, {}).get("token_file", "") if file else ""
    if not isinstance(named, str):
        assert file is not None
        raise InvalidArgumentError(f"{file.path}: token_file must be a path, got {named!r}")
    return file.resolved(named) if file and named else ""
