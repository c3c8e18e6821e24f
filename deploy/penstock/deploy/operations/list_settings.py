"""`penstock config`: every setting with its value and source."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict

from penstock.deploy.console.command_token import token_source
from penstock.deploy.console.exit_codes import USAGE
from penstock.deploy.console.settings import SETTINGS_OF, refuse_unknown
from penstock.deploy.console.tables import Table, show
from penstock.runtime.config.job_settings import check_file
from penstock.runtime.config.settings import ResolvedSetting, find
from penstock.runtime.config.settings_file import read_settings_file

TITLES = {
    "coordinator": "the coordinator",
    "worker": "the worker",
    "client": "the training job: Appliance(...)",
    "up": "penstock up",
}


def show_config(of: str | None, as_json: bool) -> int:
    """Print the settings of the command `of`, or of all. Return 2 if a value is invalid."""
    check_file(*SETTINGS_OF.values())
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
            "settings": {name: [asdict(each) for each in settings] for name, settings in found.items()},
        }
        print(json.dumps(about, indent=2, default=str))  # TOML has dates
    else:
        show(_tables(found))
        print()
        print(f"Settings file: {file.path if file else 'none'}")
        print(f"Token: {token or 'none; a coordinator makes one in its state directory'}")
    return USAGE if any(each.problem for settings in found.values() for each in settings) else 0


def _tables(found: dict[str, list[ResolvedSetting]]) -> Iterator[Table]:
    for name, settings in found.items():
        table = Table(f"Settings of {TITLES[name]}", ("setting", "value", "from"))
        for each in settings:
            if each.source is None:
                table.rows.append((each.name, "missing", "required"))
                continue
            value = "" if each.value is None else str(each.value)
            table.rows.append((each.name, value, f"{each.source}: {each.problem}" if each.problem else each.source))
        yield table
