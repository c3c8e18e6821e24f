"""Reading of an index.json of any size, entry by entry, in bounded memory. An entry is the JSON object that describes
one shard.

A whole index of a million shards takes 3 GiB as Python objects. Here the text is read in pieces, and the standard
library's JSON decoder parses one entry at a time.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from json.decoder import WHITESPACE  # type: ignore[attr-defined]
from typing import Any, NamedTuple, NoReturn

import xxhash

from penstock.data.formats.descriptors import Descriptor
from penstock.data.formats.fields import InvalidField, kind_of
from penstock.data.formats.index import check_version

__all__ = ["Entry", "IndexEntries"]

PIECE = 1 << 20
"""Number of bytes of the index that are read at a time."""
LONGEST_VALUE = 1 << 28
"""Largest number of characters of one value in the index, such as a shard's entry."""


class Entry(NamedTuple):
    """Entry of a shard in an index file: its offset there, its JSON text, and the parsed JSON value."""

    begin: int
    """Offset of the entry's first byte in the file, in bytes."""
    text: bytes
    value: Any


class IndexEntries:
    """Iterable over the entries of an open index file, in their order. It can be iterated only once. Iteration raises
    InvalidField if the file is not an index."""

    def __init__(self, file: Descriptor) -> None:
        self._file = file
        self._read = 0
        self._decode = codecs.getincrementaldecoder("utf-8")().decode
        self._decoder = json.JSONDecoder(parse_constant=_refuse)
        self._digest = xxhash.xxh3_128()
        self._text, self._at = "", 0
        self._offset = 0
        """Offset in the file, in bytes, of the next character to parse, which is at `_at` in `_text`."""
        self._ended = False

    @property
    def digest(self) -> str:
        """Digest of the bytes that were read so far; after the last entry, of the whole file."""
        return self._digest.hexdigest()

    def __iter__(self) -> Iterator[Entry]:
        try:
            yield from self._index()
        except (ValueError, RecursionError) as error:
            raise InvalidField("the index", f"must be JSON: {error}") from None

    def _index(self) -> Iterator[Entry]:
        if self._next() != "{":
            raise InvalidField("the index", "must be a JSON object")
        self._take("{")
        seen: set[str] = set()
        separator = "," if self._next() != "}" else "}"
        while separator == ",":
            key = self._value().value
            if not isinstance(key, str):
                raise ValueError("the name of a field must be text in quotes")
            self._take(":")
            if key in seen:
                raise InvalidField(key, "must be given once")
            seen.add(key)
            if key == "shards":
                yield from self._shards()
            else:
                value = self._value().value
                if key == "version":
                    check_version(value)
            separator = self._take(",}")
        if not seen:
            self._take("}")
        if self._next():
            raise ValueError(f"the file must end after the index, got more text at byte {self._offset}")
        for key in ("version", "shards"):
            if key not in seen:
                raise InvalidField(key, "is missing")

    def _shards(self) -> Iterator[Entry]:
        if self._next() != "[":
            raise InvalidField("shards", f"must be a list, got {kind_of(self._value().value)}")
        self._take("[")
        if self._next() == "]":
            self._take("]")
            return
        while True:
            yield self._value()
            if self._take(",]") == "]":
                return

    def _next(self) -> str:
        """Skip white space, and return the next character without taking it; "" at the end of the file."""
        while True:
            end = WHITESPACE.match(self._text, self._at).end()
            self._offset += end - self._at
            self._at = end
            if end < len(self._text):
                return self._text[end]
            if not self._more():
                return ""

    def _take(self, expected: str) -> str:
        found = self._next()
        if not found or found not in expected:
            raise ValueError(f"the character at byte {self._offset} must be one of {' '.join(expected)}, got {found!r}")
        self._at += 1
        self._offset += 1
        return found

    def _value(self) -> Entry:
        """Take the next JSON value from the text, and return it as an Entry.

        If the value does not end in the text that was read, read more and decode the value again. Each time twice as
        much is read, so that a long value is not decoded many times.
        """
        self._next()
        pieces = 1
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
                # A number at the end of the text may continue in the next piece.
                if end < len(self._text) or not self._more():
                    break
            except json.JSONDecodeError as error:
                if len(self._text) - self._at > LONGEST_VALUE:
                    raise ValueError(f"{error}, or a value has more than {LONGEST_VALUE} characters") from None
                if sum(self._more() for _ in range(pieces)) == 0:
                    raise
                pieces *= 2
        text = self._text[self._at : end].encode()
        found = Entry(self._offset, text, value)
        self._at, self._offset = end, self._offset + len(text)
        return found

    def _more(self) -> bool:
        """Read the next piece of the file. Return False at the end of the file."""
        if self._ended:
            return False
        piece = self._file.read(PIECE, self._read)
        self._digest.update(piece)
        self._read += len(piece)
        self._ended = not piece
        self._text, self._at = self._text[self._at :] + self._decode(piece, not piece), 0
        return bool(piece)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"a number must be finite in JSON, got {constant}")
