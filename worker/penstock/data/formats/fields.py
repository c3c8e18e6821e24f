"""Checks of the fields of a shard's entry in the index, shared by all formats."""

from __future__ import annotations

from typing import Any

__all__ = ["InvalidField", "check_text", "column_encodings", "kind_of", "names"]


class InvalidField(Exception):
    """Error about one field, to which `index.invalid_index` adds the address, the shard's number and the remedy."""

    def __init__(self, field: str, why: str) -> None:
        super().__init__(f"{field} {why}")


def names(settings: dict[str, Any], field: str) -> list[str]:
    value = settings.get(field)
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise InvalidField(
            field, f"must be a list of strings, got {value!r:.100}" if field in settings else "is missing"
        )
    return value


def column_encodings(settings: dict[str, Any]) -> dict[str, str]:
    columns, encodings = names(settings, "column_names"), names(settings, "column_encodings")
    if len(set(columns)) != len(columns):
        raise InvalidField("column_names", f"must be unique, got {', '.join(columns)}")
    if len(columns) != len(encodings):
        raise InvalidField(
            "column_encodings", f"must have one entry for each of {len(columns)} columns, got {len(encodings)}"
        )
    return dict(zip(columns, encodings, strict=True))


def check_text(settings: dict[str, Any], field: str) -> None:
    if not isinstance(settings.get(field), str) or not settings[field]:
        raise InvalidField(field, f"must be a string that is not empty, got {settings.get(field)!r:.100}")


def kind_of(value: object) -> str:
    return "null" if value is None else type(value).__name__
