"""Rows of packed documents: a line of tokens with what a model needs beside them, made of parts of documents, which are
copied once. A segment is what a model should see as one text: a document, or its consecutive pieces from Chunked."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from penstock.data.arguments import one_of
from penstock.data.ordering.permutation import Ints
from penstock.data.sharded.protocol import NOWHERE, Origin, summed
from penstock.proto.errors import DatasetError, InvalidArgumentError

VARLEN = "cu_seq_lens_q"
TRANSFORMERS = {"tokens": "input_ids", "positions": "position_ids", "cu_seqlens": VARLEN}
"""Names that Hugging Face's models give to fields. Flash attention of variable length takes one row: collate_packed."""
_ROWS, _SEGMENTS = "_rows", "_segments"
"""Endings of two fields of attached items: each item's row in the batch, from 0, and segment in the row, from 1."""


class Documents(NamedTuple):
    """Document with its other columns; or several without, their tokens concatenated: token indices count there."""

    tokens: Ints
    columns: Mapping[str, npt.NDArray[Any]] = {}
    """Arrays of shape (tokens, ...), by name."""
    attached: Mapping[str, npt.NDArray[Any]] = {}
    """Arrays with any number of items for each document, such as images; shape (items, ...), by name."""
    continues: bool = False
    """True if the first one is a piece of a Chunked that continues the piece before it."""
    where: str = ""
    origins: Sequence[Origin] = ()
    ends: Sequence[int] = ()
    """Token index behind each document; empty if there is only one."""
    segment_ends: Sequence[int] = ()
    """`ends` without those at which the next piece of the same document begins."""

    def inside(self, begin: int, end: int) -> Sequence[int]:
        ends = self.segment_ends
        return ends[bisect_right(ends, begin) : bisect_left(ends, end)]

    def continues_at(self, begin: int) -> bool:
        return _has(self.ends, begin) and not _has(self.segment_ends, begin) if begin else self.continues

    def splits(self, end: int) -> bool:
        return end < len(self.tokens) and not _has(self.ends, end)

    def sizes(self, begin: int, end: int) -> Iterator[tuple[Origin, int, bool]]:
        """Yield (origin, its tokens from `begin` to `end`, True if its first is among them) for each document."""
        if not self.origins:
            yield NOWHERE, end - begin, not begin
            return
        start = 0
        for origin, until in zip(self.origins, self.ends or [len(self.tokens)], strict=True):
            if begin < until and start < end:
                yield origin, min(end, until) - max(begin, start), start >= begin
            start = until


class Part(NamedTuple):
    documents: Documents
    begin: int
    end: int


@dataclass(frozen=True)
class RowFields:
    """Which fields the rows of Packed have; documented as Packed's arguments."""

    length: int
    pad: int | None = None
    """Token that fills the end of a row that is not full; None: such a row is dropped, so all rows are full."""
    dtype: str = "int64"
    tokens: str = "tokens"
    labels: bool = False
    positions: bool = False
    segments: bool = False
    cu_seqlens: bool = False
    loss_mask: bool | str = False
    """True: mask tokens without a label; name of a column: also those whose label has 0 there; False: no mask."""
    ignore_index: int = -100
    payload: tuple[str, ...] = ()
    attached: tuple[str, ...] = ()
    shift: bool = True
    """True: labels[i] is the token after i; False: token i, unless it is a segment's first."""
    renamed: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        one_of("dtype", self.dtype, ("int32", "int64"))
        if type(self.ignore_index) is not int:
            raise InvalidArgumentError(f"ignore_index must be a whole number, got {self.ignore_index!r}")
        for name, token in (("pad", self.pad), ("ignore_index", self.ignore_index if self.labels else None)):
            if token is not None and not np.iinfo(self.dtype).min <= token <= np.iinfo(self.dtype).max:
                raise InvalidArgumentError(f"{name} must fit {self.dtype}, got {token}")
        unknown = sorted(map(str, self.renamed.keys() - {"tokens", *self._made, *self.payload}))
        if unknown:
            raise InvalidArgumentError(f"names must rename tokens, {', '.join(self._made)} or payload, got {unknown}")
        names = self.names
        if not all(isinstance(name, str) and name for name in names):
            raise InvalidArgumentError(f"names of fields must be texts, not empty, got {names}. Correct the names")
        names += [name + _ROWS for name in self.attached] + (["max_seqlen"] if self.cu_seqlens else [])  # in batches
        doubled = sorted({name for name in names if names.count(name) > 1})
        if doubled:
            raise InvalidArgumentError(f"each field of a row or batch must have a name of its own, got {doubled} twice")

    @property
    def _made(self) -> list[str]:
        return [name for name in ("labels", "positions", "segments", "cu_seqlens", "loss_mask") if getattr(self, name)]

    @cached_property
    def _others_names(self) -> list[tuple[str, str]]:
        """(own name, name in a row) of each field besides the tokens."""
        items = [name + ending for name in self.attached for ending in ("", _SEGMENTS)]
        return [(name, self.renamed.get(name, name)) for name in (*self._made, *self.payload, *items)]

    @cached_property
    def _tokens_name(self) -> str:
        return self.renamed.get("tokens", self.tokens)

    @property
    def names(self) -> list[str]:
        return [self._tokens_name, *(name for _, name in self._others_names)]

    @cached_property
    def _counted(self) -> npt.NDArray[np.int64]:
        return np.arange(self.length)

    @cached_property
    def plain(self) -> bool:
        return self == RowFields(self.length, self.pad, self.dtype)

    @property
    def columns(self) -> tuple[str, ...]:
        named = isinstance(self.loss_mask, str) and self.loss_mask not in self.payload
        return (*self.payload, *([str(self.loss_mask)] if named else []))

    def settings(self) -> dict[str, Any]:
        usual = RowFields(self.length, self.pad)
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in given.items()
            if value != getattr(usual, name)
        }

    def line(self, parts: Sequence[Part], first: int | None = None, last: int | None = None) -> torch.Tensor:
        """Return the tokens of a row: those of the parts between `first` and `last`, then `pad`."""
        line = np.empty(self.length, self.dtype)
        at = 0
        if first is not None:
            line[0], at = first, 1
        for documents, begin, end in parts:
            to = at + end - begin
            line[at:to] = documents.tokens[begin:end]
            at = to
        if last is not None:
            line[at], at = last, at + 1
        if at < self.length:
            line[at:] = 0 if self.pad is None else self.pad
        return torch.from_numpy(line)

    def lines(self, parts: Sequence[Part], count: int) -> Sequence[torch.Tensor]:
        """Return `count` rows of all parts' tokens, cut every `length`; the last is padded."""
        lines = np.empty((count, self.length), self.dtype)
        flat, at = lines.reshape(-1), 0
        for documents, begin, end in parts:
            to = min(at + end - begin, len(flat))
            flat[at:to] = documents.tokens[begin : begin + to - at]
            at = to
        flat[at:] = 0 if self.pad is None else self.pad
        return torch.from_numpy(lines).unbind()

    def row(self, parts: Sequence[Part]) -> Any:
        tokens = self.line(parts)
        return tokens if self.plain else {self._tokens_name: tokens} | self._others(parts, tokens.numpy())

    def _others(self, parts: Sequence[Part], tokens: Ints) -> dict[str, torch.Tensor]:
        segment_ends = _segment_ends(parts)
        begins = [0, *segment_ends[:-1]]
        made: dict[str, npt.NDArray[Any]] = {}
        if self.labels or self.loss_mask:
            self._add_labels(made, parts, segment_ends, tokens)
        if self.positions:
            made["positions"] = self._positions(begins, segment_ends)
        if self.segments:
            made["segments"] = self._segments(begins, segment_ends)
        if self.cu_seqlens:
            padding = [self.length] if segment_ends[-1] < self.length else []
            made["cu_seqlens"] = np.array([0, *segment_ends, *padding], np.int32)
        for name in self.payload:
            made[name] = _column(parts, name, self.length)
        for name in self.attached:
            made[name], made[name + _SEGMENTS] = _items(parts, name)
        return {name: torch.from_numpy(made[own]) for own, name in self._others_names}

    def _add_labels(
        self, made: dict[str, npt.NDArray[Any]], parts: Sequence[Part], ends: list[int], tokens: Ints
    ) -> None:
        """Shifted, the last token of a segment has no label, unless its document continues in the next row; otherwise
        its first has none, because a model that shifts would predict it from another document."""
        if not self.shift:
            self._add_own_labels(made, parts, ends, tokens)
            return
        lasts, filled = np.array(ends) - 1, ends[-1]
        split = [(at, part.documents, part.end) for at, part in _last_tokens(parts) if part.documents.splits(part.end)]
        if self.labels:
            labels = np.empty(self.length, self.dtype)
            labels[:-1] = tokens[1:]
            labels[lasts] = labels[filled:] = self.ignore_index
            for at, document, end in split:
                labels[at] = document.tokens[end]
            made["labels"] = labels
        if self.loss_mask:
            made["loss_mask"] = mask = np.zeros(self.length, np.bool_)
            mask[:filled] = True
            mask[lasts] = False
            for at, _, _ in split:
                mask[at] = True
        if isinstance(self.loss_mask, str):
            wanted = _column(parts, self.loss_mask, self.length).astype(np.bool_)
            mask[:-1] &= wanted[1:]
            for at, document, end in split:
                mask[at] = bool(document.columns[self.loss_mask][end])
            if self.labels:
                labels[~mask] = self.ignore_index

    def _add_own_labels(
        self, made: dict[str, npt.NDArray[Any]], parts: Sequence[Part], ends: list[int], tokens: Ints
    ) -> None:
        mask = np.ones(self.length, np.bool_)
        mask[[0, *ends[:-1]]] = mask[ends[-1] :] = False
        if isinstance(self.loss_mask, str):
            mask &= _column(parts, self.loss_mask, self.length).astype(np.bool_)
        if self.labels:
            made["labels"] = np.where(mask, tokens, np.array(self.ignore_index, self.dtype))
        made["loss_mask"] = mask

    def _positions(self, begins: list[int], ends: list[int]) -> npt.NDArray[Any]:
        positions = np.empty(self.length, np.int64)
        for begin, end in zip(begins, ends, strict=True):
            positions[begin:end] = self._counted[: end - begin]
        positions[ends[-1] :] = 0
        return positions

    def _segments(self, begins: list[int], ends: list[int]) -> npt.NDArray[Any]:
        segments = np.empty(self.length, np.int32)
        for number, (begin, end) in enumerate(zip(begins, ends, strict=True), 1):
            segments[begin:end] = number
        segments[ends[-1] :] = 0
        return segments


def collate_packed(rows: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return a batch of packed rows. Unlike torch's default_collate, it accepts fields whose lengths differ between
    rows: `cu_seqlens`, and attached items.

        ShardLoader(Packed(source, length=2048, cu_seqlens=True), batch_size=8, collate_fn=collate_packed)

    - Fields of equal shape are stacked: (rows, length, ...).
    - `cu_seqlens` (where each sequence begins) is computed for all rows one after the other, as Flash attention needs
      it for tokens of shape (rows * length,): an int32 tensor from 0 to rows * length.
    - `max_seqlen` is added: the length of the longest sequence (also of padding), an int64 tensor without dimensions.
    - Attached items are concatenated: (items of all rows, ...). The fields `NAME_segments` and `NAME_rows` of shape
      (items,) have the number of each item's segment in its row, from 1, and of its row, from 0.
    - With names="transformers" and cu_seqlens=True, all rows become one, (1, rows * length, ...), as models of
      transformers take it with `cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q` and `max_length_k`.
    """
    batch: dict[str, torch.Tensor] = {}
    if not rows or not all(isinstance(row, Mapping) for row in rows):
        raise InvalidArgumentError("collate_packed needs rows that are dicts. Give Packed a field, such as labels=True")
    for row in rows:
        if row.keys() != rows[0].keys():
            raise InvalidArgumentError(
                f"collate_packed needs rows with the same fields, got {', '.join(rows[0])} and {', '.join(row)}"
            )
    for name in rows[0]:
        found = [row[name] for row in rows]
        if name in ("cu_seqlens", VARLEN):
            starts = [0, *np.cumsum([int(each[-1]) for each in found]).tolist()]
            bounds = torch.cat([found[0][:1], *(each[1:] + at for each, at in zip(found, starts, strict=False))])
            longest = torch.stack([each.diff().max().long() for each in found]).max()
            if name == VARLEN:
                batch |= {VARLEN: bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}
            else:
                batch |= {name: bounds, "max_seqlen": longest}
        elif name + _SEGMENTS in rows[0]:
            batch[name] = torch.cat([each for each in found if len(each)] or found[:1])
        elif name.removesuffix(_SEGMENTS) in rows[0] and name.endswith(_SEGMENTS):
            batch[name] = torch.cat(found)
            counts = torch.tensor([len(each) for each in found])
            batch[name.removesuffix(_SEGMENTS) + _ROWS] = torch.arange(len(rows)).repeat_interleave(counts)
        else:
            batch[name] = torch.cat(found)[None] if VARLEN in rows[0] else torch.stack(found)
    return batch


class RowOrigins(Sequence[Origin]):
    """Origins of rows, each computed when it is read, because most jobs never read it."""

    def __init__(self, rows: Callable[[], Sequence[Sequence[Part]]], count: int) -> None:
        self._rows, self._count = rows, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: Any) -> Any:
        rows = self._rows()
        return [_row_origin(row) for row in rows[number]] if isinstance(number, slice) else _row_origin(rows[number])


def _has(ends: Sequence[int], end: int) -> bool:
    at = bisect_left(ends, end)
    return at < len(ends) and ends[at] == end


def _row_origin(parts: Sequence[Part]) -> Origin:
    """The source of its first token; each document's source and tokens; what was left out just before them."""
    if not any(documents.origins for documents, _, _ in parts):
        return Origin(parts=(("", sum(end - begin for _, begin, end in parts)),))
    skipped: dict[str, int] = {}
    sizes: list[tuple[str, int]] = []
    for documents, begin, end in parts:
        for origin, size, begins in documents.sizes(begin, end):
            sizes.append((origin.source, size))
            if origin.skipped and begins:
                skipped = summed(skipped, origin.skipped)
    return Origin(sizes[0][0] if sizes else "", skipped, tuple(sizes))


def _segment_ends(parts: Sequence[Part]) -> list[int]:
    ends: list[int] = []
    at = 0
    for documents, begin, end in parts:
        if at and not documents.continues_at(begin):
            ends.append(at)
        ends += [at - begin + inner for inner in documents.inside(begin, end)]
        at += end - begin
    return [*ends, at]


def _last_tokens(parts: Sequence[Part]) -> list[tuple[int, Part]]:
    """Return (index in the row of its last token, the part) for each part."""
    at, found = -1, []
    for part in parts:
        at += part.end - part.begin
        found.append((at, part))
    return found


def _column(parts: Sequence[Part], name: str, length: int) -> npt.NDArray[Any]:
    first = parts[0].documents.columns[name]
    column = np.zeros((length, *first.shape[1:]), first.dtype)
    at = 0
    for document, begin, end in parts:
        values = document.columns[name]
        _check_alike(document.where, name, values, first)
        column[at : at + end - begin] = values[begin:end]
        at += end - begin
    return column


def _items(parts: Sequence[Part], name: str) -> tuple[npt.NDArray[Any], npt.NDArray[np.int32]]:
    """Return a row's attached items, of shape (items, ...), and the number of each one's segment, from 1."""
    found = [(number, part.documents, part.documents.attached[name]) for number, part in enumerate(parts, 1)]
    full = [each for each in found if len(each[2])] or found[:1]
    for _, document, values in full:
        _check_alike(document.where, name, values, full[0][2])
    segments = np.repeat([number for number, _, _ in full], [len(values) for _, _, values in full])
    return np.concatenate([values for _, _, values in full]), segments.astype(np.int32)


def _check_alike(where: str, name: str, values: npt.NDArray[Any], first: npt.NDArray[Any]) -> None:
    if values.dtype != first.dtype or values.shape[1:] != first.shape[1:]:
        raise DatasetError(
            f"{where}: the values of {name!r} must be {first.dtype} of shape {first.shape[1:]} as in other documents "
            f"of the row, got {values.dtype} of shape {values.shape[1:]}. Make them alike by Mapped"
        )
