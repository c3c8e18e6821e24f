"""Layer that cuts documents of tokens into pieces, and adds BOS and EOS."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from penstock.data.arguments import at_least_one
from penstock.data.ordering.permutation import Ints
from penstock.data.sharded.layers.documents import Block, DocumentParser, DocumentReader, token_of
from penstock.data.sharded.layers.layer import Layer, entered
from penstock.data.sharded.layers.left_out import opened
from penstock.data.sharded.protocol import Cursor, Origin, PositionOf, SavedPosition, ShardedSource
from penstock.data.sharded.runs import Run, RunCursor
from penstock.proto.errors import DatasetError, InvalidArgumentError


class Chunked(Layer):
    """Layer that splits documents of tokens into pieces of at most `length` tokens: int64 tensors of shape (tokens,).
    BOS is put before a document's first piece, EOS after its last. A document without tokens is left out.

        Packed(Chunked(documents, length=8192, eos=2), length=2048)
    """

    keyed = True

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
            source: source of documents: tensors or arrays of integers with one dimension, or lists of integers.
            length: number of tokens in a piece, including BOS and EOS; the last piece of a document may have fewer.
            bos: token before each document; None: none.
            eos: token after each document; None: none.
            longest: largest number of a document's tokens, without BOS, EOS and what `strip_tokens` removes; a longer
                one raises DatasetError. None: no limit.
            strip_tokens: token ids that are first removed from the beginning and the end of each document, such as
                separators that the data already have.
            min_length: smallest number of tokens, counted as for `longest`; a shorter document is left out. None: 1.
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
        self, shard: int, epoch: int, seed: int, saved: SavedPosition = None, position_of: PositionOf | None = None
    ) -> Cursor:
        (index, piece), inner = entered(saved, "Chunked", "index", "piece")
        cursor = opened(self.source, shard, epoch, seed, inner)
        parser = DocumentParser("Chunked", shard, epoch, strip=self._strip)
        reader = DocumentReader(self, cursor, shard, index, parser, least=self._least)
        return _ChunkedCursor(reader, self._length, self._bos, self._eos, self._longest, piece)


class _ChunkedCursor(RunCursor):
    def __init__(
        self, reader: DocumentReader, length: int, bos: int | None, eos: int | None, longest: int | None, piece: int
    ) -> None:
        self._reader, self._length, self._longest = reader, length, longest
        self._begin = np.array([] if bos is None else [bos], np.int64)
        self._end = np.array([] if eos is None else [eos], np.int64)
        self._between = np.concatenate((self._end, self._begin))
        self._piece = piece
        self._long: Ints | None = None
        """Tokens of the document, with BOS and EOS, of which some pieces were returned and some not."""
        self._documents = self._cut = 0
        """For the mean: documents and their pieces, without those that take several calls of `take`."""

    def take(self, count: int) -> Run:
        found = self._reader.ready(1 + (count - 1) * self._documents // max(1, self._cut))
        if found is None:
            return Run()
        block, at = found
        pieces = self._whole(block, at, count)
        if not pieces:
            return self._take_pieces(block, at, count)
        tokens = self._separated(block, at, at + len(pieces))
        self._reader.passed(len(pieces))
        firsts = list(accumulate(pieces, initial=0))
        self._documents, self._cut = self._documents + len(pieces), self._cut + firsts[-1]

        def position(number: int) -> SavedPosition:
            document = bisect_right(firsts, number) - 1
            index, before = block.position(at + document)
            return {"index": index, "piece": number - firsts[document], "source": before}

        sizes = [size + len(self._between) for size in block.sizes[at : at + len(pieces)]]
        origins, continues = block.origins[at : at + len(pieces)], list[bool]()
        if len(pieces) < firsts[-1]:
            origins = [each for origin, n in zip(origins, pieces, strict=False) for each in _origins_of(origin, n)]
            continues = [number > 0 for n in pieces for number in range(n)]
            sizes = [piece for size, n in zip(sizes, pieces, strict=True) for piece in self._sizes(size, n)]
        return Run(_tensors(tokens, sizes), len(sizes), position, origins, continues, (tokens, sizes))

    def _whole(self, block: Block, at: int, count: int) -> list[int]:
        """Return the pieces of each next document that fits whole into a call; none after one that was begun."""
        if self._piece:
            return []
        found, left = list[int](), count
        more, length, longest = len(self._between), self._length, self._longest
        for size in block.sizes[at : at + count]:
            pieces = -(-(size + more) // length)
            if pieces > left or (found and longest is not None and size > longest):  # the next call raises the error
                break
            found.append(pieces)
            left -= pieces
        if found:
            self._pieces(block.sizes[at])
        return found

    def _take_pieces(self, block: Block, at: int, count: int) -> Run:
        pieces, first, length = self._pieces(block.sizes[at]), self._piece, self._length
        self._reader.expect("pieces", pieces, first)
        if self._long is None:
            self._long = self._separated(block, at, at + 1)
        taken = min(pieces - first, count)
        tokens = self._long[first * length : (first + taken) * length]
        self._advance(taken, pieces)

        def position(number: int) -> SavedPosition:
            index, before = block.position(at)
            return {"index": index, "piece": first + number, "source": before}

        sizes, continues = self._sizes(len(tokens), taken), [first > 0, *([True] * (taken - 1))]
        origins = _origins_of(block.origins[at], first + taken)[first:] if block.origins else ()
        return Run(_tensors(tokens, sizes), taken, position, origins, continues, (tokens, sizes))

    def _sizes(self, tokens: int, pieces: int) -> list[int]:
        return [*([self._length] * (pieces - 1)), tokens - self._length * (pieces - 1)]

    def skip(self, count: int) -> int:
        left = count
        while left and (found := self._reader.ready(left)) is not None:
            pieces = self._pieces(found[0].sizes[found[1]])
            self._reader.expect("pieces", pieces, self._piece)
            passed = min(left, pieces - self._piece)
            self._advance(passed, pieces)
            left -= passed
        return count - left

    def saved_position(self) -> SavedPosition:
        index, before = self._reader.following()
        return {"index": index, "piece": self._piece, "source": before}

    def close(self) -> None:
        self._reader.close()

    def _pieces(self, size: int) -> int:
        if self._longest is not None and size > self._longest:
            raise DatasetError(f"{self._reader.where()} must have at most longest={self._longest} tokens, got {size}")
        return -(-(size + len(self._between)) // self._length)

    def _separated(self, block: Block, at: int, until: int) -> Ints:
        """Return documents `at` to `until` of a block, each with BOS and EOS, as a writable copy."""
        arrays = [self._between] * (2 * (until - at) + 1)
        arrays[0], arrays[-1] = self._begin, self._end
        arrays[1::2] = block.arrays[at:until]
        return np.concatenate(arrays, dtype=np.int64)

    def _advance(self, count: int, pieces: int) -> None:
        self._piece += count
        if self._piece == pieces:
            self._reader.passed(1)
            self._long, self._piece = None, 0


def _origins_of(document: Origin, pieces: int) -> list[Origin]:
    """Only the first piece's origin contains what was left out before the document."""
    later = document._replace(skipped={}) if document.skipped else document
    return [document, *([later] * (pieces - 1))]


def _tensors(tokens: Ints, sizes: Sequence[int]) -> Iterator[torch.Tensor]:
    """Yield pieces as copies, so that one that is kept does not keep the others in memory."""
    at = 0
    for size in sizes:
        piece = tokens[at : at + size]
        yield torch.from_numpy(piece if len(sizes) == 1 else piece.copy())
        at += size


def _tokens_of(name: str, values: Iterable[int]) -> frozenset[int]:
    if isinstance(values, int) or not isinstance(values, Iterable):
        raise InvalidArgumentError(f"{name} must be a list of token ids, got {values!r}. Pass a list, such as [0]")
    return frozenset(number for value in values if (number := token_of(name, value)) is not None)
