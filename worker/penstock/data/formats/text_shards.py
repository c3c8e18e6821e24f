"""Samples of shards in text form: a line of JSON, or a line of values with a separator, and a second file that says
where each begins.

Lines are cut by those offsets and not by looking for their ends, so that a value may hold what ends a line in another
dataset. Quotes mean nothing: mosaicml-streaming writes none, and refuses values that would need them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.data.formats.raw_files import SampleFile, read_checked
from penstock.data.formats.shards import Shard

__all__ = ["SEPARATORS", "TEXT_ENCODINGS", "JSONReader", "XSVReader"]

TEXT_ENCODINGS: dict[str, type[str | int | float]] = {"str": str, "int": int, "float": float}
"""Name -> type of the values, which is made of a text."""
SEPARATORS = {"csv": ",", "tsv": "\t"}
"""Of formats that do not say their own."""


class _TextReader(SampleFile):
    def __init__(self, shard: Shard, paths: tuple[Path, Path]) -> None:
        data, meta = shard.files
        table = read_checked(paths[1], meta.raw)
        super().__init__(paths[0], data.raw)
        try:
            self._set_offsets(table, shard.samples, 0)
        except BaseException:
            self.close()
            raise


class JSONReader(_TextReader):
    """JSON lines. See `penstock.data.formats.shards.ShardReader`."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        line = self._bytes_of(index)
        try:
            sample = json.loads(line.decode())
            if not isinstance(sample, dict):
                raise ValueError(f"a JSON object was expected, not {type(sample).__name__}")
        except Exception as error:
            self._undecodable(index, "", error)
        return sample


class XSVReader(_TextReader):
    """Separated values. See `penstock.data.formats.shards.ShardReader`."""

    def __init__(self, shard: Shard, paths: tuple[Path, Path]) -> None:
        super().__init__(shard, paths)
        settings = shard.settings
        self._newline: str = settings["newline"]
        self._separator: str = SEPARATORS[shard.format] if shard.format in SEPARATORS else settings["separator"]
        encodings = [TEXT_ENCODINGS[encoding] for encoding in settings["column_encodings"]]
        self._columns = list(zip(settings["column_names"], encodings, strict=True))

    def __getitem__(self, index: int) -> dict[str, Any]:
        line = self._bytes_of(index)
        column = ""
        sample: dict[str, Any] = {}
        try:
            text = line.decode()
            if not text.endswith(self._newline):
                raise ValueError(f"it does not end with {self._newline!r}")
            parts = text.removesuffix(self._newline).split(self._separator)
            if len(parts) != len(self._columns):
                raise ValueError(f"{len(parts)} values for {len(self._columns)} columns")
            for (column, decode), part in zip(self._columns, parts, strict=True):
                sample[column] = decode(part)
        except Exception as error:
            self._undecodable(index, column, error)
        return sample
