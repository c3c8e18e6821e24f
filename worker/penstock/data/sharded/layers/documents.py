"""Documents of tokens for Chunked and Packed: parsed, and read several at once with the position of each."""

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

MAX_TOKEN = (1 << 63) - 1
READ_AHEAD = 256


class DocumentParser:
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
        """`longest`: (most tokens of a document, True to truncate a longer one or False to raise DatasetError)."""
        self._name, self._shard, self._epoch = name, shard, epoch
        self._fields, self._strip, self._longest = fields, strip, longest
        self._columns = (*fields.columns, *fields.attached) if fields is not None else ()
        self._narrow = fields is not None and fields.dtype == "int32"
        self.bare = not (self._columns or strip or longest or self._narrow)

    def where(self, index: int) -> str:
        return f"{self._name}: document {index} of shard {self._shard} in epoch {self._epoch}"

    def tokens(self, sample: Any, index: int) -> Ints:
        """Return the tokens of a sample, when no other columns are wanted. `index`: for errors."""
        if self.bare and (tokens := _usual(sample)) is not None:
            return tokens
        fields = self._fields
        if fields is not None and not fields.plain and isinstance(sample, Mapping):
            return self.document(sample, index).tokens
        return self._cut(self._stripped(self._array(sample, index)), index)

    def document(self, sample: Any, index: int) -> Documents:
        fields = self._fields
        if fields is None or fields.plain or not (self._columns or isinstance(sample, Mapping)):
            return Documents(self.tokens(sample, index))
        missing = [name for name in (fields.tokens, *self._columns) if name not in self._names(sample)]
        if missing:
            raise DatasetError(
                f"{self.where(index)} must be a dict with {sorted({fields.tokens, *self._columns})}, got "
                f"{self._names(sample) or type(sample).__name__}"
            )
        full = self._array(sample[fields.tokens], index)
        tokens = self._cut(full, index)
        columns = {name: self._column(sample[name], index, name, len(full))[: len(tokens)] for name in fields.columns}
        attached = {name: self._column(sample[name], index, name) for name in fields.attached}
        return Documents(tokens, columns, attached, where=self.where(index))

    @property
    def has_columns(self) -> bool:
        return bool(self._columns)

    def _names(self, sample: Any) -> list[str]:
        return sorted(map(str, sample)) if isinstance(sample, Mapping) else []

    def _cut(self, tokens: Ints, index: int) -> Ints:
        if self._longest is None or len(tokens) <= self._longest[0]:
            return tokens
        most, truncate = self._longest
        if truncate:
            return tokens[:most]
        raise DatasetError(
            f"{self.where(index)} must have at most length={most} tokens, got {len(tokens)}. Leave it out by Filtered"
        )

    def _column(self, values: Any, index: int, name: str, size: int | None = None) -> npt.NDArray[Any]:
        try:
            column = values.numpy(force=True) if isinstance(values, torch.Tensor) else np.asarray(values)
            if column.ndim and column.dtype.kind in "biufc":
                if size is None or len(column) == size:
                    return column
                raise DatasetError(
                    f"{self.where(index)}: {name!r} must have {size} values, one for each token, got {len(column)}"
                )
            kind = f"{column.dtype} of shape {column.shape}"
        except (ValueError, TypeError):  # a list of lists of different lengths; a dtype that numpy does not have
            kind = str(getattr(values, "dtype", type(values).__name__))
        raise DatasetError(
            f"{self.where(index)}: {name!r} must be an array of numbers with a dimension, got {kind}. Use Mapped"
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
            f"{self.where(index)} must be a one-dimensional array or list of integers, got {kind}. Use Mapped"
        )

    def _checked(self, array: npt.NDArray[Any], index: int) -> Ints:
        """Smaller integers are converted when written into a line."""
        if array.dtype == np.uint64:
            if array.max() > MAX_TOKEN:
                raise DatasetError(f"{self.where(index)}: tokens must fit int64, got {array.max()}. Use smaller ids")
            array = array.astype(np.int64)
        if self._narrow and not np.can_cast(array.dtype, np.int32):
            least, most = int(array.min()), int(array.max())
            if least < -(1 << 31) or most >= 1 << 31:
                raise DatasetError(f"{self.where(index)}: tokens must fit dtype='int32', got {least} to {most}")
        return array


class _ReadCall(NamedTuple):
    first: int
    before: SavedPosition
    """Saved position of the source before the first sample."""
    position: Callable[[int], SavedPosition]
    """Saved position of the source before any other sample, by its number in the call."""

    def at(self, number: int) -> tuple[int, SavedPosition]:
        return self.first + number, self.position(number) if number else self.before


@dataclass
class Block:
    """Consecutive documents from one call, with the position of each. Too short ones are left out."""

    call: _ReadCall
    numbers: Sequence[int]
    """Each document's number among the samples of the call."""
    begin: tuple[_ReadCall, int]
    """First sample to read again: the first left out just before, to count it again, or the document itself."""
    sizes: Sequence[int]
    given: Documents | Sequence[Ints]
    """One value with the tokens of all, or one array of tokens for each."""
    origins: Sequence[Origin] = ()
    continues: Sequence[bool] = ()
    """True for a piece of a Chunked that continues the piece before it; empty if none is."""

    @cached_property
    def ends(self) -> Sequence[int]:
        """Index behind each document's last token, among the tokens of all."""
        return list(accumulate(self.sizes))

    @cached_property
    def documents(self) -> Documents:
        if isinstance(self.given, Documents):
            return self.given
        tokens = self.given[0] if len(self.given) == 1 else np.concatenate(self.given)
        return joined(tokens, self.ends, self.origins, self.continues)

    @cached_property
    def arrays(self) -> Sequence[Ints]:
        if isinstance(self.given, Documents):
            return [self.given.tokens[begin:end] for begin, end in pairwise([0, *self.ends])]
        return self.given

    def position(self, number: int) -> tuple[int, SavedPosition]:
        """Return where to read again from: the first sample's index, and the source's saved position before it."""
        if number == 0:
            call, at = self.begin
            return call.at(at)
        return self.call.at(self.numbers[number - 1] + 1)

    def start(self, number: int) -> int:
        return self.ends[number - 1] if number else 0


def joined(tokens: Ints, ends: Sequence[int], origins: Sequence[Origin], continues: Sequence[bool]) -> Documents:
    seams = ends
    if any(continues):
        seams = [end for end, goes_on in zip(ends, [*continues[1:], False], strict=True) if not goes_on]
    return Documents(tokens, {}, {}, bool(continues) and continues[0], "", origins, ends, seams)


class DocumentReader:
    """Reader of a shard's documents, which knows from where each can be read again. An error in a document is raised
    only when it is needed. Documents with fewer than `least` tokens are left out and counted. `ready` returns the next
    documents; `passed` is called when some have been used."""

    def __init__(
        self, layer: Layer, inner: Cursor, shard: int, index: int, parser: DocumentParser, *, least: int = 1
    ) -> None:
        self._inner, self._parser, self._least = inner, parser, least
        self._limit = SearchLimit(layer.source, type(layer).__name__, shard)
        self._next = index
        """Index of the first document that was not parsed yet."""
        self._call: _ReadCall | None = None
        self._size = 0
        self._blocks: deque[Block] = deque()
        self._at = 0
        """Used documents of the first block."""
        self._left_out: dict[str, int] = {}
        """Left out after the last block, by source."""
        self._left_from: tuple[_ReadCall, int] | None = None
        """First of them, as a call and the document's number in it."""
        self._error: Exception | None = None
        """Error in the document that follows the last block."""

    def ready(self, count: int) -> tuple[Block, int] | None:
        """Return the block with the next document, and its number there; None at the end. `count`: most to read."""
        if not self._blocks:
            self._read(count)
        return (self._blocks[0], self._at) if self._blocks else None

    def passed(self, count: int) -> None:
        self._at += count
        if self._at == len(self._blocks[0].sizes):
            self._blocks.popleft()
            self._at = 0

    def following(self) -> tuple[int, SavedPosition]:
        if self._blocks:
            return self._blocks[0].position(self._at)
        if self._left_from is not None:
            call, number = self._left_from
            return call.at(number)
        if self._call is not None and self._next < self._call.first + self._size:  # an error, not raised yet
            return self._call.at(self._next - self._call.first)
        return self._next, self._inner.saved_position()

    def where(self) -> str:
        block = self._blocks[0]
        return self._parser.where(block.call.first + block.numbers[self._at])

    def expect(self, what: str, there: int, at: int) -> None:
        """Raise DatasetError if the next document has fewer (`there`) `what` than a saved position requires."""
        if at >= there:
            raise DatasetError(
                f"{self.where()} must have more than {at} {what}, as in the saved run, got {there}. Use its data"
            )

    def close(self) -> None:
        self._inner.close()

    def _read(self, count: int) -> None:
        """Read up to `count` samples, and more while all of them have too few tokens."""
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
        """Add documents with other columns than tokens, which are not joined: each is a block."""
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
        """Leave out too short documents. Return the others' numbers among the samples of the call, `Block.begin`, and
        their origins with what was left out before each; None if there is no other."""
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
        """Keep an error until the documents before it have been used; raise it now if there are none."""
        if not self._blocks:
            raise error
        self._error = error


def located(document: Documents, origin: Origin, left_out: Mapping[str, int]) -> Documents:
    if origin is NOWHERE and not left_out:
        return document
    return document._replace(origins=(origin.after(left_out),))


def token_of(name: str, value: int | None) -> int | None:
    number = whole(name, value)
    if number is not None and not -MAX_TOKEN - 1 <= number <= MAX_TOKEN:
        raise InvalidArgumentError(f"{name} must be a token id, an int64, got {number}. Pass an id of the tokenizer")
    return number


def _usual(sample: Any) -> Ints | None:
    """Return the tokens of a sample whose type shows that it is valid; None for others, which need checks."""
    if type(sample) is torch.Tensor and sample.dtype is torch.int64 and sample.device.type == "cpu":
        sample = sample.numpy()
    if type(sample) is np.ndarray and sample.ndim == 1 and sample.dtype.char in "bBhHiIlq":
        return sample
    return None
