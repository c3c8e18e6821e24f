"""Documents of tokens, cut into pieces, and packed into lines of one length.

A line is filled across documents, so a saved place lies in the middle of one. What is saved is where the open line
begins: the source's token before that document, and an offset. After a resume the document is read again and the line
made anew; no token of text is kept in a state, and none is lost by a change of topology, for the open line belongs to
its shard and not to the worker.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from penstock.data.arguments import at_least_one, whole
from penstock.data.ordering.permutation import Ints
from penstock.data.sharded.layers.layer import Layer, SearchLimit, entered
from penstock.data.sharded.protocol import Cursor, Place, ShardedSource, Token
from penstock.proto.errors import DatasetError, InvalidArgumentError

__all__ = ["Chunked", "Packed"]


MOST = (1 << 63) - 1
"""Of a token: lines and pieces are int64."""


class Chunked(Layer):
    """Documents in pieces of bounded length, int64 tensors: BOS before the first piece and EOS behind the last one of
    each document. A document without tokens is left out."""

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
            source: of documents: tensors or arrays of integers with one dimension, or lists of integers.
            length: tokens of a piece at most, BOS and EOS among them; the last piece of a document has what is left.
            bos: token before each document; None: none.
            eos: token behind each document; None: none.
            longest: tokens that a document may have, without BOS and EOS; a longer one is a DatasetError.
            strip_tokens: tokens that are taken off both ends of each document first, such as separators that are in
                the data already.
            min_length: tokens that a document must have, without BOS and EOS, behind `strip_tokens`; a shorter one is
                left out.
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
    """Lines of exactly `length` tokens: int64 tensors, filled with the documents of a shard one after the other."""

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
            source: of documents, or pieces of them: as for `Chunked`, which also puts the separators between them.
            length: tokens of each line, BOS and EOS among them.
            pad: token that fills the last line of a shard's epoch; None: what is left there is dropped. Over a
                Repeated source no line is the last one: it goes on with the next epoch.
            bos: token that each line begins with; put there where the documents do not have it anyway.
            eos: token that each line ends with, in the same way; before the `pad` of a line that is filled up.
            split: False: a line ends before a document that would not fit, and is filled up with `pad`; only one that
                is longer than a line is split.
        """
        super().__init__(source)
        self._length, self._pad = at_least_one("length", length), _token("pad", pad)
        self._bos, self._eos = _token("bos", bos), _token("eos", eos)
        if self._length <= (bos is not None) + (eos is not None):
            raise InvalidArgumentError(
                f"length={length}: a line must hold a token beside its BOS and EOS; make it longer"
            )
        if not split and pad is None:
            raise InvalidArgumentError("split=False: a line that has room left must be filled up; give its pad token")
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
    """The documents of a shard as arrays, and from where to read the present one again."""

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
        """`strip`: tokens that are taken off both ends. `least`: tokens of a document that is not left out."""
        self._strip, self._least = strip, least
        self._name, self._inner, self._shard, self._epoch = type(layer).__name__, inner, shard, epoch
        self._patience = SearchLimit(layer.source, self._name, shard)
        self._next = index
        self._index, self._before, self.size = index, None, 0
        """Of the present document; the source's token before it; its tokens."""

    @property
    def where(self) -> str:
        return f"{self._name}: document {self._index} of shard {self._shard} in epoch {self._epoch}"

    def read(self) -> Ints | None:
        """The next document that has enough tokens; None if there is none left."""
        while True:
            before = self._inner.token()
            try:
                sample = next(self._inner)
            except StopIteration:
                return None
            self._before, self._index, self._next = before, self._next, self._next + 1
            document = self._stripped(self._array(sample))
            self.size = len(document)
            if self.size >= self._least:
                self._patience.found()
                return document
            self._patience.nothing()

    def present(self) -> tuple[int, Token]:
        """Index of the present document, and the source's token before it."""
        return self._index, self._before

    def behind(self) -> tuple[int, Token]:
        """Index of the next document, and the source's token before it."""
        return self._next, self._inner.token()

    def expect(self, what: str, there: int, at: int) -> None:
        """Raises DatasetError unless the present document, of so many `what`, has one of number `at`."""
        if at >= there:
            raise DatasetError(
                f"{self.where} has {there} {what}, but the state stands at {at} of them: these are other data than "
                "those it was saved with"
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
        kind = f"a {type(sample).__name__}"
        if isinstance(sample, torch.Tensor):
            sample = sample.numpy(force=True)
        if isinstance(sample, (np.ndarray, list, tuple)):
            try:
                array = np.asarray(sample)
            except ValueError:  # lists of lists of different lengths
                array = np.asarray(sample, object)
            if array.shape == (0,):  # of no list can be said what it would hold
                return np.zeros(0, np.int64)
            if array.dtype == np.uint64 and array.size and array.max() > MOST:
                raise DatasetError(f"{self.where} has a token {array.max()}, more than int64 holds")
            if array.ndim == 1 and array.dtype.kind in "iu":
                return array.astype(np.int64, copy=False)
            kind = f"{array.dtype} of shape {array.shape}"
        raise DatasetError(
            f"{self.where} is {kind}; it must be a tensor, an array or a list of integers with one dimension. Use "
            "Mapped to make its tokens"
        )


class _ChunkedCursor:
    def __init__(
        self, documents: _Documents, length: int, bos: int | None, eos: int | None, longest: int | None, piece: int
    ) -> None:
        self._documents, self._length, self._longest = documents, length, longest
        self._bos, self._eos = _separator(bos), _separator(eos)
        self._document: Ints | None = None
        """The open one with its separators; None: to be read."""
        self._pieces = 0
        """Of the open document."""
        self._piece = piece
        """The next one of the open document, or of that to be read."""

    def __iter__(self) -> _ChunkedCursor:
        return self

    def __next__(self) -> torch.Tensor:
        document = self._open()
        if document is None:
            raise StopIteration
        start = self._piece * self._length
        self._past(1)
        return torch.from_numpy(document[start : start + self._length])

    def skip(self, count: int) -> int:
        left = count
        while left and self._open() is not None:
            passed = min(left, self._pieces - self._piece)
            self._past(passed)
            left -= passed
        return count - left

    def token(self) -> Token:
        index, before = self._documents.behind() if self._document is None else self._documents.present()
        return {"index": index, "piece": self._piece, "source": before}

    def close(self) -> None:
        self._documents.close()

    def _open(self) -> Ints | None:
        """The open document; None behind the last one."""
        if self._document is None and (document := self._documents.read()) is not None:
            if self._longest is not None and len(document) > self._longest:
                raise DatasetError(
                    f"{self._documents.where} has {len(document)} tokens, more than longest={self._longest}: "
                    "a document longer than allowed. Allow more, or leave such documents out by Filtered"
                )
            self._document = np.concatenate([self._bos, document, self._eos])  # ours: pieces may be written to
            self._pieces = -(-len(self._document) // self._length)
            self._documents.expect("pieces", self._pieces, self._piece)
        return self._document

    def _past(self, count: int) -> None:
        """Go on behind so many pieces of the open document."""
        self._piece += count
        if self._piece == self._pieces:
            self._document, self._piece = None, 0


class _PackedCursor:
    """What is read of the open line is some documents, of which it may begin within the first. Only of that one, and of
    the last, where the next line may begin, it must be known from where to read them again."""

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
        """Tokens that were read from the open line's beginning on."""
        self._have = 0
        """Their number."""
        self._take = 0
        """Tokens of them that the open line has, once it is filled."""
        self._closing = False
        """The filled line's EOS is put there."""
        self._offset = offset
        """Of the open line's beginning in its document, which may be still to be read."""
        self._begin: tuple[int, Token] | None = None
        """That document's index, and the source's token before it; None: it is still to be read."""

    def __iter__(self) -> _PackedCursor:
        return self

    def __next__(self) -> torch.Tensor:
        if not self._fill():
            raise StopIteration
        body = np.concatenate(self._parts)[: self._take] if len(self._parts) > 1 else self._parts[0][: self._take]
        line = body.copy() if self._take == self._length else self._with_separators(body)
        self._past()
        return torch.from_numpy(line)

    def skip(self, count: int) -> int:
        for passed in range(count):
            if not self._fill():
                return passed
            self._past()
        return count

    def token(self) -> Token:
        index, before = self._begin or self._documents.behind()
        return {"index": index, "offset": self._offset, "source": before}

    def close(self) -> None:
        self._documents.close()

    def _fill(self) -> bool:
        """Read a line's tokens. False if there are not enough any more."""
        while self._have < self._room():
            document = self._documents.read()
            if document is None:
                break
            if self._begin is None:
                self._begin = self._documents.present()
                self._documents.expect("tokens", len(document), self._offset)
                document = document[self._offset :]
            self._parts.append(document)
            self._have += len(document)
        if not self._have:
            return False
        room, before = self._room(), self._have - len(self._parts[-1])
        taken = min(self._have, room)
        self._closing = self._needs_eos(self._parts[-1][taken - before - 1])
        if before and not self._split and (self._have > room or (self._closing and taken == room)):
            taken, self._closing = before, self._needs_eos(self._parts[-2][-1])
        self._take = taken - (self._closing and taken == room)
        return self._take + self._closing == room or self._pad is not None

    def _needs_eos(self, last: Any) -> bool:
        """A line whose last token of documents is this one gets an EOS behind it."""
        return self._eos is not None and int(last) != self._eos

    def _room(self) -> int:
        """Tokens of documents that the open line has at most: without a BOS that is put before them."""
        if self._bos is None or (self._parts and int(self._parts[0][0]) == self._bos):
            return self._length
        return self._length - 1

    def _with_separators(self, body: Ints) -> Ints:
        line = np.full(self._length, 0 if self._pad is None else self._pad, np.int64)
        begin = self._length - self._room()
        if begin and self._bos is not None:
            line[0] = self._bos
        end = begin + len(body)
        line[begin:end] = body
        if self._closing and self._eos is not None:
            line[end] = self._eos
        return line

    def _past(self) -> None:
        """Go on behind the open line: what is left lies within the document that was read last."""
        left = self._have - self._take
        self._have, self._parts = left, [self._parts[-1][len(self._parts[-1]) - left :]] if left else []
        self._begin = self._documents.present() if left else None
        self._offset = self._documents.size - left if left else 0


def _token(name: str, value: int | None) -> int | None:
    number = whole(name, value)
    if number is not None and not -MOST - 1 <= number <= MOST:
        raise InvalidArgumentError(f"{name}={number}: a token is an int64")
    return number


def _tokens(name: str, values: Iterable[int]) -> frozenset[int]:
    if isinstance(values, int) or not isinstance(values, Iterable):
        raise InvalidArgumentError(f"{name} must be a list of tokens, got {values!r}")
    return frozenset(number for value in values if (number := _token(name, value)) is not None)


def _separator(token: int | None) -> Ints:
    return np.array([] if token is None else [token], np.int64)
