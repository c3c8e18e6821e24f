"""Documents of tokens, cut into pieces, and packed into lines of one length.

A line may contain several documents, so a saved position may lie in the middle of a document. The state contains the
beginning of the line that is being filled: the source's token (position) before the document in which the line begins,
and an offset in that document. After a resume the document is read again, and the line is made again. So a state
contains no text. A change of topology loses no text either, because the line belongs to its shard and not to a worker.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from penstock.data.arguments import at_least_one, whole
from penstock.data.ordering.permutation import Ints
from penstock.data.sharded.layers.layer import Layer, SearchLimit, entered
from penstock.data.sharded.protocol import NOWHERE, Cursor, Origin, Place, ShardedSource, Token, origin_of, summed
from penstock.proto.errors import DatasetError, InvalidArgumentError

__all__ = ["Chunked", "Packed"]


MAX_TOKEN = (1 << 63) - 1
"""Largest token id, because lines and pieces are int64."""


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
        self._bos, self._eos = _token("bos", bos), _token("eos", eos)
        self._longest = None if longest is None else at_least_one("longest", longest)
        self._strip = _tokens("strip_tokens", strip_tokens)
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

    def open(self, shard: int, epoch: int, seed: int, token: Token | None = None, place: Place | None = None) -> Cursor:
        (index, piece), inner = entered(token, "Chunked", "index", "piece")
        cursor = self.source.open(shard, epoch, seed, inner)
        documents = _Documents(self, cursor, shard, epoch, index, strip=self._strip, least=self._least)
        return _ChunkedCursor(documents, self._length, self._bos, self._eos, self._longest, piece)


class Packed(Layer):
    """Layer that packs a shard's documents, in order, into lines of exactly `length` tokens: int64 tensors of shape
    (length,)."""

    def __init__(
        self,
        source: ShardedSource,
        *,
        length: int,
        pad: int | None = None,
        bos: int | None = None,
        eos: int | None = None,
        split: bool = True,
    ) -> None:
        """
        Args:
            source: source of documents, as for `Chunked`; or a `Chunked`, which puts BOS and EOS between documents.
            length: tokens of each line, including BOS and EOS.
            pad: token that fills up the last line of a shard's epoch; None: an incomplete last line is dropped. If the
                source is a Repeated, no line is the last one: it continues with documents of the next epoch.
            bos: first token of each line; it is added unless the document has it there already.
            eos: last token of each line, before any `pad`; it is added unless the document has it there already.
            split: False: a line ends before a document that does not fit into it, and is filled up with `pad`. Only a
                document longer than a line is split then.
        """
        super().__init__(source)
        self._length, self._pad = at_least_one("length", length), _token("pad", pad)
        self._bos, self._eos = _token("bos", bos), _token("eos", eos)
        if self._length <= (bos is not None) + (eos is not None):
            raise InvalidArgumentError(
                f"length must leave a token beside a line's BOS and EOS, got {length}; make it longer"
            )
        if not split and pad is None:
            raise InvalidArgumentError("split=False needs the pad token that fills up lines; give pad")
        self._split = bool(split)

    def settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = {"length": self._length, "pad": self._pad}
        if not self._split:
            settings["split"] = False
        return settings | {n: t for n, t in (("bos", self._bos), ("eos", self._eos)) if t is not None}

    def open(self, shard: int, epoch: int, seed: int, token: Token | None = None, place: Place | None = None) -> Cursor:
        (index, offset), inner = entered(token, "Packed", "index", "offset")
        documents = _Documents(self, self.source.open(shard, epoch, seed, inner), shard, epoch, index)
        return _PackedCursor(documents, self._length, self._pad, self._bos, self._eos, self._split, offset)


class _Documents:
    """Reader of a shard's documents as arrays, with the source's tokens (positions) from which they can be read
    again."""

    def __init__(
        self,
        layer: Layer,
        inner: Cursor,
        shard: int,
        epoch: int,
        index: int,
        *,
        strip: frozenset[int] = frozenset(),
        least: int = 1,
    ) -> None:
        """
        Args:
            strip: token ids to remove from both ends of each document.
            least: smallest number of tokens; documents with fewer are left out.
        """
        self._strip, self._least = strip, least
        self._name, self._inner, self._shard, self._epoch = type(layer).__name__, inner, shard, epoch
        self._limit = SearchLimit(layer.source, self._name, shard)
        self._next = index
        self._index, self._before, self.size = index, None, 0
        """Index of the document that was read last, the source's token before it, and its number of tokens."""
        self.origin = NOWHERE
        """Origin of the document that was read last."""

    @property
    def where(self) -> str:
        """Name of the document that was read last, for errors."""
        return f"{self._name}: document {self._index} of shard {self._shard} in epoch {self._epoch}"

    def read(self) -> Ints | None:
        """Return the next document that has enough tokens; None if there is none left."""
        left_out: dict[str, int] = {}
        while True:
            before = self._inner.token()
            try:
                sample = next(self._inner)
            except StopIteration:
                return None
            self._before, self._index, self._next = before, self._next, self._next + 1
            document = self._stripped(self._array(sample))
            self.size = len(document)
            origin = origin_of(self._inner)
            if self.size >= self._least:
                self._limit.found()
                self.origin = origin.after(left_out)
                return document
            self._limit.nothing()
            left_out = summed(left_out, origin.after({origin.source: 1}).skipped)

    def present(self) -> tuple[int, Token]:
        """Return the index of the document that was read last, and the source's token (position) before it."""
        return self._index, self._before

    def following(self) -> tuple[int, Token]:
        """Return the index of the next document, and the source's token (position) before it."""
        return self._next, self._inner.token()

    def expect(self, what: str, there: int, at: int) -> None:
        """Raise DatasetError unless the document that was read last has an item with index `at`. `there`: number of its
        items; `what`: word for the items in the error ("pieces" or "tokens")."""
        if at >= there:
            raise DatasetError(
                f"{self.where} has {there} {what}, but the state says that {at} of them were read: the data have "
                "changed since the state was saved"
            )

    def close(self) -> None:
        self._inner.close()

    def _stripped(self, document: Ints) -> Ints:
        if not self._strip:
            return document
        begin, end = 0, len(document)
        while begin < end and int(document[begin]) in self._strip:
            begin += 1
        while begin < end and int(document[end - 1]) in self._strip:
            end -= 1
        return document[begin:end]

    def _array(self, sample: Any) -> Ints:
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
            if array.dtype == np.uint64 and array.size and array.max() > MAX_TOKEN:
                raise DatasetError(f"{self.where}: tokens must fit int64, got {array.max()}")
            if array.ndim == 1 and array.dtype.kind in "iu":
                return array.astype(np.int64, copy=False)
            kind = f"{array.dtype} of shape {array.shape}"
        raise DatasetError(
            f"{self.where} must be a tensor, an array or a list of integers with one dimension, got {kind}. Use Mapped "
            "to make its tokens"
        )


class _ChunkedCursor:
    def __init__(
        self, documents: _Documents, length: int, bos: int | None, eos: int | None, longest: int | None, piece: int
    ) -> None:
        self._documents, self._length, self._longest = documents, length, longest
        self._bos, self._eos = _separator(bos), _separator(eos)
        self._document: Ints | None = None
        """Document that is being cut into pieces, with BOS and EOS; None if it still has to be read."""
        self._pieces = 0
        """Number of pieces of the document in `_document`."""
        self._piece = piece
        """Number of the next piece in its document."""
        self.origin = NOWHERE

    traced = True

    def __iter__(self) -> _ChunkedCursor:
        return self

    def __next__(self) -> torch.Tensor:
        document = self._open()
        if document is None:
            raise StopIteration
        start = self._piece * self._length
        origin = self._documents.origin
        self.origin = origin._replace(skipped={}) if self._piece else origin
        self._advance(1)
        return torch.from_numpy(document[start : start + self._length])

    def skip(self, count: int) -> int:
        left = count
        while left and self._open() is not None:
            passed = min(left, self._pieces - self._piece)
            self._advance(passed)
            left -= passed
        return count - left

    def token(self) -> Token:
        index, before = self._documents.following() if self._document is None else self._documents.present()
        return {"index": index, "piece": self._piece, "source": before}

    def close(self) -> None:
        self._documents.close()

    def _open(self) -> Ints | None:
        """Return the document that is being cut into pieces, and read it if needed; None after the last document."""
        if self._document is None and (document := self._documents.read()) is not None:
            if self._longest is not None and len(document) > self._longest:
                raise DatasetError(
                    f"{self._documents.where} must have at most longest={self._longest} tokens, got {len(document)}. "
                    "Allow more, or leave such documents out by Filtered"
                )
            self._document = np.concatenate([self._bos, document, self._eos])  # a copy: pieces are writable
            self._pieces = -(-len(self._document) // self._length)
            self._documents.expect("pieces", self._pieces, self._piece)
        return self._document

    def _advance(self, count: int) -> None:
        """Advance by `count` pieces within the document in `_document`."""
        self._piece += count
        if self._piece == self._pieces:
            self._document, self._piece = None, 0


class _PackedCursor:
    """Cursor of packed lines. The line that is being filled takes its tokens from one or more documents, and may begin
    in the middle of the first one. The cursor keeps the source's positions before the first of them, and before the
    last one, because the next line may begin in it."""

    def __init__(
        self,
        documents: _Documents,
        length: int,
        pad: int | None,
        bos: int | None,
        eos: int | None,
        split: bool,
        offset: int,
    ) -> None:
        self._documents, self._length, self._pad, self._split = documents, length, pad, split
        self._bos, self._eos = bos, eos
        self._parts: list[Ints] = []
        """Tokens that were read so far, from the beginning of the line that is being filled."""
        self._origins: list[Origin] = []
        """Origin of each document in `_parts`, without `skipped` if an earlier line has its beginning."""
        self.origin = NOWHERE
        self._have = 0
        """Number of tokens in `_parts`."""
        self._take = 0
        """Number of document tokens that the line takes, once it is filled."""
        self._closing = False
        """True if the filled line gets an EOS."""
        self._offset = offset
        """Offset, in the first document, at which the line that is being filled begins."""
        self._begin: tuple[int, Token] | None = None
        """Index of the first document of the line, and the source's token (position) before it; None: the document
        still has to be read."""

    traced = True

    def __iter__(self) -> _PackedCursor:
        return self

    def __next__(self) -> torch.Tensor:
        if not self._fill():
            raise StopIteration
        body = np.concatenate(self._parts)[: self._take] if len(self._parts) > 1 else self._parts[0][: self._take]
        line = body.copy() if self._take == self._length else self._with_separators(body)
        self.origin = self._line_origin()
        self._advance()
        return torch.from_numpy(line)

    def skip(self, count: int) -> int:
        for passed in range(count):
            if not self._fill():
                return passed
            self._advance()
        return count

    def token(self) -> Token:
        index, before = self._begin or self._documents.following()
        return {"index": index, "offset": self._offset, "source": before}

    def close(self) -> None:
        self._documents.close()

    def _fill(self) -> bool:
        """Read the tokens of the next line. Returns False if too few are left for a line."""
        while self._have < self._capacity():
            document = self._documents.read()
            if document is None:
                break
            origin = self._documents.origin
            if self._begin is None:
                self._begin = self._documents.present()
                self._documents.expect("tokens", len(document), self._offset)
                document = document[self._offset :]
                origin = origin._replace(skipped={}) if self._offset else origin
            self._parts.append(document)
            self._origins.append(origin)
            self._have += len(document)
        if not self._have:
            return False
        capacity, before = self._capacity(), self._have - len(self._parts[-1])
        taken = min(self._have, capacity)
        self._closing = self._needs_eos(self._parts[-1][taken - before - 1])
        if before and not self._split and (self._have > capacity or (self._closing and taken == capacity)):
            taken, self._closing = before, self._needs_eos(self._parts[-2][-1])
        self._take = taken - (self._closing and taken == capacity)
        return self._take + self._closing == capacity or self._pad is not None

    def _needs_eos(self, last: Any) -> bool:
        """Return True if an EOS must be added to a line whose last document token is `last`."""
        return self._eos is not None and int(last) != self._eos

    def _capacity(self) -> int:
        """Return the largest number of document tokens that fit into the line: its length, or one less if a BOS has to
        be added."""
        if self._bos is None or (self._parts and int(self._parts[0][0]) == self._bos):
            return self._length
        return self._length - 1

    def _line_origin(self) -> Origin:
        """Return the origin of the line that was filled: the documents' tokens in it, by source."""
        left, parts = self._take, []
        skipped: dict[str, int] = {}
        for document, origin in zip(self._parts, self._origins, strict=True):
            taken = min(left, len(document))
            if taken:
                parts.append((origin.source, taken))
                skipped = summed(skipped, origin.skipped) if origin.skipped else skipped
            left -= taken
        return Origin(parts[0][0] if parts else "", skipped, tuple(parts))

    def _with_separators(self, body: Ints) -> Ints:
        line = np.full(self._length, 0 if self._pad is None else self._pad, np.int64)
        begin = self._length - self._capacity()
        if begin and self._bos is not None:
            line[0] = self._bos
        end = begin + len(body)
        line[begin:end] = body
        if self._closing and self._eos is not None:
            line[end] = self._eos
        return line

    def _advance(self) -> None:
        """Advance past the line that was filled. The next line begins in the document that was read last."""
        left = self._have - self._take
        if left == len(self._parts[-1]):  # no token of the last document is in the line
            self._origins = self._origins[-1:]
        else:
            self._origins = [self._origins[-1]._replace(skipped={})] if left else []
        self._have, self._parts = left, [self._parts[-1][len(self._parts[-1]) - left :]] if left else []
        self._begin = self._documents.present() if left else None
        self._offset = self._documents.size - left if left else 0


def _token(name: str, value: int | None) -> int | None:
    number = whole(name, value)
    if number is not None and not -MAX_TOKEN - 1 <= number <= MAX_TOKEN:
        raise InvalidArgumentError(f"{name} must be a token, which is an int64, got {number}")
    return number


def _tokens(name: str, values: Iterable[int]) -> frozenset[int]:
    if isinstance(values, int) or not isinstance(values, Iterable):
        raise InvalidArgumentError(f"{name} must be a list of tokens, got {values!r}")
    return frozenset(number for value in values if (number := _token(name, value)) is not None)


def _separator(token: int | None) -> Ints:
    return np.array([] if token is None else [token], np.int64)
