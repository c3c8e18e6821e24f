"""Documents of tokens for the layers Chunked and Packed: parsed from a source's samples, and read several at once with
the position of each."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from penstock.data.arguments import whole
from penstock.data.ordering.permutation import Ints
from penstock.data.sharded.layers.layer import Layer, SearchLimit
from penstock.data.sharded.layers.packed_rows import Documents, RowFields
from penstock.data.sharded.protocol import NOWHERE, Cursor, Origin, SavedPosition
from penstock.data.sharded.runs import Run, take_with_positions
from penstock.proto.errors import DatasetError, InvalidArgumentError

__all__ = ["Block", "DocumentParser", "DocumentReader", "located", "token_of"]


MAX_TOKEN = (1 << 63) - 1
"""Largest token id: the largest int64, which is the dtype of lines and pieces."""
READ_AHEAD = 256
"""Largest number of documents that are read from the source in one call."""


class DocumentParser:
    """Converter from a source's samples to documents, with checks. One is made for each cursor."""

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
            shard, epoch: number of the shard and of the epoch, for errors.
            fields: settings that say which columns samples must have; None: a sample has only tokens.
            strip: token ids to remove from the beginning and the end of each document.
            longest: pair (largest number of tokens in a document, True to truncate a longer one or False to raise
                DatasetError); None: no limit.
        """
        self._name, self._shard, self._epoch = name, shard, epoch
        self._fields, self._strip, self._longest = fields, strip, longest
        self._columns = (*fields.columns, *fields.attached) if fields is not None else ()
        self._narrow = fields is not None and fields.dtype == "int32"
        self.bare = not (self._columns or strip or longest or self._narrow)

    def where(self, index: int) -> str:
        """Return the name of document number `index` of the shard, for errors."""
        return f"{self._name}: document {index} of shard {self._shard} in epoch {self._epoch}"

    def tokens(self, sample: Any, index: int) -> Ints:
        """Return the tokens of a sample, when no other columns are wanted. Raises DatasetError if the sample is not a
        document. `index`: index of the sample in the shard, for errors."""
        if self.bare and (tokens := _usual(sample)) is not None:
            return tokens
        fields = self._fields
        if fields is not None and not fields.plain and isinstance(sample, Mapping):
            return self.document(sample, index).tokens
        return self._cut(self._stripped(self._array(sample, index)), index)

    def document(self, sample: Any, index: int) -> Documents:
        """Return a sample as a document, with the columns that the settings ask for. Raises DatasetError if the sample
        is not a document, or lacks a column. `index`: index of the sample in the shard, for errors."""
        fields = self._fields
        if fields is None or fields.plain or not (self._columns or isinstance(sample, Mapping)):
            return Documents(self.tokens(sample, index))
        missing = [name for name in (fields.tokens, *self._columns) if name not in self._names(sample)]
        if missing:
            raise DatasetError(
                f"{self.where(index)} must be a dict with the fields {sorted({fields.tokens, *self._columns})}, got "
                f"{self._names(sample) or type(sample).__name__}. Make it with "
                "Mapped(source, function), or name the columns that the samples have"
            )
        full = self._array(sample[fields.tokens], index)
        tokens = self._cut(full, index)
        columns = {name: self._column(sample[name], index, name, len(full))[: len(tokens)] for name in fields.columns}
        attached = {name: self._column(sample[name], index, name) for name in fields.attached}
        return Documents(tokens, columns, attached, where=self.where(index))

    @property
    def has_columns(self) -> bool:
        """True if documents have other columns than their tokens."""
        return bool(self._columns)

    def _names(self, sample: Any) -> list[str]:
        return sorted(map(str, sample)) if isinstance(sample, Mapping) else []

    def _cut(self, tokens: Ints, index: int) -> Ints:
        """Return `tokens`, or only the first ones of a document that is too long, if such documents are truncated.
        Raises DatasetError if they are not. `index`: index of the document in the shard, for errors."""
        if self._longest is None or len(tokens) <= self._longest[0]:
            return tokens
        most, truncate = self._longest
        if truncate:
            return tokens[:most]
        # with attached columns, no other value of `long` is possible
        attached = self._fields is not None and self._fields.attached
        other = "" if attached else ", or give long='truncate' or long='split'"
        raise DatasetError(
            f"{self.where(index)} must have at most length={most} tokens, got {len(tokens)}. Make the lines longer, or "
            f"leave such documents out by Filtered{other}"
        )

    def _column(self, values: Any, index: int, name: str, size: int | None = None) -> npt.NDArray[Any]:
        """Return `values`, the column `name` of a document, as an array. Raises DatasetError if they are not numbers,
        or not `size` of them (None: any number). `index`: number of the document in the shard."""
        try:
            column = values.numpy(force=True) if isinstance(values, torch.Tensor) else np.asarray(values)
            if column.ndim and column.dtype.kind in "biufc":
                if size is None or len(column) == size:
                    return column
                raise DatasetError(
                    f"{self.where(index)}: {name!r} must have one value for each of the {size} tokens, got "
                    f"{len(column)}. Correct the field with a Mapped(source, function)"
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
        """Return the tokens of a document. Raises DatasetError if one does not fit the dtype of the lines. Integers of
        a smaller dtype are returned unchanged, and converted when they are written into a line."""
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


class _ReadCall(NamedTuple):
    """Call that read samples from the source. The saved positions before these samples are numbered from 0."""

    first: int
    """Index in the shard of the call's first sample."""
    before: SavedPosition
    """Saved position of the source before the call's first sample."""
    position: Callable[[int], SavedPosition]
    """Function from the number of any other sample of the call to the source's saved position before this sample."""

    def at(self, number: int) -> tuple[int, SavedPosition]:
        """Return the index in the shard of sample `number` of the call, and the source's saved position before it."""
        return self.first + number, self.position(number) if number else self.before


@dataclass
class Block:
    """Consecutive documents that were read from the source in one call, with the position from which each can be read
    again. Documents that are too short have been left out. The documents of a block are numbered from 0."""

    call: _ReadCall
    numbers: Sequence[int]
    """For each document of the block, its number among the samples of the call."""
    begin: tuple[_ReadCall, int]
    """First sample to read again after a resume at the block's first document, as a call and the sample's number in it.
    It is the first of the documents that were left out just before, so that they are counted again; or, if there are
    none, the document itself."""
    sizes: Sequence[int]
    """Number of tokens of each document."""
    given: Documents | Sequence[Ints]
    """Documents as they were read: as one value with the tokens of all, or as one array of tokens for each."""
    origins: Sequence[Origin] = ()
    """Origin of each document; empty if no document has one."""
    continues: Sequence[bool] = ()
    """For each document, True if it is a piece of a Chunked that continues the piece before it; empty if none is."""

    @cached_property
    def ends(self) -> Sequence[int]:
        """Index behind the last token of each document, in the tokens of all documents one after the other."""
        return list(accumulate(self.sizes))

    @cached_property
    def documents(self) -> Documents:
        """All documents of the block as one value, with their tokens one after the other."""
        if isinstance(self.given, Documents):
            return self.given
        tokens = self.given[0] if len(self.given) == 1 else np.concatenate(self.given)
        return joined(tokens, self.ends, self.origins, self.continues)

    @cached_property
    def arrays(self) -> Sequence[Ints]:
        """Tokens of the block's documents, one array for each."""
        if isinstance(self.given, Documents):
            return [self.given.tokens[begin:end] for begin, end in pairwise([0, *self.ends])]
        return self.given

    def position(self, number: int) -> tuple[int, SavedPosition]:
        """Return from where to read again after a resume at document `number` of the block: the index in the shard of
        the first sample to read, and the source's saved position before this sample."""
        if number == 0:
            call, at = self.begin
            return call.at(at)
        return self.call.at(self.numbers[number - 1] + 1)

    def start(self, number: int) -> int:
        """Return the index of the first token of document `number`, in the tokens of all documents one after the
        other."""
        return self.ends[number - 1] if number else 0


def joined(tokens: Ints, ends: Sequence[int], origins: Sequence[Origin], continues: Sequence[bool]) -> Documents:
    """Return consecutive documents as one value.

    Args:
        tokens: tokens of all documents one after the other.
        ends: index in `tokens` behind the last token of each document.
        origins: origin of each document; empty if no document has one.
        continues: for each document, True if it is a piece that continues the one before; empty if none is.
    """
    seams = ends
    if any(continues):
        seams = [end for end, goes_on in zip(ends, [*continues[1:], False], strict=True) if not goes_on]
    return Documents(tokens, {}, {}, bool(continues) and continues[0], "", origins, ends, seams)


class DocumentReader:
    """Reader of a shard's documents, which knows from which saved position of the source each can be read again.

    It reads several documents at once, and keeps those that are not needed yet. An error in such a document is raised
    only when the document is needed. Documents with too few tokens are left out and counted. `ready` returns the next
    documents, and `passed` is called when some of them have been used.
    """

    def __init__(
        self, layer: Layer, inner: Cursor, shard: int, index: int, parser: DocumentParser, *, least: int = 1
    ) -> None:
        """
        Args:
            layer: layer whose documents are read.
            inner: cursor of the layer's source.
            shard: number of the shard, for errors.
            index: index in the shard of the first document to read.
            parser: converts samples to documents.
            least: smallest number of tokens of a document; documents with fewer are left out.
        """
        self._inner, self._parser, self._least = inner, parser, least
        self._limit = SearchLimit(layer.source, type(layer).__name__, shard)
        self._next = index
        """Index in the shard of the first document that was not parsed yet."""
        self._call: _ReadCall | None = None
        """Latest call that read samples from the source; None before the first call."""
        self._size = 0
        """Number of samples that the latest call read."""
        self._blocks: deque[Block] = deque()
        """Blocks with documents that were read and not all used."""
        self._at = 0
        """Number of documents of the first block that were used."""
        self._left_out: dict[str, int] = {}
        """Number of documents that were left out after the documents of the last block, by source."""
        self._left_from: tuple[_ReadCall, int] | None = None
        """First of the documents that `_left_out` counts, as a call and the document's number in it; None if no
        document was left out there."""
        self._error: Exception | None = None
        """Error in the document that follows the last block, to be raised when this document is needed."""

    def ready(self, count: int) -> tuple[Block, int] | None:
        """Return the block that contains the next document, and the document's number in the block; None if no document
        is left. `count`: largest number of documents to read from the source if all that were read have been used."""
        if not self._blocks:
            self._read(count)
        return (self._blocks[0], self._at) if self._blocks else None

    def passed(self, count: int) -> None:
        """Mark the next `count` documents, which must be in the block that `ready` returns, as used."""
        self._at += count
        if self._at == len(self._blocks[0].sizes):
            self._blocks.popleft()
            self._at = 0

    def following(self) -> tuple[int, SavedPosition]:
        """Return from where to read again after a resume at the next document: the index in the shard of the first
        sample to read, and the source's saved position before this sample."""
        if self._blocks:
            return self._blocks[0].position(self._at)
        if self._left_from is not None:
            call, number = self._left_from
            return call.at(number)
        if self._call is not None and self._next < self._call.first + self._size:  # an error, not raised yet
            return self._call.at(self._next - self._call.first)
        return self._next, self._inner.saved_position()

    def where(self) -> str:
        """Return the name of the next document, for errors."""
        block = self._blocks[0]
        return self._parser.where(block.call.first + block.numbers[self._at])

    def expect(self, what: str, there: int, at: int) -> None:
        """Raise DatasetError if the next document is shorter than a saved position requires.

        Args:
            what: unit of the numbers, for the error: "pieces" or "tokens".
            there: number of pieces or tokens that the document has.
            at: number of its pieces or tokens before the saved position.
        """
        if at >= there:
            raise DatasetError(
                f"{self.where()} must have more than the {at} {what} that the saved run read of it, got {there}. Use "
                "the data of that run"
            )

    def close(self) -> None:
        self._inner.close()

    def _read(self, count: int) -> None:
        """Read up to `count` samples from the source, and add blocks with their documents. Repeat this while all
        documents have too few tokens, until the shard ends."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        while not self._blocks:
            before = self._inner.saved_position()
            run = take_with_positions(self._inner, min(count, READ_AHEAD))
            if not run.size:
                break
            self._call, self._size = _ReadCall(self._next, before, run.position), run.size
            if self._parser.has_columns:
                self._add_each(run, self._call)
            elif run.tokens is not None and self._parser.bare:  # pieces have tokens, so none is left out
                tokens, sizes = run.tokens
                documents = joined(tokens, list(accumulate(sizes)), run.origins, run.continues)
                self._append(Block(self._call, range(run.size), (self._call, 0), sizes, documents, run.origins))
                self._next += run.size
            else:
                self._add_all(run, self._call)

    def _add_each(self, run: Run, call: _ReadCall) -> None:
        """Add the documents of a run of samples, each as a block of one, because documents with other columns than
        tokens are not joined. `call`: the call that read the samples."""
        try:
            for number, sample in enumerate(run.samples):
                document = self._parser.document(sample, self._next)
                self._next += 1
                kept = self._sift(call, number, [len(document.tokens)], run.origins[number : number + 1])
                if kept is not None:
                    numbers, begin, origins = kept
                    self._append(
                        Block(call, numbers, begin, [len(document.tokens)], document._replace(origins=origins), origins)
                    )
        except Exception as error:
            self._defer(error)

    def _add_all(self, run: Run, call: _ReadCall) -> None:
        """Parse a run of samples that have only tokens, and add their documents as one Block; documents with too few
        tokens are left out. `call`: the call that read the samples."""
        arrays: list[Ints] = []
        failed: Exception | None = None
        parse = self._parser.tokens
        try:
            for index, sample in enumerate(run.samples, self._next):
                arrays.append(parse(sample, index))
        except Exception as error:
            if not arrays:
                raise
            failed = error
        self._next += len(arrays)
        sizes, origins = list(map(len, arrays)), run.origins[: len(arrays)]
        if min(sizes) >= self._least and self._left_from is None:
            continues = run.continues[: len(arrays)]
            self._append(Block(call, range(len(arrays)), (call, 0), sizes, arrays, origins, continues))
        elif (kept := self._sift(call, 0, sizes, origins)) is not None:
            numbers, begin, origins = kept
            continues = [run.continues[at] for at in numbers] if run.continues else ()
            sizes, arrays = [sizes[at] for at in numbers], [arrays[at] for at in numbers]
            self._append(Block(call, numbers, begin, sizes, arrays, origins, continues))
        if failed is not None:
            self._defer(failed)

    def _append(self, block: Block) -> None:
        self._blocks.append(block)
        self._limit.yielded()

    def _sift(
        self, call: _ReadCall, first: int, sizes: Sequence[int], origins: Sequence[Origin]
    ) -> tuple[list[int], tuple[_ReadCall, int], Sequence[Origin]] | None:
        """Leave out documents with too few tokens. Return None if no document is kept, or else three values: the number
        of each kept document among the samples of the call, the first sample to read again for the first of them (see
        Block.begin), and the origin of each with the number of documents that were left out before it."""
        numbers: list[int] = []
        begin: tuple[_ReadCall, int] | None = None
        found: list[Origin] = []
        for at, size in enumerate(sizes):
            origin = origins[at] if origins else NOWHERE
            if size < self._least:
                self._left_from = self._left_from or (call, first + at)
                self._left_out = origin.leaving_out(self._left_out)
                self._limit.left_out()
            else:
                begin = begin or self._left_from or (call, first + at)
                numbers.append(first + at)
                found.append(origin.after(self._left_out))
                self._left_from, self._left_out = None, {}
        return None if begin is None else (numbers, begin, found)

    def _defer(self, error: Exception) -> None:
        """Keep an error until the documents before it have been used. If there are none, raise it now."""
        if not self._blocks:
            raise error
        self._error = error


def located(document: Documents, origin: Origin, left_out: Mapping[str, int]) -> Documents:
    """Return `document` with its origin. `left_out`: number of documents that were left out just before it, by source;
    they are added to the origin."""
    if origin is NOWHERE and not left_out:
        return document
    return document._replace(origins=(origin.after(left_out),))


def token_of(name: str, value: int | None) -> int | None:
    """Return `value`, a token id or None, given by the user as argument `name`. Raises InvalidArgumentError unless it
    fits int64."""
    number = whole(name, value)
    if number is not None and not -MAX_TOKEN - 1 <= number <= MAX_TOKEN:
        raise InvalidArgumentError(f"{name} must be a token id, an int64, got {number}. Pass an id of the tokenizer")
    return number


def _usual(sample: Any) -> Ints | None:
    """Return the tokens of a sample if its type shows that it is valid: a CPU tensor of int64, or an array of integers
    other than uint64, with one dimension. Return None for all other samples, which need checks."""
    if type(sample) is torch.Tensor and sample.dtype is torch.int64 and sample.device.type == "cpu":
        sample = sample.numpy()
    if type(sample) is np.ndarray and sample.ndim == 1 and sample.dtype.char in "bBhHiIlq":
        return sample
    return None
