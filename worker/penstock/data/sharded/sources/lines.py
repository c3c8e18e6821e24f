"""Files of lines, cut by ranges of bytes: one large file makes as many pieces as there are shards.

A range has the lines that begin in it. So the ranges of a file have each line once, wherever they are cut, and to find
the first line of one is to read on from there to the next end of a line: nothing has to be counted or indexed before.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.data.stop_iteration import no_end
from penstock.proto.errors import DatasetError, InvalidArgumentError

__all__ = ["LineFile", "LineRange", "cut_files"]


class LineFile:
    """The records of a file of lines, such as JSON lines: a piece for LogicalShards, which cuts it into ranges where
    there are fewer pieces than shards.

    Lines end with a newline; the last one may do without. Empty lines are left out. A compressed file cannot be cut:
    give a function that opens it, or unpack it.
    """

    def __init__(self, path: str | os.PathLike[str], parse: Callable[[bytes], Any] = json.loads) -> None:
        """
        Args:
            path: of a file of this machine.
            parse: what makes a record of a line, without its newline.

        Raises DatasetError for a file that cannot be read.
        """
        if not callable(parse):
            raise InvalidArgumentError(f"parse={parse!r}: it is a function that makes a record of a line")
        self.path, self._parse = Path(path), parse
        try:
            self.size = self.path.stat().st_size
        except OSError as error:
            raise DatasetError(f"{self.path} cannot be read: {error.strerror}") from error

    def cut(self, parts: int) -> list[LineRange]:
        """The same records in so many ranges of bytes of about one length; some may have none."""
        bounds = [part * self.size // parts for part in range(parts + 1)]
        return [LineRange(self.path, self._parse, self.size, *each) for each in itertools.pairwise(bounds)]


def cut_files(pieces: Sequence[Any], shards: int) -> list[list[Any]]:
    """Of each piece what it becomes: of a LineFile its ranges, as many of all as are needed for a piece for each shard,
    and about as long as each other; of anything else itself."""
    files = [piece for piece in pieces if isinstance(piece, LineFile)]
    more = max(0, shards - len(pieces)) if files else 0
    # As many more for each file as its size is of them all; what is left over goes to the largest ones.
    total = sum(file.size for file in files)
    parts = {id(file): 1 + (more * file.size // total if total else 0) for file in files}
    left = more - sum(number - 1 for number in parts.values())
    for file in sorted(files, key=lambda file: -file.size)[:left]:
        parts[id(file)] += 1
    return [piece.cut(parts[id(piece)]) if isinstance(piece, LineFile) else [piece] for piece in pieces]


@dataclass(frozen=True)
class LineRange:
    """The lines of a file that begin in a range of bytes."""

    path: Path
    parse: Callable[[bytes], Any]
    size: int
    """Of the file, when it was cut."""
    begin: int
    end: int

    def __call__(self) -> _Lines:
        """What LogicalShards reads: it opens a range when it is needed, and closes it."""
        return _Lines(self)


class _Lines(Iterator[Any]):
    """Read along; its state is a position in the file."""

    def __init__(self, of: LineRange) -> None:
        self._of = of
        try:
            self._file = of.path.open("rb")
            size = os.fstat(self._file.fileno()).st_size
        except OSError as error:
            raise DatasetError(f"{of.path} cannot be read: {error.strerror}") from error
        if size != of.size:
            self._file.close()
            raise DatasetError(f"{of.path} had {of.size} bytes when it was cut, and has {size}: it was changed")
        self._at = 0
        if of.begin:  # a line that begins here has the end of another one before it
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
            with no_end(f"the function that parses lines of {self._of.path}"):
                return self._of.parse(line)
        except Exception as error:
            error.add_note(f"raised for the line of {self._of.path} that begins at byte {begin}")
            raise

    def state_dict(self) -> int:
        return self._at

    def load_state_dict(self, state: int) -> None:
        if type(state) is not int or not 0 <= state <= self._of.size:
            raise DatasetError(f"{self._of.path}: no place in it: {state!r:.100}")
        self._file.seek(state)
        self._at = state

    def close(self) -> None:
        self._file.close()
