"""Files of lines. A plain one is cut into ranges of bytes, so that one file can become as many pieces as there are
shards: a range has the lines that begin in it; the first is found by reading to the next newline, without an index. A
compressed file, a CSV file and an array of JSON are one piece each."""

from __future__ import annotations

import csv
import io
import itertools
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.data.formats.compressed_files import SEQUENTIAL, FramesFile, check_named
from penstock.data.formats.records.csv_rows import allow_long_values
from penstock.data.stop_iteration import forbid_stop_iteration
from penstock.proto.errors import DatasetError, InvalidArgumentError, ShardCorruptError

BUFFER = 128 << 10
SAID_BYTES = 256 << 20
"""Bytes of content that are decompressed again by a resume from which it is said: about a second."""
_ARRAY, _LINES, _ROWS = "array", "lines", "rows"
_log = logging.getLogger(__name__)


class LineFile:
    """Text file with one record per line, such as JSON lines. A piece for LogicalShards, which cuts a plain file into
    ranges of bytes if there are fewer pieces than shards.

        LogicalShards([LineFile("a.jsonl"), LineFile("b.jsonl")], shards=240)
        LogicalShards([LineFile(path) for path in sorted(Path("/data").iterdir())], shards=64)

    The last line may lack its newline. Empty lines are left out. A compressed file (.gz, .zst) is decompressed while it
    is read, and not cut, so have at least as many files as shards. A position that was saved in it is found from the
    beginning of its frame: from the file's beginning, if the file is one frame.

    Without `parse`, .csv and .tsv have rows by the rules of Python's module csv, each a dict from the header's names to
    texts; a .json file may also be an array, which is read whole. Both are not cut.
    """

    def __init__(self, path: str | os.PathLike[str], parse: Callable[[bytes], Any] | None = None) -> None:
        """
        Args:
            path: path of a local file.
            parse: function from a line, as bytes without its newline, to a record; None: by the file's name, JSON if it
                does not say CSV.

        Raises DatasetError for a file that cannot be read.
        """
        if parse is not None and not callable(parse):
            raise InvalidArgumentError(f"parse must be a function from a line to a record, got {parse!r}")
        self.path = Path(path)
        packed = self.path.suffix.lower() in SEQUENTIAL
        name = self.path.with_suffix("") if packed else self.path
        if (packed and name.suffix.lower() == ".tar") or name.suffix.lower() == ".tgz":
            raise DatasetError(
                f"{self.path} must be a file of lines, got an archive. Decompress it, and call index_folder"
            )
        try:
            self.size = self.path.stat().st_size
            check_named(self.path)
            self._kind = _LINES if parse is not None else _kind_of(self.path, name.suffix.lower())
        except OSError as error:
            raise DatasetError(f"{self.path} cannot be read: {error.strerror}") from error
        self._parse = parse or json.loads
        self._separator = "\t" if name.suffix.lower() == ".tsv" else ","
        self.is_cut = not packed and self._kind == _LINES
        """True if the file can be cut."""

    def cut(self, parts: int) -> list[LineRange | WholeFile]:
        """Return ranges of about equal length that together contain the file's records. A range may have none."""
        if not self.is_cut:
            return [WholeFile(self.path, self._kind, self._parse, self._separator, self.size)]
        bounds = [part * self.size // parts for part in range(parts + 1)]
        return [LineRange(self.path, self._parse, self.size, *each) for each in itertools.pairwise(bounds)]


def _kind_of(path: Path, suffix: str) -> str:
    if suffix in (".csv", ".tsv"):
        return _ROWS
    if suffix != ".json":
        return _LINES
    with io.BufferedReader(FramesFile(path)) as file:
        begin = file.read(BUFFER).removeprefix(b"\xef\xbb\xbf").lstrip()
    return _ARRAY if begin.startswith(b"[") else _LINES


def cut_files(pieces: Sequence[Any], shards: int) -> list[list[Any]]:
    """Return each piece, or its ranges: LineFiles are cut if there are fewer pieces than shards."""
    files = [piece for piece in pieces if isinstance(piece, LineFile) and piece.is_cut]
    more = max(0, shards - len(pieces)) if files else 0
    # Each file gets additional ranges in proportion to its size; the largest files get the remainder.
    total = sum(file.size for file in files)
    parts = {id(file): 1 + (more * file.size // total if total else 0) for file in files}
    left = more - sum(number - 1 for number in parts.values())
    for file in sorted(files, key=lambda file: -file.size)[:left]:
        parts[id(file)] += 1
    return [piece.cut(parts.get(id(piece), 1)) if isinstance(piece, LineFile) else [piece] for piece in pieces]


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
                return _parsed(self._of, line, f"{self._of.path}, byte {begin}")
        raise StopIteration

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


@dataclass(frozen=True)
class WholeFile:
    """File that is not cut: compressed lines, rows of CSV, an array of JSON."""

    path: Path
    kind: str
    parse: Callable[[bytes], Any]
    separator: str
    size: int
    """Size of the file in bytes, when the source was made."""

    def __call__(self) -> Iterator[Any]:
        return _Array(self) if self.kind == _ARRAY else _Whole(self)


class _Array(Iterator[Any]):
    """Records of an array. Its state is the number of the next one."""

    def __init__(self, of: WholeFile) -> None:
        self._of, self._next = of, 0
        with _opened(of) as file:
            try:
                self._records = json.loads(io.BufferedReader(file).read().decode("utf-8-sig"))
            except (ValueError, RecursionError) as error:
                raise ShardCorruptError(f"{of.path} must be an array of JSON: {error}. Correct the file") from error

    def __next__(self) -> Any:
        if self._next == len(self._records):
            raise StopIteration
        self._next += 1
        return self._records[self._next - 1]

    def state_dict(self) -> int:
        return self._next

    def load_state_dict(self, state: int) -> None:
        if type(state) is not int or not 0 <= state <= len(self._records):
            raise DatasetError(
                f"{self._of.path}: the saved position must be from 0 to {len(self._records)}, got {state!r:.100}"
            )
        self._next = state

    def close(self) -> None:
        self._records = []
        self._next = 0


class _Whole(Iterator[Any]):
    """Records of a file that is read in sequence. Its state is the place of the next one: [offset of its frame in the
    file, bytes of the content from there]."""

    def __init__(self, of: WholeFile) -> None:
        self._of, self._at = of, 0
        self._raw = _opened(of)
        self._file = io.BufferedReader(self._raw, BUFFER)
        self._columns: list[str] = []
        self._begin()

    def _begin(self) -> None:
        """Read on from the present place."""
        if self._of.kind == _ROWS:
            allow_long_values()
            self._rows = csv.reader(self._texts(), delimiter=self._of.separator, strict=True)
            self._columns = self._columns or self._row()
            if len(set(self._columns)) != len(self._columns):
                raise ShardCorruptError(
                    f"{self._of.path}: the first line must have the columns' names, each once, got {self._columns}"
                )

    def _line(self) -> bytes:
        line = self._file.readline()
        self._at += len(line)
        return line

    def _texts(self) -> Iterator[str]:
        while line := self._line():
            yield line.decode("utf-8" if self._columns else "utf-8-sig")

    def _row(self) -> list[str]:
        try:
            return next(self._rows, [])
        except (csv.Error, UnicodeDecodeError) as error:
            raise ShardCorruptError(f"{self._place(self._at)}: a row must be CSV in UTF-8: {error}") from error

    def __next__(self) -> Any:
        record: Any = None
        while record is None:
            begin = self._at
            record = self._next_row(begin) if self._of.kind == _ROWS else self._next_line(begin)
            if self._at == begin:
                raise StopIteration
        return record[0]

    def _next_row(self, begin: int) -> tuple[dict[str, str]] | None:
        row = self._row()
        if row and len(row) != len(self._columns):
            raise ShardCorruptError(
                f"{self._place(begin)}: a row must have {len(self._columns)} values, got {len(row)}. Correct the file"
            )
        return (dict(zip(self._columns, row, strict=True)),) if row else None

    def _next_line(self, begin: int) -> tuple[Any] | None:
        line = self._line().rstrip(b"\r\n")
        line = line if begin else line.removeprefix(b"\xef\xbb\xbf")
        return (_parsed(self._of, line, self._place(begin)),) if line else None

    def _place(self, at: int) -> str:
        frame, inside = self._raw.place(at)
        return f"{self._of.path}, byte {inside}" + (f" of the frame at byte {frame}" if frame else "")

    def state_dict(self) -> list[int]:
        return self._raw.place(self._at)

    def load_state_dict(self, state: list[int]) -> None:
        if not isinstance(state, list) or len(state) != 2 or not all(type(each) is int and each >= 0 for each in state):
            raise DatasetError(f"{self._of.path}: the saved position must be two numbers, got {state!r:.100}")
        frame, inside = state
        self.close()
        self._raw = _opened(self._of, frame)
        self._file = io.BufferedReader(self._raw, BUFFER)
        if inside >= SAID_BYTES:
            _log.warning(
                "%s: %d bytes are decompressed again to go on in it, because its frames are so long. Files of short "
                "ones (written by pzstd or bgzip) go on at once",
                self._of.path,
                inside,
            )
        self._at = 0
        while self._at < inside and (piece := self._file.read(min(BUFFER, inside - self._at))):
            self._at += len(piece)
        if self._at < inside:
            raise DatasetError(f"{self._of.path}: the saved position must be in the file, got {state}")
        self._begin()

    def close(self) -> None:
        self._file.close()


def _opened(of: WholeFile, frame: int = 0) -> FramesFile:
    try:
        raw = FramesFile(of.path, frame)
        size = raw.size
    except OSError as error:
        raise DatasetError(f"{of.path} cannot be read: {error.strerror}") from error
    if size != of.size:
        raw.close()
        raise DatasetError(f"{of.path} must keep its {of.size} bytes, got {size}. Write new lines to another file")
    return raw


def _parsed(of: LineRange | WholeFile, line: bytes, where: str) -> Any:
    try:
        with forbid_stop_iteration(f"the function that parses lines of {of.path}"):
            return of.parse(line)
    except Exception as error:
        error.add_note(f"raised for the line that begins at {where}")
        raise
