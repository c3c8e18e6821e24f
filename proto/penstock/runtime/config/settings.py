"""Base class of settings. A field of a `Section` declares an option once: its flag, environment variable, key in the
settings file, line in `penstock config` and row in docs/cli.md.

pydantic checks and converts values. Ours is strictness: the file keeps its types, and errors name a value's source."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Annotated, Any, ClassVar, get_args

from pydantic import AliasChoices, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from penstock.runtime.config.settings_file import SettingsFile, read_settings_file

IN_MEMORY = ":memory:"
"""Value of a setting for a path that means: use no file, keep everything in memory."""


@dataclass(frozen=True)
class Unit:
    """Unit or form of a setting's value, as help texts show it: SECONDS, HOST:PORT."""

    name: str


class IsPath:
    """Mark of a field whose value is a path. In the settings file it is relative to the folder of that file."""


FilePath = Annotated[str, IsPath(), Unit("FILE")]


class IsList:
    """Mark of a field whose value is a text with commas between its items. In the settings file it may be a TOML list,
    and the command-line flag may be repeated, with one item each time."""


class Section(BaseSettings):
    """Base class of settings, with the prefix of their variables (`env_prefix`) and their section of the file
    (`table`). Inherited fields keep those of their class, so that one class has all settings of a command."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", populate_by_name=True)
    table: ClassVar[str] = ""
    """Name of the section of the settings file; "" if these settings have none."""
    places: ClassVar[Mapping[str, tuple[str, str]]] = {}
    """Field -> (section, key) in the settings file, where they are not `table` and the field's name."""
    not_in_file: ClassVar[Mapping[str, str]] = {}
    """Field that must not be set in the settings file -> the reason, for the error message."""
    only_given: ClassVar[bool] = False
    """True if values come from arguments alone, not from variables or the settings file."""

    @classmethod
    def declaring(cls, field: str) -> type[Section]:
        return next(base for base in cls.__mro__ if field in inspect.get_annotations(base))

    @classmethod
    def names(cls) -> list[str]:
        return sorted(cls.model_fields, key=lambda field: cls.declaring(field) is not cls)

    @classmethod
    def place(cls, field: str) -> tuple[str, str] | None:
        """Return the section and the key of a field in the settings file; None if the field must not be set there."""
        table = cls.declaring(field).table
        if not table or field in cls.not_in_file:
            return None
        return cls.places.get(field, (table, field))

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *_: Any, **__: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (_ByField(settings_cls, init_settings),)


class _ByField(PydanticBaseSettingsSource):
    """Source of values: arguments before variables before the settings file, by fields' names. pydantic-settings names
    some arguments after a variable, differently in each release, and two names are an error."""

    def __init__(self, section: type[BaseSettings], arguments: PydanticBaseSettingsSource) -> None:
        super().__init__(section)
        self._arguments = arguments

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        raise NotImplementedError  # __call__ reads all fields at once

    def __call__(self) -> dict[str, Any]:
        section: Any = self.settings_cls
        values = {} if section.only_given else {field: value for field, (_, value) in stated(section).items()}
        return values | {field_of(section, (name,)): value for name, value in self._arguments().items()}


@dataclass(frozen=True, repr=False)
class OtherType:
    """Stand-in for a value in the settings file of another type than its setting, which pydantic would silently
    convert, as it must for variables. It makes pydantic raise an error with this message."""

    value: Any

    def __repr__(self) -> str:
        return repr(self.value)


def _fits(annotation: Any, value: Any) -> bool:
    """Return whether a TOML value has a setting's type; True for types but bool, int, float, str: pydantic checks."""
    kinds = set(get_args(annotation) or (annotation,)) - {NoneType}
    if kinds - {bool, int, float, str}:
        return True
    return type(value) in kinds or (type(value) is int and float in kinds)


def is_marked(info: FieldInfo, mark: type[IsPath] | type[IsList]) -> bool:
    return any(isinstance(fact, mark) for fact in info.metadata)


def _from_file(info: FieldInfo, value: Any, file: SettingsFile) -> Any:
    """Return a value of the file in the form of variables: a list as text with commas, paths absolute."""
    if isinstance(value, list) and is_marked(info, IsList):
        value = ",".join(map(str, value))
    if isinstance(value, str) and value != IN_MEMORY and is_marked(info, IsPath):
        value = file.resolved(value)
    return value if _fits(info.annotation, value) else OtherType(value)


def variables(section: type[Section], field: str) -> list[str]:
    """Return the names of a field's environment variables. If several of them are set, the first one is used."""
    alias = section.model_fields[field].validation_alias
    if isinstance(alias, AliasChoices):
        return [str(choice) for choice in alias.choices]
    return [f"{section.declaring(field).model_config.get('env_prefix', '')}{field}".upper()]


def variable(section: type[Section], field: str) -> str:
    return variables(section, field)[0]


def stated(section: type[Section]) -> dict[str, tuple[str, Any]]:
    """Return field -> (source, value) of what a variable (source: name) or the file (its path) sets. Empty: unset."""
    file = read_settings_file() if section.table else None
    there = {name.upper(): value for name, value in os.environ.items() if value}
    values: dict[str, tuple[str, Any]] = {}
    for field, info in section.model_fields.items():
        name = next((name for name in variables(section, field) if name in there), None)
        place = section.place(field)
        if name:
            values[field] = name, there[name]
        elif file is not None and place is not None:
            value = file.tables.get(place[0], {}).get(place[1], "")
            if value != "":
                values[field] = str(file.path), _from_file(info, value, file)
    return values


def source_of(section: type[Section], field: str) -> str:
    """Return where a field's value comes from if no argument: a variable, the file's path, "" for the default."""
    return stated(section).get(field, ("", None))[0]


@dataclass(frozen=True)
class ResolvedSetting:
    name: str
    value: Any
    source: str | None
    """Origin of the value: a variable's name, the file's path or "default"; None if a required setting has no value."""
    problem: str | None = None


def find(section: type[Section]) -> list[ResolvedSetting]:
    """Return the settings, except secrets; if one is invalid or missing, all as they were given, unconverted."""
    problems: dict[str, tuple[str, Any]] = {}
    values: dict[str, Any] = {}
    try:
        values = dict(section())
    except ValidationError as error:
        for detail in error.errors():
            problems[field_of(section, detail["loc"])] = (reason_of(detail), detail["input"])
    resolved, sources = [], stated(section)
    for name in section.names():
        info = section.model_fields[name]
        if info.annotation is SecretStr:
            continue
        source, raw = sources.get(name, ("", info.default))
        if name not in problems:
            resolved.append(ResolvedSetting(name, values.get(name, raw), source or "default"))
        elif source:
            resolved.append(ResolvedSetting(name, problems[name][1], source, problems[name][0]))
        else:
            resolved.append(ResolvedSetting(name, None, None))
    return resolved


def field_of(section: type[Section], place: tuple[Any, ...]) -> str:
    """Return the field that a pydantic error is about. `place`: its location, in some errors a variable's name."""
    name = str(place[0]) if place else "?"
    return next(
        (field for field in section.model_fields if name == field or name.upper() in variables(section, field)), name
    )


def reason_of(detail: Any) -> str:
    """Return pydantic's reason why a value is invalid, worded so that it can follow the value."""
    reason = str(detail["msg"]).removeprefix("Value error, ")
    return "it " + reason.removeprefix("Input ") if reason.startswith("Input ") else reason
