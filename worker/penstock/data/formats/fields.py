"""Checks of the fields of a shard's entry in the index, shared by all formats."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from penstock.data.formats.shards import Shard
from penstock.proto.errors import DatasetError


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


def check_meaning(settings: dict[str, Any]) -> None:
    """Check what the file's path says: `splits`, and `partitions`, which are columns."""
    splits, partitions = settings.get("splits", []), settings.get("partitions", {})
    if not isinstance(splits, list) or not all(isinstance(name, str) for name in splits):
        raise InvalidField("splits", f"must be a list of strings, got {splits!r:.100}")
    if not isinstance(partitions, dict) or not all(
        value is None or isinstance(value, str) or (type(value) is int and is_int32(value))
        for value in partitions.values()
    ):
        raise InvalidField("partitions", f"must be an object of strings and 32-bit integers, got {partitions!r:.100}")


def is_int32(value: int) -> bool:
    return -(1 << 31) <= value < 1 << 31


def check_text(settings: dict[str, Any], field: str) -> None:
    if not isinstance(settings.get(field), str) or not settings[field]:
        raise InvalidField(field, f"must be a string that is not empty, got {settings.get(field)!r:.100}")


def unknown_columns(where: str, chosen: Collection[str], known: Collection[str]) -> str:
    """Return the text of the error for columns that a user chose and that do not exist; "" if all exist."""
    missing = [name for name in chosen if name not in known]
    return f"{where}: columns must be some of {', '.join(known)}, got {', '.join(missing)}" if missing else ""


def check_unique(name: str, columns: Sequence[str]) -> None:
    if len(set(columns)) != len(columns):
        raise DatasetError(f"{name}: the names of columns must be unique, got {', '.join(columns)}")


def check_same_columns(shards: Sequence[Shard], *, in_order: bool = False) -> None:
    """Raise DatasetError if files of one dataset have other columns, because a batch has rows of any of them."""
    for shard in shards:
        first, others = shards[0].settings["column_names"], shard.settings["column_names"]
        if first != others if in_order else set(first) != set(others):
            raise DatasetError(
                f"all files of a dataset must have the same columns: {shards[0].name} has {', '.join(first)}, but "
                f"{shard.name} has {', '.join(others)}. Move files of other data into another folder"
            )
