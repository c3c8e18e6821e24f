"""Sources of a command's settings: flags take precedence over PENSTOCK_* variables, those over the settings file, and
the file over defaults.

An unknown setting is an error in every source, because a setting that is silently ignored is worse than a daemon that
does not start. So a variable with a daemon's prefix and an unknown name is refused, except those that Kubernetes makes
from the name of a Service. Every unknown section and key of the file is refused too, also in sections that the command
does not read.
"""

from __future__ import annotations

import os
import re
from typing import Any, TypeVar

from pydantic import ValidationError

from penstock.proto.errors import InvalidArgumentError
from penstock.runtime.config.job_settings import CLUSTER_KEYS, check_file
from penstock.runtime.config.settings import Section, field_of, reason_of, stated, variable
from penstock.runtime.config.settings_file import CLUSTER, likely, read_settings_file

__all__ = [
    "check_settings_file",
    "describe",
    "flag",
    "has_own_section",
    "refuse_unknown",
    "resolve",
    "sections",
    "variable",
]

_KUBERNETES = re.compile(r".*_(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT(_\d+_(TCP|UDP|SCTP)(_.+)?)?)")
"""Pattern of the variables that Kubernetes puts into every pod for a Service with a name such as
penstock-coordinator."""

_Section = TypeVar("_Section", bound=Section)


def flag(field: str) -> str:
    """Return the command-line flag of a setting: "--state-dir" for "state_dir"."""
    return "--" + field.replace("_", "-")


def has_own_section(section: type[Section]) -> bool:
    """Return True if the settings belong to one kind of process (coordinator, worker or training job) or to `penstock
    up`. Then they have a section of their own in the settings file, and their variables a prefix of their own, such as
    PENSTOCK_WORKER_."""
    return section.table not in ("", CLUSTER)


def sections(table: str) -> list[type[Section]]:
    """Return the settings classes, among those imported so far, whose settings are in section `table` of the settings
    file."""
    return [section for section in Section.__subclasses__() if section.table == table]


def resolve(section: type[_Section], **flags: Any) -> _Section:
    """Return the settings of a command, from all sources. `flags`: values from the command line; None for those not
    given.

    Raises InvalidArgumentError, which names every invalid or missing setting and its source.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    if has_own_section(section):
        refuse_unknown(section)
    check_settings_file()
    try:
        return section(**given)
    except ValidationError as error:
        raise InvalidArgumentError(_explain(section, error, given)) from error


def check_settings_file() -> None:
    """Raise InvalidArgumentError if the settings file has an unknown section or key."""
    file = read_settings_file()
    if file is None:
        return
    check_file()
    for table in file.tables:
        for section in sections(table):
            if has_own_section(section) and section.table != "client":
                shared = dict.fromkeys(CLUSTER_KEYS, "it is shared by the whole cluster and belongs in [cluster]")
                known = [name for name in section.model_fields if section.place(name)]
                file.check(table, known, {**shared, **section.not_in_file})


def refuse_unknown(section: type[Section]) -> None:
    """Raise InvalidArgumentError if an environment variable has the prefix of these settings but is none of them."""
    prefix = str(section.model_config.get("env_prefix", ""))
    known = {variable(section, field) for field in section.model_fields}
    for name in sorted(os.environ):
        if not name.upper().startswith(prefix) or name.upper() in known or _KUBERNETES.fullmatch(name):
            continue
        raise InvalidArgumentError(f"the environment variable {name} is not a setting{likely(name.upper(), known)}")


def _explain(section: type[Section], error: ValidationError, given: dict[str, Any]) -> str:
    parts, sources = [], stated(section)
    for detail in error.errors():
        field = field_of(section, detail["loc"])
        if field not in section.model_fields:
            parts.append(f"{flag(field)} {detail['input']}: {detail['msg']}")
        elif detail["type"] == "missing":
            what = (section.model_fields[field].description or "").rstrip(".")
            parts.append(f"{flag(field)} (or the variable {variable(section, field)}) must be given: {what}")
        elif field in given:
            parts.append(f"{flag(field)} {detail['input']}: {reason_of(detail)}")
        else:
            source, _ = sources[field]
            # FILE:LINE does not name the setting, so it is added; the name of a variable does.
            what = f"{source}: {field} = {detail['input']!r}" if ":" in source else f"{source}={detail['input']}"
            parts.append(f"{what}: {reason_of(detail)}")
    return "; ".join(parts)


def describe(settings: Section, **flags: Any) -> str:
    """Return a text with every setting, its value and its source, for a daemon's log."""
    sources, parts = stated(type(settings)), []
    for field, value in settings:
        source = flag(field) if flags.get(field) is not None else sources.get(field, ("default",))[0]
        parts.append(f"{field}={value if value != '' else '-'} ({source})")
    return ", ".join(parts)
