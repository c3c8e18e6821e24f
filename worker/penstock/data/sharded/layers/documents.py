"""Documents of tokens: parsed from a source's samples, read with their positions, and cut into pieces."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from penstock.data.arguments import at_least_one, whole
from penstock.data.ordering.permutation import Ints
from penstock.data.sharded.layers.layer import Layer, SearchLimit, entered
from penstock.data.sharded.layers.packed_rows import Document, RowFields
from penstock.data.sharded.protocol import (
    NOWHERE,
    Cursor,
    Origin,
    PositionOf,
    SavedPosition,
    ShardedSource,
    cursor_origin,
)
from penstock.proto.errors import DatasetError, InvalidArgumentError

__all__ = ["Chunked", "DocumentParser", "Documents", "located", "token_of"]


MAX_TOKEN = (1 << 63) - 1
"""Largest token id, because lines and pieces of documents are int64."""


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
            length: largest number of tokens in a piece, including BOS and EOS. All pieces of a document but the last
                have this many.
            bos: token that is put before each document; None: no token.
            eos: token that is put after each document; None: no token.
            longest: largest number of tokens in a document, without BOS and EOS; a longer document raises DatasetError.
                None: no limit.
            strip_tokens: token ids that are first removed from both ends of each document, such as separators that the
                data already have.
            min_length: smallest number of tokens in a document, without BOS and EOS, after `strip_tokens`; a shorter
                document is left out. None: 1.
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
            shard, epoch: number of the shard and of the epoch, for errors.
            fields: settings of the columns that samples must have; None: samples are tokens alone.
            strip: token ids to remove from both ends of each document.
            longest: largest number of tokens, and True if a longer document is truncated, False if it is an error;
                None: no limit.
        """
        self._name, self._shard, self._epoch = name, shard, epoch
        self._fields, self._strip, self._longest = fields, strip, longest
        self._columns = (*fields.columns, *fields.attached) if fields is not None else ()
        self._narrow = fields is not None and fields.dtype == "int32"
        self._bare = not (self._columns or strip or longest or self._narrow)

    def where(self, index: int) -> str:
        """Return words that name document number `index` of the shard in errors."""
        return f"{self._name}: document {index} of shard {self._shard} in epoch {self._epoch}"

    def document(self, sample: Any, index: int, continues: bool = False) -> Document:
        """Return the document that a sample holds. `index`: number of the sample in the shard; `continues`: True if the
        sample is a piece of a document, and not its first piece. Raises DatasetError if the sample is not a
        document."""
        if self._bare and (tokens := _usual(sample)) is not None:
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
        """Return a document's tokens. If it is too long and the setting says so, its end is cut off."""
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
        """Return the column `name` of a document as an array. `size`: number of values that it must have; None: any
        number."""
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
        """Return tokens as they are, checked to fit the dtype of the lines. Narrower integers are widened when they are
        written into a line."""
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


class Documents:
    """Reader of a shard's documents, which keeps the source's saved positions from which a document can be read
    again."""

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
            least: smallest number of tokens; documents with fewer are left out.
        """
        self._inner, self._parser, self._least = inner, parser, least
        self._limit = SearchLimit(layer.source, type(layer).__name__, shard)
        self._next = index
        self._index = index
        """Index in the shard of the document that was read last."""
        self._present: tuple[int, SavedPosition] = index, None
        """Where to begin to read the last document again: the index of a sample, and the source's saved position before
        it. If documents were left out just before it, this is the first of them, because a resume counts them again."""

    @property
    def where(self) -> str:
        """Name of the document that was read last, for errors."""
        return self._parser.where(self._index)

    def read(self) -> Document | None:
        """Return the next document that has enough tokens; None after the last one."""
        left_out: dict[str, int] = {}
        begin = self.following()
        while True:
            try:
                sample = next(self._inner)
            except StopIteration:
                return None
            self._index, self._next = self._next, self._next + 1
            document = self._parser.document(sample, self._index, getattr(self._inner, "continues", False))
            origin = cursor_origin(self._inner)
            if len(document.tokens) >= self._least:
                self._limit.found()
                self._present = begin
                return located(document, origin, left_out)
            self._limit.nothing()
            left_out = origin.leaving_out(left_out)

    def present(self) -> tuple[int, SavedPosition]:
        """Return where to begin to read the last document again: the index of a sample, and the source's saved position
        before it."""
        return self._present

    def following(self) -> tuple[int, SavedPosition]:
        """Return the index of the next document, and the source's saved position before it."""
        return self._next, self._inner.saved_position()

    def expect(self, what: str, there: int, at: int) -> None:
        """Raise DatasetError unless the document that was read last has a piece or token with index `at`, which a saved
        position names.

        Args:
            what: word for the counted things in the error: "pieces" or "tokens".
            there: how many of them the document has.
            at: index that must exist.
        """
        if at >= there:
            raise DatasetError(
                f"{self.where} must have more than the {at} {what} that the saved run read of it, got {there}. Use the "
                "data of that run"
            )

    def close(self) -> None:
        self._inner.close()


class _ChunkedCursor:
    def __init__(
        self, documents: Documents, length: int, bos: int | None, eos: int | None, longest: int | None, piece: int
    ) -> None:
        self._documents, self._length, self._longest = documents, length, longest
        self._bos, self._eos = bos, eos
        self._document: Ints | None = None
        """Document that is being cut into pieces, with BOS and EOS; None if it still has to be read."""
        self._pieces = 0
        """Number of pieces into which `_document` is cut."""
        self._piece = piece
        """Index of the next piece in its document."""
        self.continues = False
        """True if the piece that was yielded last is not the first one of its document."""
        self._origin = NOWHERE
        """Origin of the document that is being cut into pieces."""
        self.origin = NOWHERE

    traced = True

    def __iter__(self) -> _ChunkedCursor:
        return self

    def __next__(self) -> torch.Tensor:
        document = self._open()
        if document is None:
            raise StopIteration
        start = self._piece * self._length
        self.continues = start > 0
        self.origin = self._origin._replace(skipped={}) if self.continues and self._origin.skipped else self._origin
        self._advance(1)
        return torch.from_numpy(document[start : start + self._length])

    def skip(self, count: int) -> int:
        left = count
        while left and self._open() is not None:
            passed = min(left, self._pieces - self._piece)
            self._advance(passed)
            left -= passed
        return count - left

    def saved_position(self) -> SavedPosition:
        index, before = self._documents.following() if self._document is None else self._documents.present()
        return {"index": index, "piece": self._piece, "source": before}

    def close(self) -> None:
        self._documents.close()

    def _open(self) -> Ints | None:
        """Return the document that is being cut into pieces, and read it if necessary; None after the last document."""
        if self._document is None and (read := self._documents.read()) is not None:
            document, self._origin = read.tokens, read.origin
            if self._longest is not None and len(document) > self._longest:
                raise DatasetError(
                    f"{self._documents.where} must have at most longest={self._longest} tokens, got {len(document)}. "
                    "Allow more, or leave such documents out by Filtered"
                )
            self._document = self._separated(document)
            self._pieces = -(-len(self._document) // self._length)
            self._documents.expect("pieces", self._pieces, self._piece)
        return self._document

    def _separated(self, document: Ints) -> Ints:
        """Return a writable copy of a document, with BOS before and EOS after it."""
        begin = self._bos is not None
        separated = np.empty(begin + len(document) + (self._eos is not None), np.int64)
        separated[begin : begin + len(document)] = document
        if self._bos is not None:
            separated[0] = self._bos
        if self._eos is not None:
            separated[-1] = self._eos
        return separated

    def _advance(self, count: int) -> None:
        """Advance by `count` pieces within the present document."""
        self._piece += count
        if self._piece == self._pieces:
            self._document, self._piece = None, 0


def located(document: Document, origin: Origin, left_out: Mapping[str, int]) -> Document:
    """Return a document with an origin. `left_out`: number of documents that were left out before it, by source."""
    return document if origin is NOWHERE and not left_out else document._replace(origin=origin.after(left_out))


def token_of(name: str, value: int | None) -> int | None:
    """Return the token id that was given as argument `name`. Raises InvalidArgumentError unless it is an int64."""
    number = whole(name, value)
    if number is not None and not -MAX_TOKEN - 1 <= number <= MAX_TOKEN:
        raise InvalidArgumentError(f"{name} must be a token id, an int64, got {number}. Pass an id of the tokenizer")
    return number


def _tokens_of(name: str, values: Iterable[int]) -> frozenset[int]:
    if isinstance(values, int) or not isinstance(values, Iterable):
        raise InvalidArgumentError(f"{name} must be a list of token ids, got {values!r}. Pass a list, such as [0, 2]")
    return frozenset(number for value in values if (number := token_of(name, value)) is not None)


def _usual(sample: Any) -> Ints | None:
    """Return the tokens of a sample of a common kind that needs no check; None for all other samples."""
    if type(sample) is torch.Tensor and sample.dtype is torch.int64 and sample.device.type == "cpu":
        sample = sample.numpy()
    if type(sample) is np.ndarray and sample.ndim == 1 and sample.dtype.char in "bBhHiIlq":
        return sample
    return None
