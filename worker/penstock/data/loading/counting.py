"""Counting of samples by source and key, for the loaders' argument `counts`. A *group* is a pair (source, key), such as
("web", "en"), a *row* the list of its counts (penstock.proto.state.counts)."""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from penstock.data.stop_iteration import stop_iteration_error
from penstock.proto.errors import DatasetError, InvalidArgumentError, StateMismatchError
from penstock.proto.state.counts import (
    BINS,
    COUNTS,
    FIELDS,
    SAMPLES,
    SKIPPED,
    TOKENS,
    TRUNCATED,
    Group,
    Row,
    Rows,
    Tally,
    aggregated_counts,
    counts_part,
    cut_name,
    new_row,
    plain_rows,
    saved_rows,
)

TOKEN_FIELDS = ("input_ids", "tokens", "token_ids")
"""Fields in which tokens are looked for if `Counts` names none; the first that the sample has."""

MOST_TOKENS = 1 << 40
NONE = "(none)"
"""Key of samples for which `Counts(by=...)` gives None."""

_Part = str | Callable[[Any], Any]


@dataclass(frozen=True)
class Counts:
    """Settings of the counts of a MapLoader, StreamingLoader or ShardLoader: samples, tokens, truncated and skipped
    samples, and lengths, by source (the Mixture's source or the dataset's stream) and by key.

        MapLoader(dataset, batch_size=32, counts=Counts(by="language", tokens="input_ids"))

    They are in `executor.stats.sources` and `.keys`, in saved states, and in metrics: see docs/counts.md.
    """

    by: _Part | None = None
    """Key of a sample: name of a field, or function from the sample to a text or a number; None: no keys. Beyond 95
    pairs of source and key, samples are counted together, as "(other)"."""
    tokens: _Part | None = None
    """Tokens of a sample: name of a field, or function from the sample; its value is their number, or an object of this
    length. None: the sample if it is a 1-D list, array or tensor of integers, or its field input_ids, tokens or
    token_ids."""
    truncated: _Part | None = None
    """Bool field, or function from the sample to a bool: True if it was truncated. None: not counted."""

    def __post_init__(self) -> None:
        for name in ("by", "tokens", "truncated"):
            value = getattr(self, name)
            if value is not None and not callable(value) and (not isinstance(value, str) or not value):
                raise InvalidArgumentError(f"Counts({name}=...) must name a field or be a function, got {value!r:.100}")


class CountedBatch(NamedTuple):
    """Batch with its samples' counts, as threads and processes make it."""

    batch: Any
    counted: dict[Group, Row]
    rows: Sequence[int] | None = None
    """Rows of the plan that the batch has; None: all."""


class LeftOut:
    """Stands, as a class, for a sample that was left out, until its batch is counted and collated."""


class SampleCounter:
    """Counter of a batch's samples. It has only settings, so it can be sent to another process."""

    def __init__(self, counts: Counts) -> None:
        self._by, self._tokens, self._truncated = counts.by, counts.tokens, counts.truncated

    def count(
        self,
        samples: Sequence[Any],
        sources: Sequence[str] | None = None,
        parts: Sequence[Sequence[tuple[str, int]]] | None = None,
    ) -> dict[Group, Row]:
        """Return a batch's counts. `sources`: of each sample; None: "". `parts`: of each packed line (source, tokens)
        of its documents."""
        if not samples:
            return {}
        sources = [""] * len(samples) if sources is None else sources
        keys = [""] * len(samples) if self._by is None else list(map(self._key, samples))
        if parts is None or not all(parts):
            lengths = list(map(self._length, samples))
        else:
            lengths = [None] * len(samples)  # those of the parts are used
        if parts is not None:
            lengths = [sum(size for _, size in own) if own else n for own, n in zip(parts, lengths, strict=True)]
        by_group: dict[Group, list[int | None]] = defaultdict(list)
        for group, length in zip(zip(sources, keys, strict=True), lengths, strict=True):
            by_group[group].append(length)
        found = {group: _row_of(own) for group, own in by_group.items()}
        if parts is not None:
            _move_tokens(found, sources, keys, parts)
        if self._truncated is not None:
            for group, sample in zip(zip(sources, keys, strict=True), samples, strict=True):
                found[group][TRUNCATED] += self._is_truncated(sample, self._truncated)
        return found

    def _is_truncated(self, sample: Any, wanted: _Part) -> bool:
        value = _value(sample, wanted, "truncated")
        if isinstance(value, torch.Tensor | np.ndarray) and value.ndim == 0:
            value = value.item()
        if not isinstance(value, bool | int | np.bool_):
            raise DatasetError(f"Counts(truncated=...) must give True or False for each sample, got {value!r:.100}")
        return bool(value)

    def _key(self, sample: Any) -> str:
        assert self._by is not None
        value = _value(sample, self._by, "by")
        if type(value) is str:
            return cut_name(value)
        if (isinstance(value, np.ndarray | np.generic) and value.size == 1) or (
            isinstance(value, torch.Tensor) and value.numel() == 1
        ):
            value = value.item()
        if value is None:
            return NONE
        if isinstance(value, bytes):
            return cut_name(value.decode("utf-8", "replace"))
        if not isinstance(value, str | int | float):
            raise DatasetError(f"Counts(by=...) must give a text or a number, got a {type(value).__name__}")
        return cut_name(str(value))

    def _length(self, sample: Any) -> int | None:
        wanted = self._tokens
        if wanted is None:
            if not isinstance(sample, Mapping):
                return _own_length(sample)
            wanted = next((name for name in TOKEN_FIELDS if name in sample), None)
            if wanted is None:
                return None
        value = _value(sample, wanted, "tokens")
        if isinstance(value, torch.Tensor | np.ndarray | np.generic) and value.ndim == 0:
            value = value.item()
        try:
            length = value if isinstance(value, int) else _len(value)
        except TypeError:
            length = -1
        if not 0 <= length <= MOST_TOKENS:
            raise DatasetError(
                f"Counts(tokens=...) must give 0 to {MOST_TOKENS}, or a value with len(), got {value!r:.100}"
            )
        return int(length)


def _row_of(lengths: list[int | None]) -> Row:
    row, known = new_row(), [length for length in lengths if length is not None]
    row[SAMPLES], row[TOKENS] = len(lengths), sum(known)
    for bits, count in Counter(map(int.bit_length, known)).items():
        row[FIELDS + min(bits, BINS - 1)] += count
    return row


def _move_tokens(
    found: dict[Group, Row], sources: Sequence[str], keys: Sequence[str], parts: Sequence[Sequence[tuple[str, int]]]
) -> None:
    """Count the tokens of a packed line's documents for their sources instead of the line's."""
    for source, key, own in zip(sources, keys, parts, strict=True):
        for of, size in own:
            if of != source:
                found[source, key][TOKENS] -= size
                found.setdefault((of, key), new_row())[TOKENS] += size


def _len(value: Any) -> int:
    return int(value.size(0)) if type(value) is torch.Tensor else len(value)  # len() of a tensor takes 1 us


def _own_length(sample: Any) -> int | None:
    """Return the length of a 1-D list, array or tensor of integers; None for others."""
    if isinstance(sample, torch.Tensor):
        return _len(sample) if sample.ndim == 1 and not sample.is_floating_point() else None
    if isinstance(sample, np.ndarray):
        return len(sample) if sample.ndim == 1 and sample.dtype.kind in "iu" else None
    return len(sample) if isinstance(sample, list) and (not sample or type(sample[0]) is int) else None


def _value(sample: Any, part: _Part, what: str) -> Any:
    if not isinstance(part, str):
        try:
            return part(sample)
        except StopIteration as error:
            raise stop_iteration_error(f"the function of Counts({what}=...)") from error
    try:
        return sample[part] if type(sample) is dict or isinstance(sample, Mapping) else getattr(sample, part)
    except (KeyError, AttributeError):
        fields = f"has the fields {', '.join(map(str, sample))}" if isinstance(sample, Mapping) else "has none"
        raise DatasetError(
            f"Counts({what}={part!r}) needs this field in each sample, but a {type(sample).__name__} {fields}"
        ) from None


class LoaderCounts:
    """Counts of a loader's samples up to its position. `shares`: of each source, in millionths of the samples or of the
    tokens; the other is 0."""

    def __init__(
        self, counts: Counts | None, shares: Mapping[str, tuple[int, int]] | None = None, *, skips: bool = False
    ) -> None:
        """skips: samples may be left out, which must be counted in any case."""
        if counts is None and skips:
            counts = Counts()
        if counts is not None and not isinstance(counts, Counts):
            raise InvalidArgumentError(f"counts must be a penstock.data.Counts or None, got {type(counts).__name__}")
        self.counter = None if counts is None else SampleCounter(counts)
        self._by = None if counts is None or counts.by is None else _named(counts.by)
        self._shares = shares or {}
        self.tally = None if counts is None else Tally(shares=self._shares)

    def handed_out(self, counted: Mapping[Group, Row]) -> None:
        if self.tally is not None:
            self.tally.add(counted)

    def set_shares(self, shares: Mapping[str, tuple[int, int]]) -> None:
        self._shares = shares
        if self.tally is not None:
            self.tally.set_shares(shares)

    def saved(self) -> dict[str, Any]:
        """Return the counts' entry of a worker's state; empty if the loader does not count."""
        if self.tally is None:
            return {}
        return {COUNTS: {"by": self._by, "rows": plain_rows(self.tally.rows)}}

    def begin(self, rows: Rows) -> None:
        if self.tally is not None:
            self.tally = Tally(rows, self._shares)

    def load(self, state: Mapping[str, Any], *, strict: bool) -> None:
        """Continue from a state's counts; from zero if it has none, or, with strict=False, by another key."""
        counts = state.get(COUNTS)
        if not isinstance(counts, Mapping):
            if self.tally is not None and state.get("done"):
                warnings.warn("the loaded state has no counts, so only later batches are counted", stacklevel=4)
            self.begin({})
            return
        if self.tally is None:
            warnings.warn("the loaded state has counts, which end here. Pass counts= to continue them", stacklevel=4)
            return
        by = counts.get("by")
        if by != self._by:
            if strict:
                raise StateMismatchError(
                    f"Counts(by=) must be {by!r}, as in the state, got {self._by!r}. Begin at zero by strict=False"
                )
            self.begin({})
            return
        self.begin(saved_rows(counts.get("rows")))

    def part(self, aggregated: Mapping[str, Any], box: int, num_boxes: int, worker: int) -> dict[str, Any]:
        """Return the counts with which one worker resumes. Those of an aggregated state are divided (counts_part)."""
        counts = aggregated.get(COUNTS)
        if not isinstance(counts, Mapping):
            return {}
        if "boxes" not in counts:  # the state of a box's only worker
            own = worker == 0 and (box == 0 or aggregated["topology"]["boxes"] == num_boxes)
            rows = saved_rows(counts.get("rows")) if own else {}
        else:
            rows = counts_part(counts, box, num_boxes, worker)
        return {COUNTS: {"by": counts.get("by"), "rows": plain_rows(rows)}}

    @staticmethod
    def aggregated(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the counts' entry of an aggregated state; empty if workers have none."""
        counts = [state.get(COUNTS) for state in states]
        found = aggregated_counts(counts, len(states) // states[0]["topology"]["boxes"])
        return {} if found is None else {COUNTS: found}


def skipped_rows(skipped: Mapping[str, int]) -> dict[Group, Row]:
    found = {}
    for source, count in skipped.items():
        found[source, ""] = row = new_row()
        row[SKIPPED] = count
    return found


def _named(by: _Part) -> str:
    return by if isinstance(by, str) else f"{getattr(by, '__qualname__', type(by).__qualname__)}()"
