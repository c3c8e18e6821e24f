"""Readers of shards of text: lines of JSON or of separated values, found by a second file's offsets, so a value may
contain a newline. Quotes are ordinary: mosaicml-streaming writes none, and refuses values that need them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.data.formats.fields import InvalidField, check_text, column_encodings
from penstock.data.formats.raw_files import SampleFile, read_checked
from penstock.data.formats.shards import Shard

TEXT_ENCODINGS: dict[str, type[str | int | float]] = {"str": str, "int": int, "float": float}
"""Called with the text of a value, by the encoding's name."""
SEPARATORS = {"csv": ",", "tsv": "\t"}


def check_json(settings: dict[str, Any]) -> None:
    columns = settings.get("columns")
    if not isinstance(columns, dict) or not all(isinstance(encoding, str) for encoding in columns.values()):
        raise InvalidField(
            "columns",
            f"must be an object of strings, got {columns!r:.100}" if "columns" in settings else "is missing",
        )
    _check_encodings("columns", columns)


def check_separated(settings: dict[str, Any], *, any_separator: bool = False) -> None:
    """`any_separator`: True if the entry must name the separator. Raises InvalidField."""
    _check_encodings("column_encodings", column_encodings(settings))
    check_text(settings, "newline")
    if any_separator:
        check_text(settings, "separator")


def _check_encodings(field: str, columns: dict[str, str]) -> None:
    for name, encoding in columns.items():
        if encoding not in TEXT_ENCODINGS:
            known = ", ".join(TEXT_ENCODINGS)
            raise InvalidField(field, f"must be one of {known} for column {name!r}, got {encoding!r}")


class _TextReader(SampleFile):
    def __init__(self, shard: Shard, data: Path, table: Path) -> None:
        super().__init__(data, shard.files[0].raw)
        self._set_offsets(read_checked(table, shard.files[1].raw), shard.samples, 0)


class JSONReader(_TextReader):
    def _decoded(self, index: int, record: bytes) -> dict[str, Any]:
        try:
            sample = json.loads(record.decode())
            if not isinstance(sample, dict):
                raise ValueError(f"the line must be a JSON object, got {type(sample).__name__}")
        except Exception as error:
            self._undecodable(index, error)
        return sample


class XSVReader(_TextReader):
    def __init__(self, shard: Shard, data: Path, table: Path) -> None:
        super().__init__(shard, data, table)
        settings = shard.settings
        self._newline: str = settings["newline"]
        self._separator: str = SEPARATORS[shard.format] if shard.format in SEPARATORS else settings["separator"]
        encodings = [TEXT_ENCODINGS[encoding] for encoding in settings["column_encodings"]]
        self._columns = list(zip(settings["column_names"], encodings, strict=True))

    def _decoded(self, index: int, record: bytes) -> dict[str, Any]:
        column = ""
        sample: dict[str, Any] = {}
        try:
            text = record.decode()
            if not text.endswith(self._newline):
                raise ValueError(f"the line must end with {self._newline!r}")
            parts = text.removesuffix(self._newline).split(self._separator)
            if len(parts) != len(self._columns):
                raise ValueError(f"the line must have {len(self._columns)} values, got {len(parts)}")
            for (column, decode), part in zip(self._columns, parts, strict=True):
                sample[column] = decode(part)
        except Exception as error:
            self._undecodable(index, error, column)
        return sample
