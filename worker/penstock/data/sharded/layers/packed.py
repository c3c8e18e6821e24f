"""Layer that packs documents of tokens into lines of equal length: in order, or by best fit within windows.

In order, a line may begin within a document: the state has the source's saved position before this document, and an
offset in it. By best fit, the documents of a window are sorted by length, and each goes into the line in which it
leaves the least space (best-fit decreasing). No line has documents of several windows, because lines that wait for more
would have to be saved: the state has the window's beginning and the number of its yielded lines.

So a state contains no tokens, and a change of topology loses none: lines and windows belong to their shard.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Literal, get_args

from penstock.data.arguments import at_least_one, one_of, truth
from penstock.data.sharded.layers.documents import Block, DocumentParser, DocumentReader, located, token_of
from penstock.data.sharded.layers.layer import Layer, SearchLimit, entered
from penstock.data.sharded.layers.left_out import opened
from penstock.data.sharded.layers.packed_rows import TRANSFORMERS, Documents, Part, RowFields, RowOrigins
from penstock.data.sharded.layers.windows import WindowCursor
from penstock.data.sharded.protocol import NOWHERE, Cursor, Origin, PositionOf, SavedPosition, ShardedSource
from penstock.data.sharded.runs import Run, RunCursor
from penstock.proto.errors import InvalidArgumentError

Long = Literal["split", "truncate", "refuse"]
LEAST_READ = 4
"""Fewest lines for which documents are read in one call, which takes about as long as copying a line."""
SKIPPED_AT_ONCE = 16
"""Most lines for which documents are read in one call while lines are skipped."""


class Packed(Layer):
    """Layer that packs a shard's documents into lines of exactly `length` tokens: in order, or with `window=` by best
    fit.

        Packed(documents, length=2048, pad=0, split=False, window=1000, labels=True, names="transformers")

    A line is a tensor of shape (length,) and dtype `dtype`. With any of the arguments from `tokens` to `attached`, it
    is a dict of tensors, the fields. A segment is the part of a document that is in one line. If the source is a
    Chunked, or a Repeated of one, and packing is in order, consecutive pieces of one document are one segment.
    """

    keyed = True

    def __init__(
        self,
        source: ShardedSource,
        *,
        length: int,
        pad: int | None = None,
        bos: int | None = None,
        eos: int | None = None,
        split: bool = True,
        long: Long = "split",
        window: int | None = None,
        dtype: Literal["int64", "int32"] = "int64",
        tokens: str = "tokens",
        labels: bool = False,
        shift: bool | None = None,
        positions: bool = False,
        segments: bool = False,
        cu_seqlens: bool = False,
        loss_mask: bool | str = False,
        ignore_index: int = -100,
        payload: Iterable[str] = (),
        attached: Iterable[str] = (),
        names: Literal["transformers"] | Mapping[str, str] | None = None,
    ) -> None:
        """
        Args:
            source: source of documents, as for `Chunked`; or a `Chunked`, which puts BOS and EOS between documents; or
                a source of dicts with the tokens in the field `tokens`.
            length: number of tokens of each line, including BOS and EOS.
            pad: token that fills up incomplete lines; None: an incomplete last line of a shard's epoch is dropped. Over
                a Repeated no line is the last: a line continues with documents of the next epoch.
            bos: token with which each line begins, added unless the line's first token is this one. Must be None if
                lines are dicts, and with `long` or `window`.
            eos: token with which each line ends, before any `pad`, added unless the line's last token is this one. Must
                be None if `bos` must.
            split: True: a document that does not fit into a line continues in the next one. False: it begins in the
                next line, after `pad`; only a document longer than a line is split.
            long: what happens to a document longer than a line, with split=False. "split": it fills several lines;
                "truncate": its end is left out; "refuse": a DatasetError names the document.
            window: number of a shard's documents that are packed by best fit with each other, with split=False; None:
                in order. A worker keeps one window in memory for each shard that it reads.
            dtype: dtype of tokens and labels. A token that does not fit is a DatasetError.
            tokens: name of the field with the tokens, in samples that are dicts, and in lines that are dicts.
            labels: True: add the field `labels` of shape (length,), with `ignore_index` where there is none.
            shift: which token `labels[i]` is; needed with `labels` or `loss_mask`. True: the document's token after
                token i, also if that is in the next line, for a loop that compares logits[i] with labels[i]. False:
                token i, but none for a segment's first, for a model that shifts labels itself.
            positions: True: add the field `positions`, int64 of shape (length,): the index of each token in its
                segment, from 0 in each line, and 0 for padding.
            segments: True: add the field `segments`, int32 of shape (length,): the number of each token's segment in
                the line, from 1, and 0 for padding.
            cu_seqlens: True: add the field `cu_seqlens`, int32 of shape (segments + 1,), for attention kernels: the
                index at which each segment begins, then `length`. Padding counts as a segment. Use `collate_packed` to
                make batches.
            loss_mask: True: add the field `loss_mask`, bool of shape (length,): True where `labels` has one. Name of a
                column with one value for each token: a token with the value 0 there is not used as a label, so
                `labels` has `ignore_index` in its place.
            ignore_index: value in `labels` for tokens without a label.
            payload: names of columns with one value for each token, or one array, all of the same shape. Each becomes a
                field of shape (length, ...) with zeros for padding.
            attached: names of columns with any number of items for each document, such as patches of images. Each
                becomes a field NAME of shape (items, ...), and a field NAME_segments, int32 of shape (items,): the
                number of each item's segment in the line, from 1. Needs split=False, long="refuse", and
                `collate_packed` to make batches.
            names: other names for fields. "transformers": for models of Hugging Face: `input_ids`; `labels` with
                shift=False; always `position_ids`, which keep documents apart while no `attention_mask` is given; with
                `cu_seqlens` and `collate_packed`, the arguments of Flash attention.
        """
        super().__init__(source)
        if names == "transformers":
            if shift:
                raise InvalidArgumentError(
                    "shift must be False with names='transformers': its models shift labels, too"
                )
            shift, positions = False, True
            given = {"tokens", "positions", *(["cu_seqlens"] if cu_seqlens else [])}
            names = {name: TRANSFORMERS[name] for name in TRANSFORMERS if name in given}
        elif isinstance(names, str) or not isinstance(names or {}, Mapping):
            raise InvalidArgumentError(f"names must be 'transformers' or a dict of names, got {names!r}")
        if shift is None and (labels or loss_mask):
            raise InvalidArgumentError(
                "labels and loss_mask need shift: True if the loop compares logits[i] with labels[i] (torchtitan, "
                "cross_entropy), False if the model shifts labels itself (transformers, TRL)"
            )
        self._length, self._pad = at_least_one("length", length), token_of("pad", pad)
        self._bos, self._eos = token_of("bos", bos), token_of("eos", eos)
        self._split, self._long = bool(split), long
        self._window = None if window is None else at_least_one("window", window)
        self._fields = RowFields(
            length=self._length,
            pad=self._pad,
            dtype=dtype,
            tokens=tokens,
            labels=truth("labels", labels),
            positions=truth("positions", positions),
            segments=truth("segments", segments),
            cu_seqlens=truth("cu_seqlens", cu_seqlens),
            loss_mask=loss_mask if isinstance(loss_mask, str) else truth("loss_mask", loss_mask),
            ignore_index=ignore_index,
            payload=_names("payload", payload),
            attached=_names("attached", attached),
            shift=True if shift is None else truth("shift", shift),
            renamed=dict(names or {}),
        )
        self._check()

    def settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = {"length": self._length, "pad": self._pad}
        if not self._split:
            settings["split"] = False
        if self._long != "split":
            settings["long"] = self._long
        given = (("bos", self._bos), ("eos", self._eos), ("window", self._window))
        return settings | {name: value for name, value in given if value is not None} | self._fields.settings()

    def open(
        self, shard: int, epoch: int, seed: int, saved: SavedPosition = None, position_of: PositionOf | None = None
    ) -> Cursor:
        longest = None if self._long == "split" else (self._length, self._long == "truncate")
        parser = DocumentParser("Packed", shard, epoch, fields=self._fields, longest=longest)
        if self._window is not None:
            return self._open_windows(parser, self._window, shard, epoch, seed, saved)
        (index, offset), inner = entered(saved, "Packed", "index", "offset")
        reader = DocumentReader(self, opened(self.source, shard, epoch, seed, inner), shard, index, parser)
        if self._split and self._bos is None and self._eos is None:
            return _StreamCursor(reader, self._fields, offset)
        return _LineCursor(reader, self._fields, self._bos, self._eos, self._split, offset)

    def _open_windows(
        self, parser: DocumentParser, window: int, shard: int, epoch: int, seed: int, saved: SavedPosition
    ) -> Cursor:
        (number, done), inner = entered(saved, "Packed", "window", "done")

        left_out: dict[str, int] = {}
        """Documents without tokens, by source, that are still to be counted with one of a later window."""

        def lines(samples: list[Any], origins: list[Origin], number: int) -> tuple[list[Any], list[Origin]]:
            nonlocal left_out
            documents = [parser.document(sample, number * window + at) for at, sample in enumerate(samples)]
            if origins or left_out or not all(len(document.tokens) for document in documents):
                documents, left_out = _all_located(documents, origins or [NOWHERE] * len(samples), left_out)
            parts = [
                Part(document, begin, min(begin + self._length, len(document.tokens)))
                for document in documents
                for begin in range(0, len(document.tokens), self._length)
            ]
            fitted = best_fit([part.end - part.begin for part in parts], self._length)
            return [[parts[at] for at in line] for line in fitted], []

        cursor, where = opened(self.source, shard, epoch, seed, inner), f"Packed: shard {shard}, epoch {epoch}"
        limit = SearchLimit(self.source, "Packed", shard)
        return _FittedCursor(self._fields, cursor, window, lines, number, done, where, limit)

    def _check(self) -> None:
        separators = (self._bos is not None) + (self._eos is not None)
        if self._length <= separators:
            raise InvalidArgumentError(f"length must leave room for a token besides BOS and EOS, got {self._length}")
        if not self._split and self._pad is None:
            raise InvalidArgumentError("split=False needs a token that fills up lines, got pad=None. Pass pad")
        one_of("long", self._long, get_args(Long))
        if self._split and (self._long != "split" or self._window is not None):
            raise InvalidArgumentError("long and window need split=False")
        if separators and (not self._fields.plain or self._long != "split" or self._window is not None):
            raise InvalidArgumentError("bos and eos must be left out if lines are dicts, and with long or window")
        if self._fields.attached and (self._split or self._long != "refuse"):
            raise InvalidArgumentError("attached needs split=False and long='refuse'")


def best_fit(sizes: Sequence[int], length: int) -> list[list[int]]:
    """Pack by best-fit decreasing. Return the ascending item numbers of each line, sorted by their first."""
    lines: list[list[int]] = []
    spaces: list[tuple[int, int]] = []
    for item in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        size = sizes[item]
        at = bisect_left(spaces, (size, -1))
        if at < len(spaces):
            space, line = spaces.pop(at)
            lines[line].append(item)
        else:
            space, line = length, len(lines)
            lines.append([item])
        if space > size:
            insort(spaces, (space - size, line))
    return sorted(sorted(line) for line in lines)


def _all_located(
    documents: Sequence[Documents], origins: Sequence[Origin], left_out: dict[str, int]
) -> tuple[list[Documents], dict[str, int]]:
    """Return a window's documents that have tokens, with their origins, and the number of others, by source, to count
    with a later window. Each is counted with the document after it; those at the window's end with the last before
    them, because a state between two windows contains no such number."""
    found: list[Documents] = []
    for document, origin in zip(documents, origins, strict=True):
        if len(document.tokens):
            found.append(located(document, origin, left_out))
            left_out = {}
        else:
            left_out = origin.leaving_out(left_out)
    if found and left_out:
        found[-1] = located(found[-1], (found[-1].origins or (NOWHERE,))[0], left_out)
        left_out = {}
    return found, left_out


class _FittedCursor(WindowCursor):
    def __init__(self, fields: RowFields, *window: Any) -> None:
        super().__init__(*window)
        self._fields = fields

    def take(self, count: int) -> Run:
        run = super().take(count)
        lines = list(run.samples)
        return Run(map(self._fields.row, lines), run.size, run.position, RowOrigins(lambda: lines, len(lines)))


class _InOrder(RunCursor):
    def __init__(self, reader: DocumentReader, fields: RowFields, offset: int) -> None:
        self._reader, self._fields = reader, fields
        self._parts: list[Part] = []
        """Tokens that are not in a line yet. The first part begins the next line, the last one ends a document."""
        self._blocks: list[Block] = []
        """Block from which each of `_parts` comes."""
        self._have = 0
        self._offset = offset
        """After a resume: tokens of the next document that belong to earlier lines, until it is read."""
        self._documents = self._tokens = 0
        """For the mean length."""

    def saved_position(self) -> SavedPosition:
        if self._parts:
            return _position(self._blocks, self._parts, 0)
        return _saved(self._reader.following(), self._offset)

    def close(self) -> None:
        self._reader.close()

    def _add(self, lines: int, wanted: int) -> bool:
        """Add up to `wanted` tokens of a block to `_parts`. Return False at the shard's end. `lines`: to fill soon."""
        found = self._reader.ready(self._expected(lines))
        if found is None:
            return False
        block, at = found
        begin = block.start(at)
        if self._offset and not self._parts:
            self._reader.expect("tokens", block.sizes[at], self._offset)
            begin += self._offset
        last = min(bisect_left(block.ends, begin + wanted - self._have, at), len(block.ends) - 1)
        end = block.ends[last]
        self._parts.append(Part(block.documents, begin, end))
        self._blocks.append(block)
        self._have += end - begin
        self._offset = 0
        self._documents += last + 1 - at
        self._tokens += end - begin
        self._reader.passed(last + 1 - at)
        return True

    def _expected(self, lines: int) -> int:
        """Return documents to read: a quarter more than the mean, as a second call takes as long as several."""
        missing = max(lines, LEAST_READ) * self._fields.length - self._have
        return 1 + 5 * missing * self._documents // max(1, 4 * self._tokens)

    def _drop(self, count: int) -> None:
        self._have -= count
        full = 0
        for _, begin, end in self._parts:
            if count < end - begin:
                break
            count -= end - begin
            full += 1
        del self._parts[:full], self._blocks[:full]
        if count:
            documents, begin, end = self._parts[0]
            self._parts[0] = Part(documents, begin + count, end)


class _StreamCursor(_InOrder):
    """Cursor for split=True without BOS and EOS: all tokens are cut one after the other, many lines at once."""

    def take(self, count: int) -> Run:
        lines = self._fill(count)
        parts, blocks, length = self._parts.copy(), self._blocks.copy(), self._fields.length
        cut = cache(lambda: _cut(parts, length)[:lines])
        self._drop(min(self._have, lines * length))
        rows = self._fields.lines(parts, lines) if self._fields.plain else map(self._fields.row, cut())
        return Run(rows, lines, lambda number: _position(blocks, parts, number * length), RowOrigins(cut, lines))

    def skip(self, count: int) -> int:
        left = count
        while left and (lines := self._fill(min(left, SKIPPED_AT_ONCE))):
            self._drop(min(self._have, lines * self._fields.length))
            left -= lines
        return count - left

    def _fill(self, count: int) -> int:
        """Read documents for up to `count` lines. Return the number of lines that can be made."""
        length = self._fields.length
        while self._have < count * length and self._add(count, count * length):
            pass
        lines, rest = divmod(self._have, length)
        return min(count, lines + (rest > 0 and self._fields.pad is not None))


class _LineCursor(_InOrder):
    """Cursor for split=False, or with BOS or EOS, whose lines take different numbers of tokens."""

    def __init__(
        self,
        reader: DocumentReader,
        fields: RowFields,
        bos: int | None,
        eos: int | None,
        split: bool,
        offset: int,
    ) -> None:
        super().__init__(reader, fields, offset)
        self._bos, self._eos, self._split = bos, eos, split
        self._take = 0
        """Tokens of the next line, set by `_fill`."""
        self._closing = False
        """True if it gets an EOS."""

    def take(self, count: int) -> Run:
        lines: list[list[Part]] = []
        rows: list[Any] = []
        begins: list[tuple[list[Block], list[Part]]] = []
        while len(rows) < count and self._fill(count - len(rows)):
            begins.append((self._blocks[:1], self._parts[:1]))
            lines.append(_cut(self._parts, self._take)[0])
            rows.append(self._row(lines[-1]))
            self._drop(self._take)
        return Run(rows, len(rows), lambda number: _position(*begins[number], 0), RowOrigins(lambda: lines, len(lines)))

    def skip(self, count: int) -> int:
        for passed in range(count):
            if not self._fill(min(count - passed, SKIPPED_AT_ONCE)):
                return passed
            self._drop(self._take)
        return count

    def _row(self, parts: list[Part]) -> Any:
        if self._bos is None and self._eos is None:
            return self._fields.row(parts)
        opening = self._bos if self._capacity() < self._fields.length else None
        return self._fields.line(parts, opening, self._eos if self._closing else None)

    def _fill(self, lines: int) -> bool:
        """Read documents for the next line. Return False if there are too few tokens."""
        if not self._parts and not self._add(lines, 1):
            return False
        capacity = self._capacity()
        while self._have < capacity and self._add(lines, capacity):
            pass
        before, taken = self._have - self._last_size(), min(self._have, capacity)
        self._closing = self._needs_eos(taken)
        if before and not self._split and (self._have > capacity or (self._closing and taken == capacity)):
            taken, self._closing = before, self._needs_eos(before)
        self._take = taken - (self._closing and taken == capacity)
        return self._take + self._closing == capacity or self._fields.pad is not None

    def _last_size(self) -> int:
        (_, begin, end), block = self._parts[-1], self._blocks[-1]
        return end - max(begin, block.start(bisect_left(block.ends, end)))

    def _needs_eos(self, taken: int) -> bool:
        if self._eos is None:
            return False
        back = self._have - taken
        for documents, begin, end in reversed(self._parts):
            if back < end - begin:
                return int(documents.tokens[end - back - 1]) != self._eos
            back -= end - begin
        raise AssertionError("a line has at least one token")

    def _capacity(self) -> int:
        length = self._fields.length
        if self._bos is None:
            return length
        documents, begin, _ = self._parts[0]
        return length if int(documents.tokens[begin]) == self._bos else length - 1


def _cut(parts: Sequence[Part], length: int) -> list[list[Part]]:
    lines: list[list[Part]] = [[]]
    room = length
    for documents, begin, end in parts:
        while begin < end:
            if not room:
                lines.append([])
                room = length
            until = min(end, begin + room)
            lines[-1].append(Part(documents, begin, until))
            room -= until - begin
            begin = until
    return lines


def _position(blocks: Sequence[Block], parts: Sequence[Part], token: int) -> SavedPosition:
    """Return the saved position of a line that begins with token number `token` of `parts`."""
    for block, (_, begin, end) in zip(blocks, parts, strict=True):
        if token < end - begin:
            at = bisect_right(block.ends, begin + token)
            return _saved(block.position(at), begin + token - block.start(at))
        token -= end - begin
    raise AssertionError("a line has at least one token")


def _saved(before: tuple[int, SavedPosition], offset: int) -> SavedPosition:
    index, source = before
    return {"index": index, "offset": offset, "source": source}


def _names(name: str, values: Iterable[str]) -> tuple[str, ...]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise InvalidArgumentError(f"{name} must be a list of names of columns, got {values!r}")
    return tuple(values)
