"""Writers of datasets whose shards are text files, which formats/text_shards.py reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Unpack

import numpy as np

from penstock.data.formats.text_shards import SEPARATORS, TEXT_ENCODINGS
from penstock.data.writing.writers import Out, Writer, WriterSettings
from penstock.proto.errors import DatasetError, InvalidArgumentError

REMEDY = "Correct the value, or write the dataset with JSONWriter, which stores any text"
"""Remedy for a value that a file of separated values (CSV, TSV) cannot hold."""


class _TextWriter(Writer):
    def __init__(
        self,
        out: Out,
        columns: Mapping[str, str],
        *,
        newline: str = "\n",
        **settings: Unpack[WriterSettings],
    ) -> None:
        for name, encoding in columns.items():
            if encoding not in TEXT_ENCODINGS:
                known = ", ".join(TEXT_ENCODINGS)
                raise InvalidArgumentError(
                    f"{out}: column {name!r}: the encoding must be one of {known}, got {encoding!r}"
                )
        if not newline:
            raise InvalidArgumentError(
                f"{out}: newline must not be empty. Give the text that ends a line, such as '\\n'"
            )
        self.newline = newline
        super().__init__(out, columns, **settings)
        self._header = b""

    def _checked(self, name: str, value: Any) -> Any:
        kind = TEXT_ENCODINGS[self.columns[name]]
        if not isinstance(value, kind) or isinstance(value, bool):  # a bool is an int, but its text is not a number
            raise TypeError(f"the value must be {self.columns[name]}, got {type(value).__name__}")
        return value

    def _files(self, offsets: np.ndarray[Any, Any], body: bytes) -> list[bytes]:
        config = json.dumps(self._config(), sort_keys=True).encode()
        begins = offsets + np.uint32(len(self._header))
        return [self._header + body, np.uint32(len(self._samples)).tobytes() + begins.tobytes() + config]


class JSONWriter(_TextWriter):
    """Writer of a dataset of JSON lines, one line for each sample. `columns`: name -> "str", "int" or "float"."""

    format = "json"

    def _settings(self) -> dict[str, Any]:
        return {"columns": self.columns, "newline": self.newline}

    def _encode_column(self, name: str, value: Any) -> Any:
        return self._checked(name, value)

    def _joined(self, values: dict[str, Any]) -> bytes:
        return (json.dumps(values, sort_keys=True) + self.newline).encode()


class XSVWriter(_TextWriter):
    """Writer of a dataset of separated values, one line for each sample. `columns`: name -> "str", "int" or "float".
    Values are not quoted, so `write` refuses a value that contains the separator or the newline."""

    format = "xsv"

    def __init__(
        self,
        out: Out,
        columns: Mapping[str, str],
        *,
        separator: str,
        newline: str = "\n",
        **settings: Unpack[WriterSettings],
    ) -> None:
        if not separator:
            raise InvalidArgumentError(f"{out}: separator must not be empty. Give a text such as ';'")
        self.separator = separator
        ordered = {name: columns[name] for name in sorted(columns)}
        for name in ordered:
            if separator in name or newline in name:
                raise InvalidArgumentError(
                    f"{out}: column {name!r}: the name must not contain the separator or the newline. Rename the column"
                )
        super().__init__(out, ordered, newline=newline, **settings)
        self._header = (separator.join(ordered) + newline).encode()
        self.remedy_of = lambda name: REMEDY
        self._most -= len(self._header)  # the size limit does not count the header

    def _settings(self) -> dict[str, Any]:
        settings = {
            "column_names": list(self.columns),
            "column_encodings": list(self.columns.values()),
            "newline": self.newline,
        }
        return settings if self.format in SEPARATORS else {**settings, "separator": self.separator}

    def _plain(self, text: str) -> str:
        for mark in (self.separator, self.newline):
            if mark in text:
                raise ValueError(f"the value must not contain {mark!r}, which ends a value, got {text!r}")
        return text

    def _encode_column(self, name: str, value: Any) -> bytes:
        return self._plain(str(self._checked(name, value))).encode()

    def _joined(self, values: dict[str, bytes]) -> bytes:
        line = self.separator.encode().join(values.values())
        # the end of a value and the separator together contain an earlier separator
        if line.split(self.separator.encode()) != list(values.values()):
            raise DatasetError(
                f"{self.name}: sample {self._written}: a value must not end with the separator's first characters, got "
                f"{line!r}. {REMEDY}"
            )
        return line + self.newline.encode()


class _NamedXSVWriter(XSVWriter):
    def __init__(
        self,
        out: Out,
        columns: Mapping[str, str],
        *,
        newline: str = "\n",
        **settings: Unpack[WriterSettings],
    ) -> None:
        super().__init__(out, columns, separator=SEPARATORS[self.format], newline=newline, **settings)


class CSVWriter(_NamedXSVWriter):
    """Writer of a dataset of comma-separated values: an XSVWriter with the separator ','."""

    format = "csv"


class TSVWriter(_NamedXSVWriter):
    """Writer of a dataset of tab-separated values: an XSVWriter with a tab as separator."""

    format = "tsv"
