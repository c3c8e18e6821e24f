"""Files of lines, cut into ranges of bytes, so that one file can become as many pieces as there are shards. A range has
the lines that begin in it; the first is found by reading to the next newline, without an index."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.data.stop_iteration import forbid_stop_iteration
from penstock.proto.errors import DatasetError, InvalidArgumentError


class LineFile:
    """Text file with one record per line, such as JSON lines. A piece for LogicalShards, which cuts the file into
    ranges of bytes if there are fewer pieces than shards.

        LogicalShards([LineFile("a.jsonl"), LineFile("b.jsonl")], shards=240)

    The last line may lack its newline. Empty lines are left out. A compressed file cannot be cut: decompress it, or
    give LogicalShards a function that opens it.
    """

    def __init__(self, path: str | os.PathLike[str], parse: Callable[[bytes], Any] = json.loads) -> None:
        """
        Args:
            path: path of a local file.
            parse: function from a line, as bytes without its newline, to a record.

        Raises DatasetError for a file that cannot be read.
        """
        if not callable(parse):
            raise InvalidArgumentError(f"parse must be a function from a line to a record, got {parse!r}")
        self.path, self._parse = Path(path), parse
        try:
            self.size = self.path.stat().st_size
        except OSError as error:
            raise DatasetError(f"{self.path} cannot be read: {error.strerror}") from error

    def cut(self, parts: int) -> list[LineRange]:
        """Return ranges of about equal length that together contain the file's records. A range may have none."""
        bounds = [part * self.size // parts for part in range(parts + 1)]
        return [LineRange(self.path, self._parse, self.size, *each) for each in itertools.pairwise(bounds)]


def cut_files(pieces: Sequence[Any], shards: int) -> list[list[Any]]:
    """Return each piece, or its ranges: LineFiles are cut if there are fewer pieces than shards."""
    files = [piece for piece in pieces if isinstance(piece, LineFile)]
    more = max(0, shards - len(pieces)) if files else 0
    # Each file gets additional ranges in proportion to its size; the largest files get the remainder.
    total = sum(file.size for file in files)
    parts = {id(file): 1 + (more * file.size // total if total else 0) for file in files}
    left = more - sum(number - 1 for number in parts.values())
    for file in sorted(files, key=lambda file: -file.size)[:left]:
        parts[id(file)] += 1
    return [piece.cut(parts[id(piece)]) if isinstance(piece, LineFile) else [piece] for piece in pieces]


@dataclass(frozen=True)
class LineRange:
    """Lines of a file that begin in one range of bytes, from offset `begin` to `end`, exclusive."""

    path: Path
    parse: Callable[[bytes], Any]
    size: int
    """Size of the whole file in bytes, when it was cut."""
    begin: int
    end: int

    def __call__(self) -> _Lines:
        return _Lines(self)


class _Lines(Iterator[Any]):
    """Records of a range of lines. Its state is the offset of the next line in the file."""

    def __init__(self, of: LineRange) -> None:
        self._of = of
        try:
            self._file = of.path.open("rb")
            size = os.fstat(self._file.fileno()).st_size
        except OSError as error:
            raise DatasetError(f"{of.path} cannot be read: {error.strerror}") from error
        if size != of.size:
            self._file.close()
            raise DatasetError(f"{of.path} must keep its {of.size} bytes, got {size}. Write new lines to another file")
        self._at = 0
        if of.begin:  # a line begins here only if the byte before it is a newline
            self._file.seek(of.begin - 1)
            self._at = of.begin - 1 + len(self._file.readline())

    def __next__(self) -> Any:
        while self._at < self._of.end and (line := self._file.readline()):
            begin, self._at = self._at, self._at + len(line)
            line = line.rstrip(b"\r\n")
            if line:
                return self._record(line, begin)
        raise StopIteration

    def _record(self, line: bytes, begin: int) -> Any:
        try:
            with forbid_stop_iteration(f"the function that parses lines of {self._of.path}"):
                return self._of.parse(line)
        except Exception as error:
            error.add_note(f"raised for the line of {self._of.path} that begins at byte {begin}")
            raise

    def state_dict(self) -> int:
        return self._at

    def load_state_dict(self, state: int) -> None:
        if type(state) is not int or not 0 <= state <= self._of.size:
            raise DatasetError(
                f"{self._of.path}: the saved position must be from 0 to {self._of.size}, got {state!r:.100}"
            )
        self._file.seek(state)
        self._at = state

    def close(self) -> None:
        self._file.close()
