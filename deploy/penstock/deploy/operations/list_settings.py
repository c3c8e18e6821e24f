"""`penstock config`: every setting with its value and source, and an example settings file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from penstock.deploy.console.command_token import token_source
from penstock.deploy.console.exit_codes import USAGE
from penstock.deploy.console.settings import SETTINGS_OF, WorkerSettings, check_settings_file, refuse_unknown
from penstock.deploy.console.tables import Table, show
from penstock.runtime.config.settings import ResolvedSetting, Section, find, variable
from penstock.runtime.config.settings_file import CLUSTER, read_settings_file

TITLES = {
    "coordinator": "the coordinator",
    "worker": "the worker",
    "client": "the training job: Appliance(...)",
    "up": "penstock up",
}
TOKEN_FILE = "File that holds the token, or lines ROLE:TOKEN, readable by its owner alone. Never the token itself."


def show_config(of: str | None, as_json: bool) -> int:
    """Print the settings of the command `of`, or of all. Return 2 if a value is invalid."""
    check_settings_file()
    sections = {of: SETTINGS_OF[of]} if of else SETTINGS_OF
    for section in sections.values():
        refuse_unknown(section)
    file = read_settings_file()
    found = {name: find(section) for name, section in sections.items()}
    token = token_source()
    if as_json:
        about = {
            "file": str(file.path) if file else None,
            "token": token or None,
            "settings": {name: [_as_dict(each) for each in settings] for name, settings in found.items()},
        }
        print(json.dumps(about, indent=2, default=str))  # TOML has dates
    else:
        show(_tables(found))
        print()
        print(f"Settings file: {file.path if file else 'none'}")
        print(f"Token: {token or 'none; a coordinator makes one in its state directory'}")
    return USAGE if any(each.problem for settings in found.values() for each in settings) else 0


def _as_dict(found: ResolvedSetting) -> dict[str, Any]:
    return {
        "name": found.field,
        "value": found.value,
        "source": found.source or None,
        "problem": found.problem or None,
    }


def _tables(found: dict[str, list[ResolvedSetting]]) -> Iterator[Table]:
    for name, settings in found.items():
        table = Table(f"Settings of {TITLES[name]}", ("setting", "value", "from"))
        for each in settings:
            missing = not each.source
            value = "missing" if missing else "" if each.value is None else str(each.value)
            source = "required" if missing else f"{each.source}: {each.problem}" if each.problem else each.source
            table.rows.append((each.field, value, source))
        yield table


def example() -> Iterator[str]:
    """Yield an example settings file, in which every setting is a comment with its default."""
    yield "# Settings of Penstock. A flag wins over a variable, a variable over this file, this file over the default."
    yield "# Remove the # before a setting to use it. `penstock config` shows the effective values and their sources."
    yield ""
    yield "# Shared by coordinator, workers and training jobs. Paths are relative to this file. With a coordinator"
    yield "# here, Appliance() in a training job uses it; without one, it starts its own."
    yield f"[{CLUSTER}]"
    yield from _lines(WorkerSettings, CLUSTER)
    yield from _setting("token_file", '""', TOKEN_FILE, "PENSTOCK_TOKEN_FILE")
    for name, about in TITLES.items():
        yield ""
        yield f"# Settings of {about}."
        yield f"[{name}]"
        yield from _lines(SETTINGS_OF[name], name)


def _lines(section: type[Section], table: str) -> Iterator[str]:
    for name in section.names():
        if section.place(name) == (table, name):
            info = section.model_fields[name]
            default = None if info.is_required() else info.default
            yield from _setting(name, _toml(default), info.description or "", variable(section, name))


def _setting(name: str, value: str, description: str, variable: str) -> Iterator[str]:
    yield f"# {description} [{variable}]"
    yield f"#{name} = {value}"


def _toml(value: Any) -> str:
    # A JSON text, number or boolean is valid TOML too.
    return '""' if value is None else json.dumps(value, ensure_ascii=False, default=str)
