"""Documents of tokens: parsed from a source's samples, read with their positions, and cut into pieces."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from penstock.data.arguments import at_least_one, whole
from penstock.data.ordering.permutation import Ints
from penstock.data.sharded.layers.layer import Layer, SearchLimit, entered
from penstock.data.sharded.layers.packed_rows import Document, RowFields
from penstock.data.sharded.protocol import NOWHERE, Cursor, Origin, PositionOf, SavedPosition, ShardedSource
from penstock.data.sharded.runs import Run, RunCursor, take
from penstock.proto.errors import DatasetError, InvalidArgumentError

__all__ = ["Chunked", "DocumentParser", "Documents", "Read", "located", "token_of"]


MAX_TOKEN = (1 << 63) - 1
"""Largest token id, because lines and pieces are int64."""
READ_AHEAD = 256
"""Largest number of documents that are read in one call."""


class Chunked(Layer):
    """Layer that splits tokenized documents into pieces of at most `length` tokens. A piece is an int64 tensor of shape
    (tokens,). BOS is put before the first piece of each document, and EOS after the last. A document without tokens is
    left out.

        Packed(Chunked(documents, length=8192, eos=2), length=2048)
    """

    def __init__(
        self,
        source: ShardedSource,
        *,
        length: int,
        bos: int | None = None,
        eos: int | None = None,
        longest: int | None = None,
        strip_tokens: Iterable[int] = (),
        min_length: int | None = None,
    ) -> None:
        """
        Args:
            source: source whose samples are documents: tensors or arrays of integers with one dimension, or lists of
                integers.
            length: largest number of tokens in a piece, including BOS and EOS; the last piece of a document has the
                rest.
            bos: token before each document; None: none.
            eos: token after each document; None: none.
            longest: largest number of tokens in a document, without BOS and EOS; a longer document raises DatasetError.
            strip_tokens: token ids that are removed from both ends of each document first, such as separators that the
                data already have.
            min_length: smallest number of tokens in a document, without BOS and EOS, after `strip_tokens`; a shorter
                document is left out.
        """
        super().__init__(source)
        self._length = at_least_one("length", length)
        self._bos, self._eos = token_of("bos", bos), token_of("eos", eos)
        self._longest = None if longest is None else at_least_one("longest", longest)
        self._strip = _tokens_of("strip_tokens", strip_tokens)
        self._least = 1 if min_length is None else at_least_one("min_length", min_length)

    def settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = {
            "length": self._length,
            "bos": self._bos,
            "eos": self._eos,
            "longest": self._longest,
        }
        if self._strip:
            settings["strip_tokens"] = sorted(self._strip)
        if self._least > 1:
            settings["min_length"] = self._least
        return settings

    def open(
        self,
        shard: int,
        epoch: int,
        seed: int,
        saved: SavedPosition | None = None,
        position_of: PositionOf | None = None,
    ) -> Cursor:
        (index, piece), inner = entered(saved, "Chunked", "index", "piece")
        cursor = self.source.open(shard, epoch, seed, inner)
        parser = DocumentParser("Chunked", shard, epoch, strip=self._strip)
        documents = Documents(self, cursor, shard, index, parser, least=self._least)
        return _ChunkedCursor(documents, self._length, self._bos, self._eos, self._longest, piece)


class DocumentParser:
    """Parser of a source's samples into documents, for one shard of an epoch."""

    def __init__(
        self,
        name: str,
        shard: int,
        epoch: int,
        *,
        fields: RowFields | None = None,
        strip: frozenset[int] = frozenset(),
        longest: tuple[int, bool] | None = None,
    ) -> None:
        """
        Args:
            name: name of the layer, for errors.
            fields: columns that samples must have; None: samples are tokens alone.
            strip: token ids to remove from both ends of each document.
            longest: largest number of tokens, and True if a longer document is truncated, False if it is an error;
                None: no limit.
        """
        self._name, self._shard, self._epoch = name, shard, epoch
        self._fields, self._strip, self._longest = fields, strip, longest
        self._columns = (*fields.columns, *fields.attached) if fields is not None else ()
        self._narrow = fields is not None and fields.dtype == "int32"
        self.bare = not (self._columns or strip or longest or self._narrow)

    def where(self, index: int) -> str:
        """Return the name of a document, for errors."""
        return f"{self._name}: document {index} of shard {self._shard} in epoch {self._epoch}"

    def document(self, sample: Any, index: int, continues: bool = False) -> Document:
        """Return the document of a sample. Raises DatasetError for one that is not a document."""
        if self.bare and (tokens := _usual(sample)) is not None:
            return Document(tokens, continues=continues)
        fields = self._fields
        if fields is None or fields.plain or not (self._columns or isinstance(sample, Mapping)):
            return Document(self._cut(self._stripped(self._array(sample, index)), index), continues=continues)
        missing = [name for name in (fields.tokens, *self._columns) if name not in self._names(sample)]
        if missing:
            raise DatasetError(
                f"{self.where(index)} must be a dict with the fields {sorted({fields.tokens, *self._columns})}, got "
                f"{self._names(sample) or type(sample).__name__}. Use Mapped to make it, or name other columns"
            )
        full = self._array(sample[fields.tokens], index)
        tokens = self._cut(full, index)
        columns = {name: self._column(sample[name], index, name, len(full))[: len(tokens)] for name in fields.columns}
        attached = {name: self._column(sample[name], index, name) for name in fields.attached}
        return Document(tokens, columns, attached, continues, self.where(index))

    def _names(self, sample: Any) -> list[str]:
        return sorted(map(str, sample)) if isinstance(sample, Mapping) else []

    def _cut(self, tokens: Ints, index: int) -> Ints:
        """Return a document's tokens, without its end if it is too long and is to be truncated."""
        if self._longest is None or len(tokens) <= self._longest[0]:
            return tokens
        most, truncate = self._longest
        if truncate:
            return tokens[:most]
        raise DatasetError(
            f"{self.where(index)} must have at most length={most} tokens, got {len(tokens)}. Make the lines longer, "
            "leave such documents out by Filtered, or give long='truncate' or long='split'"
        )

    def _column(self, values: Any, index: int, name: str, size: int | None = None) -> npt.NDArray[Any]:
        """Return a column of a document. `size`: number of values that it must have; None: any."""
        try:
            column = values.numpy(force=True) if isinstance(values, torch.Tensor) else np.asarray(values)
            if column.ndim and column.dtype.kind in "biufc":
                if size is None or len(column) == size:
                    return column
                raise DatasetError(
                    f"{self.where(index)}: {name!r} must have one value for each of the {size} tokens, got "
                    f"{len(column)}. Correct the field by a Mapped"
                )
            kind = f"{column.dtype} of shape {column.shape}"
        except (ValueError, TypeError):  # a list of lists of different lengths; a dtype that numpy does not have
            kind = str(getattr(values, "dtype", type(values).__name__))
        raise DatasetError(
            f"{self.where(index)}: {name!r} must be a tensor, an array or a list of numbers with at least one "
            f"dimension, got {kind}. Use Mapped to convert it; give arrays of different shapes one shape first, such "
            "as images as rows of patches"
        )

    def _stripped(self, document: Ints) -> Ints:
        if not self._strip:
            return document
        begin, end = 0, len(document)
        while begin < end and int(document[begin]) in self._strip:
            begin += 1
        while begin < end and int(document[end - 1]) in self._strip:
            end -= 1
        return document[begin:end]

    def _array(self, sample: Any, index: int) -> Ints:
        kind = type(sample).__name__
        if isinstance(sample, torch.Tensor):
            sample = sample.numpy(force=True)
        if isinstance(sample, (np.ndarray, list, tuple)):
            try:
                array = np.asarray(sample)
            except ValueError:  # the list contains lists of different lengths
                array = np.asarray(sample, object)
            if array.shape == (0,):  # an empty list has no dtype
                return np.zeros(0, np.int64)
            if array.ndim == 1 and array.dtype.kind in "iu":
                return self._checked(array, index)
            kind = f"{array.dtype} of shape {array.shape}"
        raise DatasetError(
            f"{self.where(index)} must be a tensor, an array or a list of integers with one dimension, got {kind}. Use "
            "Mapped to make its tokens"
        )

    def _checked(self, array: npt.NDArray[Any], index: int) -> Ints:
        """Return tokens that fit the dtype of the lines. Narrower tokens are widened where they are written."""
        if array.dtype == np.uint64:
            if array.max() > MAX_TOKEN:
                raise DatasetError(f"{self.where(index)}: tokens must fit int64, got {array.max()}. Use smaller ids")
            array = array.astype(np.int64)
        if self._narrow and not np.can_cast(array.dtype, np.int32):
            least, most = int(array.min()), int(array.max())
            if least < -(1 << 31) or most >= 1 << 31:
                raise DatasetError(
                    f"{self.where(index)}: tokens must fit dtype='int32', got {most if most >= 1 << 31 else least}. "
                    "Use dtype='int64'"
                )
        return array


class _Taken(NamedTuple):
    """Run of samples of which documents are made."""

    first: int
    """Number of its first sample in the shard."""
    before: SavedPosition
    """Saved position of the source before it."""
    position: Callable[[int], SavedPosition]

    def at(self, number: int) -> tuple[int, SavedPosition]:
        """Return the number in the shard of a sample of the run, and the source's saved position before it."""
        return self.first + number, self.position(number) if number else self.before


class Read(NamedTuple):
    """Document that was read, and the position from which it is read again."""

    document: Document
    at: int
    """Number of the document in its shard."""
    taken: _Taken
    number: int
    """Number in `taken` of the first sample to read again: the document, or the first of the documents that were left
    out just before it, because they are counted again."""

    @property
    def position(self) -> tuple[int, SavedPosition]:
        """Number in the shard of the first sample to read again, and the source's saved position before it."""
        return self.taken.at(self.number)


class Documents:
    """Reader of a shard's documents, with the source's saved positions from which they can be read again.

    Documents are read in runs, also a few more than are needed at once. An error in one of them is raised when it is
    needed.
    """

    def __init__(
        self, layer: Layer, inner: Cursor, shard: int, index: int, parser: DocumentParser, *, least: int = 1
    ) -> None:
        """
        Args:
            index: number of the first document in its shard.
            least: smallest number of tokens; documents with fewer are left out.
        """
        self._inner, self._parser, self._least = inner, parser, least
        self._limit = SearchLimit(layer.source, type(layer).__name__, shard)
        self._next = index
        """Number in the shard of the source's next document."""
        self._taken: _Taken | None = None
        self._size = 0
        """Number of samples in `_taken`."""
        self._ready: list[Read] = []
        """Documents that were read, and not passed."""
        self._left_out: dict[str, int] = {}
        """Number of documents that were left out after the last one in `_ready`, by source."""
        self._left_from: tuple[_Taken, int] | None = None
        """Run and number of the first of these documents."""
        self._error: Exception | None = None
        """Error in the document after those in `_ready`."""

    def ready(self, count: int) -> list[Read]:
        """Return the next documents that have enough tokens, without passing them: at least one, unless none is left.
        At most `count` are read ahead."""
        if not self._ready:
            self._read(count)
        return self._ready

    def passed(self, count: int) -> None:
        """Pass the first `count` documents of those that are ready."""
        del self._ready[:count]

    def following(self) -> tuple[int, SavedPosition]:
        """Return the position from which the next document is read: its number in the shard, and the source's saved
        position before it."""
        if self._ready:
            return self._ready[0].position
        if self._left_from is not None:
            taken, number = self._left_from
            return taken.at(number)
        if self._taken is not None and self._next < self._taken.first + self._size:  # an error, not raised yet
            return self._taken.at(self._next - self._taken.first)
        return self._next, self._inner.saved_position()

    def expect(self, what: str, there: int, at: int) -> None:
        """Raise DatasetError unless the next document has an item with index `at`. `there`: number of its items;
        `what`: word for the items in the error ("pieces" or "tokens")."""
        if at >= there:
            raise DatasetError(
                f"{self.where(self._ready[0])} must have more than the {at} {what} that the saved run read of it, got "
                f"{there}. Use the data of that run"
            )

    def where(self, read: Read) -> str:
        """Return the name of a document, for errors."""
        return self._parser.where(read.at)

    def close(self) -> None:
        self._inner.close()

    def _read(self, count: int) -> None:
        """Read documents until some have enough tokens, or none is left."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        while not self._ready:
            before = self._inner.saved_position()
            run = take(self._inner, min(count, READ_AHEAD))
            if not run.size:
                break
            self._taken, self._size = _Taken(self._next, before, run.position), run.size
            try:
                self._parse(run, self._taken)
            except Exception as error:
                if not self._ready:
                    raise
                self._error = error

    def _parse(self, run: Run, taken: _Taken) -> None:
        """Add the documents of a run."""
        bare = run.arrays if self._parser.bare else None
        document, continues = self._parser.document, run.continues
        for number, sample in enumerate(run.samples if bare is None else bare):
            index = taken.first + number
            if bare is None:
                found = document(sample, index, continues)
            else:
                found = Document(sample, continues=continues)
            continues, origin = run.parts, run.origins[number] if run.origins else NOWHERE
            if len(found.tokens) >= self._least:
                self._add(located(found, origin, self._left_out), index, taken, number)
            else:
                self._left_from = self._left_from or (taken, number)
                self._next = index + 1
                self._limit.nothing()
                self._left_out = origin.leaving_out(self._left_out)

    def _add(self, document: Document, index: int, taken: _Taken, number: int) -> None:
        if self._left_from is not None:
            taken, number = self._left_from
            self._left_from, self._left_out = None, {}
        self._ready.append(Read(document, index, taken, number))
        self._next = index + 1
        self._limit.found()


class _ChunkedCursor(RunCursor):
    def __init__(
        self, documents: Documents, length: int, bos: int | None, eos: int | None, longest: int | None, piece: int
    ) -> None:
        self._documents, self._length, self._longest = documents, length, longest
        self._begin = np.array([] if bos is None else [bos], np.int64)
        self._end = np.array([] if eos is None else [eos], np.int64)
        self._more = len(self._begin) + len(self._end)
        self._piece = piece
        """Number of the next piece in its document."""
        self._long: Ints | None = None
        """Document of several pieces that is being cut, with BOS and EOS."""

    traced = True

    def take(self, count: int) -> Run:
        ready = self._documents.ready(count)
        if not ready:
            return Run()
        if self._pieces(ready[0]) > 1 or self._piece:
            return self._take_pieces(ready[0], count)
        own = list(itertools.takewhile(self._is_short, ready[:count]))
        arrays = [self._separated(read) for read in own]
        self._documents.passed(len(own))

        def position(number: int) -> SavedPosition:
            index, before = own[number].position
            return {"index": index, "piece": 0, "source": before}

        origins = [read.document.origin for read in own]
        return _run_of(arrays, position, origins)

    def _take_pieces(self, read: Read, count: int) -> Run:
        """Return pieces of a document that has several."""
        pieces, first, length = self._pieces(read), self._piece, self._length
        if self._long is None:
            self._documents.expect("pieces", pieces, first)
            self._long = self._separated(read)
        until = min(pieces, first + count)
        arrays = [self._long[piece * length : (piece + 1) * length] for piece in range(first, until)]
        self._advance(until - first, pieces)

        def position(number: int) -> SavedPosition:
            index, before = read.position
            return {"index": index, "piece": first + number, "source": before}

        origin = read.document.origin
        later = origin._replace(skipped={}) if origin.skipped else origin
        origins = [later if first else origin, *([later] * (len(arrays) - 1))]
        return _run_of(arrays, position, origins)._replace(continues=first > 0, parts=True)

    def skip(self, count: int) -> int:
        left = count
        while left and (ready := self._documents.ready(left)):
            pieces = self._pieces(ready[0])
            self._documents.expect("pieces", pieces, self._piece)
            passed = min(left, pieces - self._piece)
            self._advance(passed, pieces)
            left -= passed
        return count - left

    def saved_position(self) -> SavedPosition:
        index, before = self._documents.following()
        return {"index": index, "piece": self._piece, "source": before}

    def close(self) -> None:
        self._documents.close()

    def _is_short(self, read: Read) -> bool:
        """Return True for a document of one piece."""
        return len(read.document.tokens) + self._more <= self._length and (
            self._longest is None or len(read.document.tokens) <= self._longest
        )

    def _pieces(self, read: Read) -> int:
        """Return the number of pieces of a document."""
        size = len(read.document.tokens)
        if self._longest is not None and size > self._longest:
            raise DatasetError(
                f"{self._documents.where(read)} must have at most longest={self._longest} tokens, got {size}. "
                "Allow more, or leave such documents out by Filtered"
            )
        return -(-(size + self._more) // self._length)

    def _separated(self, read: Read) -> Ints:
        """Return a writable copy of a document, with BOS and EOS."""
        return np.concatenate((self._begin, read.document.tokens, self._end), dtype=np.int64)

    def _advance(self, count: int, pieces: int) -> None:
        """Advance by `count` pieces within a document of `pieces` pieces."""
        self._piece += count
        if self._piece == pieces:
            self._documents.passed(1)
            self._long, self._piece = None, 0


def _run_of(arrays: list[Ints], position: Callable[[int], SavedPosition], origins: list[Origin]) -> Run:
    """Return the run of pieces with these tokens and origins."""
    traced = any(origin is not NOWHERE for origin in origins)
    return Run(map(torch.from_numpy, arrays), len(arrays), position, origins if traced else (), arrays=arrays)


def located(document: Document, origin: Origin, left_out: Mapping[str, int]) -> Document:
    """Return a document with its origin. `left_out`: number of documents that were left out before it, by source."""
    return document if origin is NOWHERE and not left_out else document._replace(origin=origin.after(left_out))


def token_of(name: str, value: int | None) -> int | None:
    """Return a token id that was given as an argument. Raises InvalidArgumentError unless it is an int64."""
    number = whole(name, value)
    if number is not None and not -MAX_TOKEN - 1 <= number <= MAX_TOKEN:
        raise InvalidArgumentError(f"{name} must be a token id, an int64, got {number}")
    return number


def _tokens_of(name: str, values: Iterable[int]) -> frozenset[int]:
    if isinstance(values, int) or not isinstance(values, Iterable):
        raise InvalidArgumentError(f"{name} must be a list of token ids, got {values!r}")
    return frozenset(number for value in values if (number := token_of(name, value)) is not None)


def _usual(sample: Any) -> Ints | None:
    """Return the tokens of a sample of the usual kinds, which need no check; None for all others."""
    if type(sample) is torch.Tensor and sample.dtype is torch.int64 and sample.device.type == "cpu":
        sample = sample.numpy()
    if type(sample) is np.ndarray and sample.ndim == 1 and sample.dtype.char in "bBhHiIlq":
        return sample
    return None
