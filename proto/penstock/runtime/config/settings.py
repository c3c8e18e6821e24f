"""Base class of settings: fields with a description, whose values come from arguments, environment variables or the
settings file.

The daemons and commands (penstock.deploy.console.daemon_settings) and the training job
(penstock.runtime.config.job_settings) share this class, so that one file and one environment serve all of them by the
same rules. pydantic-settings reads arguments and variables, and decides which value is used. This module reads the
settings file, checks the types of its values, and names the source of each value for errors, `penstock config` and a
daemon's log. An invalid setting does not hide the others. The command line of pydantic-settings is not used: Typer's
flags are made from these fields (penstock.deploy.console.options).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Annotated, Any, ClassVar, get_args

from pydantic import AliasChoices, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from penstock.runtime.config.settings_file import SettingsFile, read_settings_file

__all__ = [
    "IN_MEMORY",
    "FilePath",
    "IsList",
    "IsPath",
    "OtherType",
    "ResolvedSetting",
    "Section",
    "Unit",
    "field_of",
    "find",
    "from_file",
    "reason_of",
    "source_of",
    "stated",
    "variable",
    "variables",
]


IN_MEMORY = ":memory:"
"""Value of a setting for a path that means: use no file, keep everything in memory."""


@dataclass(frozen=True)
class Unit:
    """Unit or form of a setting's value, as help texts show it: SECONDS, HOST:PORT."""

    name: str


class IsPath:
    """Mark of a field whose value is a path. In the settings file such a path is relative to the folder of that
    file."""


FilePath = Annotated[str, IsPath(), Unit("FILE")]


class IsList:
    """Mark of a field whose value is a text with commas between its items. In the settings file it may be a TOML list,
    and the command-line flag may be repeated, with one item each time."""


class Section(BaseSettings):
    """Base class of a set of settings. Subclasses name the prefix of their environment variables (`env_prefix`) and
    their section of the settings file (`table`)."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", env_ignore_empty=True)
    table: ClassVar[str] = ""
    """Name of the section of the settings file; "" if these settings have none."""
    places: ClassVar[Mapping[str, tuple[str, str]]] = {}
    """Field -> (section, key) in the settings file, for each field that is in another section than `table` or has
    another key than its name."""
    not_in_file: ClassVar[Mapping[str, str]] = {}
    """Field that must not be set in the settings file -> the reason, for the error message."""
    only_given: ClassVar[bool] = False
    """True if values come from arguments alone, not from variables or the settings file."""

    @classmethod
    def place(cls, field: str) -> tuple[str, str] | None:
        """Return the section and the key of a field in the settings file; None if the field must not be set there."""
        if not cls.table or field in cls.not_in_file:
            return None
        return cls.places.get(field, (cls.table, field))

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return the sources of values in the order of their priority: arguments, then variables, then the settings
        file."""
        sources = (init_settings,) if cls.only_given else (init_settings, env_settings, _FromFile(cls))
        return tuple(_ByField(cls, source) for source in sources)


class _ByField(PydanticBaseSettingsSource):
    """Source of values for pydantic-settings: the values of another source, under the names of their fields. Each
    release decides anew which values it names after a variable instead, and a setting that two sources name differently
    is an error."""

    def __init__(self, section: type[Section], source: PydanticBaseSettingsSource) -> None:
        super().__init__(section)
        self._source = source
        self._fields = {name: field for field in section.model_fields for name in variables(section, field)}

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return self._source.get_field_value(field, field_name)

    def __call__(self) -> dict[str, Any]:
        return {self._fields.get(name, name): value for name, value in self._source().items()}


class _FromFile(InitSettingsSource):
    """Source of values for pydantic-settings: what the settings file says for a set of settings."""

    def __init__(self, section: type[Section]) -> None:
        file = read_settings_file() if section.table else None
        super().__init__(section, from_file(section, file) if file else {})


@dataclass(frozen=True, repr=False)
class OtherType:
    """Stand-in for a value in the settings file that has another type than its setting. pydantic would silently convert
    a text or a boolean to a number, as it must for variables, and cannot be strict for one source only. This object
    makes pydantic raise an error with its own message."""

    value: Any

    def __repr__(self) -> str:
        return repr(self.value)


def _fits(annotation: Any, value: Any) -> bool:
    """Return whether a TOML value has a setting's type, `annotation`. For types other than bool, int, float and str the
    answer is True: pydantic checks them."""
    kinds = set(get_args(annotation) or (annotation,)) - {NoneType}
    if kinds - {bool, int, float, str}:
        return True
    return type(value) in kinds or (type(value) is int and float in kinds)


def from_file(section: type[Section], file: SettingsFile) -> dict[str, Any]:
    """Return field -> value for the fields of `section` that the settings file sets. A list becomes one text with
    commas, as in variables; paths become absolute."""
    found: dict[str, Any] = {}
    for name, info in section.model_fields.items():
        place = section.place(name)
        if place is None or place[1] not in file.tables.get(place[0], {}):
            continue
        value = file.tables[place[0]][place[1]]
        if value == "":  # treated like an empty variable
            continue
        if isinstance(value, list) and any(isinstance(fact, IsList) for fact in info.metadata):
            value = ",".join(map(str, value))
        if isinstance(value, str) and value != IN_MEMORY and any(isinstance(fact, IsPath) for fact in info.metadata):
            value = file.resolved(value)
        found[name] = value if _fits(info.annotation, value) else OtherType(value)
    return found


def variables(section: type[Section], field: str) -> list[str]:
    """Return the names of a field's environment variables. If several of them are set, the first one is used."""
    alias = section.model_fields[field].validation_alias
    if isinstance(alias, AliasChoices):
        return [str(choice) for choice in alias.choices]
    return [f"{section.model_config.get('env_prefix', '')}{field}".upper()]


def variable(section: type[Section], field: str) -> str:
    """Return the name of a field's first environment variable."""
    return variables(section, field)[0]


def stated(section: type[Section]) -> dict[str, tuple[str, Any]]:
    """Return field -> (source, value), for the fields that an environment variable or the settings file sets. The
    source is the variable's name, or FILE:LINE."""
    file = read_settings_file() if section.table else None
    found: dict[str, tuple[str, Any]] = {}
    for field, value in (from_file(section, file) if file else {}).items():
        place = section.place(field)
        assert file is not None
        assert place is not None
        found[field] = file.where(*place), value
    there = {name.upper(): value for name, value in os.environ.items() if value}
    for field in section.model_fields:
        name = next((name for name in variables(section, field) if name in there), None)
        if name:
            found[field] = name, there[name]
    return found


def source_of(section: type[Section], field: str) -> str:
    """Return where the value of a field that was not given as an argument comes from: a variable's name, FILE:LINE, or
    "" for the default."""
    return stated(section).get(field, ("", None))[0]


@dataclass(frozen=True)
class ResolvedSetting:
    """Setting of this process, with its value and where the value comes from."""

    field: str
    value: Any
    source: str
    """Origin of the value: a variable's name, FILE:LINE or "default"; "" if a required setting has no value."""
    problem: str = ""
    """Reason why the value is invalid; "" if it is valid."""


def find(section: type[Section]) -> list[ResolvedSetting]:
    """Return all settings of a section with their values, except secrets. If a setting is invalid or missing, the
    others are returned nevertheless, but as they were given: texts of variables are not converted to other types."""
    problems: dict[str, tuple[str, Any]] = {}
    values: dict[str, Any] = {}
    try:
        values = dict(section())
    except ValidationError as error:
        for detail in error.errors():
            problems[field_of(section, detail["loc"])] = (reason_of(detail), detail["input"])
    found, sources = [], stated(section)
    for name, info in section.model_fields.items():
        if info.annotation is SecretStr:
            continue
        source, raw = sources.get(name, ("", info.default))
        if name not in problems:
            found.append(ResolvedSetting(name, values.get(name, raw), source or "default"))
        elif source:
            found.append(ResolvedSetting(name, problems[name][1], source, problems[name][0]))
        else:
            found.append(ResolvedSetting(name, None, ""))
    return found


def field_of(section: type[Section], place: tuple[Any, ...]) -> str:
    """Return the name of the field that an error of pydantic is about. `place`: the error's location, which in some
    errors is the name of a variable."""
    name = str(place[0]) if place else "?"
    for field in section.model_fields:
        if name == field or name.upper() in variables(section, field):
            return field
    return name


def reason_of(detail: Any) -> str:
    """Return pydantic's reason why a value is invalid, worded so that it can follow the value."""
    reason = str(detail["msg"]).removeprefix("Value error, ")
    return "it " + reason.removeprefix("Input ") if reason.startswith("Input ") else reason
