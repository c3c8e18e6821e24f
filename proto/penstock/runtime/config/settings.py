"""What a set of settings is: fields with a description, found in arguments, then variables, then the settings file.

Shared by the daemons and commands (penstock.deploy.console.daemon_settings) and the training job
(penstock.runtime.config.job_settings), so that one file and one environment serve all of them by the same rules.
pydantic checks values; which of several places a value came from is found out here, because an error, `penstock config`
and a daemon's log must all be able to say it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Annotated, Any, ClassVar, get_args

from pydantic import AliasChoices, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from penstock.runtime.config.settings_file import SettingsFile, read_settings_file

__all__ = [
    "IN_MEMORY",
    "FilePath",
    "IsList",
    "IsPath",
    "OtherType",
    "ResolvedSetting",
    "Section",
    "field_of",
    "find",
    "from_file",
    "reason_of",
    "source_of",
    "variable",
    "variables",
]


IN_MEMORY = ":memory:"
"""Stands where a path may, and is none."""


class IsPath:
    """Of a field: in the settings file it is relative to that file."""


FilePath = Annotated[str, IsPath()]


class IsList:
    """Of a field whose text is a list with commas: in the settings file it may be a list of TOML."""


class Section(BaseSettings):
    """A set of settings. Subclasses name their variables by `env_prefix`, and their section of the settings file."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", env_ignore_empty=True)
    table: ClassVar[str] = ""
    """The section of the settings file; "" = they are in none."""
    places: ClassVar[Mapping[str, tuple[str, str]]] = {}
    """Field -> section and key of the settings file, where that is another than its own."""
    not_in_file: ClassVar[Mapping[str, str]] = {}
    """Fields that do not go into the file, with the reason."""

    @classmethod
    def place(cls, field: str) -> tuple[str, str] | None:
        """Section and key of the settings file for a field; None if it cannot stand there."""
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
        """Arguments, then variables, then the settings file."""
        return init_settings, env_settings, _FromFile(cls)


class _FromFile(PydanticBaseSettingsSource):
    def __init__(self, section: type[Section]) -> None:
        super().__init__(section)
        self._section = section

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return None, field_name, False

    def __call__(self) -> dict[str, Any]:
        file = read_settings_file() if self._section.table else None
        if file is None:
            return {}
        # By the name that arguments and variables go by in pydantic-settings, so that theirs come before the file's.
        return {
            variables(self._section, name)[0] if self._section.model_fields[name].validation_alias else name: value
            for name, value in from_file(self._section, file).items()
        }


@dataclass(frozen=True, repr=False)
class OtherType:
    """A value of the settings file that is of another type than its setting: pydantic would make a number of a text or
    a truth value in silence, as it must for variables; this it refuses, with its own words."""

    value: Any

    def __repr__(self) -> str:
        return repr(self.value)


def _fits(annotation: Any, value: Any) -> bool:
    """Whether a value of TOML is of the type of a setting, as far as that is a plain one."""
    kinds = set(get_args(annotation) or (annotation,)) - {NoneType}
    if kinds - {bool, int, float, str}:
        return True
    return type(value) in kinds or (type(value) is int and float in kinds)


def from_file(section: type[Section], file: SettingsFile) -> dict[str, Any]:
    """What the file says of the fields of a section. Lists are one text, as in variables; paths are whole."""
    found: dict[str, Any] = {}
    for name, info in section.model_fields.items():
        place = section.place(name)
        if place is None or place[1] not in file.tables.get(place[0], {}):
            continue
        value = file.tables[place[0]][place[1]]
        if value == "":  # as an empty variable
            continue
        if isinstance(value, list) and any(isinstance(fact, IsList) for fact in info.metadata):
            value = ",".join(map(str, value))
        if isinstance(value, str) and value != IN_MEMORY and any(isinstance(fact, IsPath) for fact in info.metadata):
            value = file.resolved(value)
        found[name] = value if _fits(info.annotation, value) else OtherType(value)
    return found


def variables(section: type[Section], field: str) -> list[str]:
    """The environment variables of a field, the first that is set counts."""
    alias = section.model_fields[field].validation_alias
    if isinstance(alias, AliasChoices):
        return [str(choice) for choice in alias.choices]
    return [f"{section.model_config.get('env_prefix', '')}{field}".upper()]


def variable(section: type[Section], field: str) -> str:
    """The first of them."""
    return variables(section, field)[0]


def source_of(section: type[Section], field: str) -> str:
    """Where a field that was no argument came from: a variable, FILE:LINE, or ""; then it is the default."""
    there = {name.upper() for name, value in os.environ.items() if value}
    for name in variables(section, field):
        if name in there:
            return name
    file = read_settings_file() if section.table else None
    place = section.place(field)
    return file.where(*place) if file and place and field in from_file(section, file) else ""


@dataclass(frozen=True)
class ResolvedSetting:
    """A setting as it holds."""

    field: str
    value: Any
    source: str
    """A variable, FILE:LINE or "default"; "" = it is missing."""
    problem: str = ""
    """Why the value cannot be meant."""


def find(section: type[Section]) -> list[ResolvedSetting]:
    """Every setting but secrets, each by itself: one that is wrong or missing hides none of the others."""
    problems: dict[str, tuple[str, Any]] = {}
    values: dict[str, Any] = {}
    try:
        values = dict(section())
    except ValidationError as error:
        for detail in error.errors():
            problems[field_of(section, detail["loc"])] = (reason_of(detail), detail["input"])
    found = []
    for name, info in section.model_fields.items():
        if info.annotation is SecretStr:
            continue
        source = source_of(section, name)
        if name in problems:
            reason, value = problems[name]
            found.append(ResolvedSetting(name, value if source else None, source, reason if source else ""))
        elif values:
            found.append(ResolvedSetting(name, values[name], source or "default"))
        else:
            found.append(ResolvedSetting(name, _raw(section, name) if source else info.default, source or "default"))
    return found


def _raw(section: type[Section], field: str) -> Any:
    for name in variables(section, field):
        for given, value in os.environ.items():
            if given.upper() == name and value:
                return value
    file = read_settings_file()
    return from_file(section, file)[field] if file else None


def field_of(section: type[Section], place: tuple[Any, ...]) -> str:
    """The field that an error of pydantic is about; it knows some by their variables."""
    name = str(place[0]) if place else "?"
    for field in section.model_fields:
        if name == field or name.upper() in variables(section, field):
            return field
    return name


def reason_of(detail: Any) -> str:
    """What pydantic says is wrong with a value, to stand after it."""
    reason = str(detail["msg"]).removeprefix("Value error, ")
    return "it " + reason.removeprefix("Input ") if reason.startswith("Input ") else reason
