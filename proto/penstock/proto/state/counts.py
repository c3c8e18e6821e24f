"""Counts of what a run was trained on: samples, tokens, truncated and skipped samples, and lengths, by group: source (a
data set of a mixture) and key (what the user counts by, such as a language).

A loader counts each batch when it hands it out, and saves counts with its position, so they are right after a recovery.
Each BATCH frame has the rows that changed, of which the training process keeps the newest: its counts are those of the
delivered batches. A row is FIELDS counts, then BINS numbers of samples by length."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import add
from typing import Any, TypeAlias

from xxhash import xxh3_64_intdigest

from penstock.proto.errors import StateCorruptError, malformed

COUNTS = "counts"
"""Key of the counts in a loader's state."""
SAMPLES, TOKENS, TRUNCATED, SKIPPED, MEASURED, IMBALANCE, SHARE_OF_SAMPLES, SHARE_OF_TOKENS = range(8)
FIELDS = 8
"""Number of fields at the beginning of a row; the constants above are their indexes.

MEASURED: number of steps whose cost was measured. IMBALANCE: sum of their cost ratios, in ten-thousandths
(`imbalance_of`). Only one row of a batch has the two. SHARE_OF_SAMPLES, SHARE_OF_TOKENS: no sums, but the source's
configured share in the mixture, in millionths; 0 if none."""
BINS = 32
"""Number of length bins. Bin 0: no token; bin n: 2^(n - 1) to 2^n - 1 tokens; the last: also all longer ones."""
MOST_GROUPS = 96
"""Largest number of groups, so that all rows fit into one frame of a lane. Others are counted in OTHER."""
MOST_NAME = 48
"""Largest size of the name of a source or key in UTF-8 bytes."""
OTHER = ("(other)", "(other)")
MOST = 1 << 62
"""Largest count that is accepted from a peer or a state."""

Group: TypeAlias = tuple[str, str]
"""Source and key of a sample, "" if not known."""
Row: TypeAlias = list[int]
Rows: TypeAlias = dict[Group, Row]

_WIDTH = FIELDS + BINS
_ROW = struct.Struct(f"<BB{_WIDTH}Q")
_WHOLE, _CHANGED = b"\1", b"\0"
"""First byte of the counts in a BATCH frame: all rows follow (_WHOLE), or only the rows that have changed."""
ALL_BELOW = 4 << 10
"""Size in bytes up to which a BATCH frame has all rows, so that those of earlier frames can be dropped."""


@dataclass(frozen=True)
class SampleCounts:
    samples: int
    tokens: int
    truncated: int
    skipped: int
    """Samples that were left out: by `skip=`, by Filtered and Mapped, and in quarantined batches."""
    lengths: dict[int, int]
    """{n: samples of n to 2n - 1 tokens}; for n = 0 and n = 1 samples of exactly n tokens, for n = 2**30 also all
    longer samples."""
    wanted: tuple[float, str] | None = None
    """Configured share of the source in the mixture, from 0 to 1, and of what: "samples" or "tokens"."""

    @classmethod
    def of(cls, row: Sequence[int]) -> SampleCounts:
        samples, tokens, truncated, skipped, _, _, of_samples, of_tokens = row[:FIELDS]
        lengths = {1 << bin >> 1: count for bin, count in enumerate(row[FIELDS:]) if count}
        wanted = (of_samples / 1e6, "samples") if of_samples else (of_tokens / 1e6, "tokens") if of_tokens else None
        return cls(samples, tokens, truncated, skipped, lengths, wanted)

    def plain(self) -> dict[str, Any]:
        """Return the counts as a dict that can be written as JSON."""
        wanted = None if self.wanted is None else {"share": self.wanted[0], "of": self.wanted[1]}
        return {**vars(self), "lengths": {str(at): count for at, count in self.lengths.items()}, "wanted": wanted}


def new_row() -> Row:
    return [0] * _WIDTH


def _add(row: Row, other: Sequence[int]) -> None:
    for field, count in enumerate(other):
        if count:
            row[field] = max(row[field], count) if SHARE_OF_SAMPLES <= field < FIELDS else row[field] + count


class Tally:
    """Counts of a loader, and rows changed since `take`. `shares`: source -> millionths of samples, of tokens."""

    def __init__(self, rows: Mapping[Group, Sequence[int]] | None = None, shares: Shares | None = None) -> None:
        self._shares = shares or {}
        self.rows: Rows = merged_rows([rows]) if rows else {}
        for group, row in self.rows.items():
            row[SHARE_OF_SAMPLES:FIELDS] = self._shares.get(group[0], (0, 0))
        self._changed = set(self.rows)
        self._packed: dict[Group, bytes] = {}
        """Row as bytes, as of the last `take`."""
        self._begun = False
        self.last: Mapping[Group, Sequence[int]] = {}

    def add(self, batch: Mapping[Group, Sequence[int]]) -> None:
        rows = self.rows
        self.last = batch
        for group, counted in batch.items():
            row = rows.get(group)
            if row is None:
                group = group if len(rows) < MOST_GROUPS - 1 else OTHER
                row = rows.setdefault(group, new_row())
                row[SHARE_OF_SAMPLES:FIELDS] = self._shares.get(group[0], (0, 0))
            row[:] = map(add, row, counted)  # a batch has no shares
            self._changed.add(group)

    def set_shares(self, shares: Shares) -> None:
        self._shares = shares
        for group, row in self.rows.items():
            wanted = [*shares.get(group[0], (0, 0))]
            if row[SHARE_OF_SAMPLES:FIELDS] != wanted:
                row[SHARE_OF_SAMPLES:FIELDS] = wanted
                self._changed.add(group)

    def take(self) -> bytes:
        """Return the counts for a BATCH frame: all rows up to ALL_BELOW bytes, else those changed since the last call;
        b"" for none. After a start or a loaded state all have changed."""
        changed, packed = self._changed, self._packed
        if not changed:
            return b""
        for group in changed:
            source, key = (name.encode() for name in group)
            packed[group] = b"".join((_ROW.pack(len(source), len(key), *self.rows[group]), source, key))
        whole = not self._begun or len(packed) * _ROW.size <= ALL_BELOW
        parts = packed.values() if whole else [packed[group] for group in changed]
        self._begun = True
        changed.clear()
        return (_WHOLE if whole else _CHANGED) + b"".join(parts)


Shares: TypeAlias = Mapping[str, tuple[int, int]]


@lru_cache(4096)
def cut_name(name: str) -> str:
    """Cut a name to MOST_NAME bytes, with a hash of the whole at its end, so that different names stay different."""
    data = name.encode("utf-8", "replace")
    if len(data) <= MOST_NAME:
        return data.decode()
    return data[: MOST_NAME - 11].decode("utf-8", "ignore") + f"...{xxh3_64_intdigest(data) >> 32:08x}"


def is_whole(data: bytes) -> bool:
    """True if the counts in a BATCH frame have all rows, so that those of earlier frames are not needed."""
    return data[:1] == _WHOLE


def read_changes(data: bytes) -> Rows:
    """Return the rows in a BATCH frame. Raises ProtocolError for bytes that `Tally.take` did not make."""
    found: Rows = {}
    at = 1
    try:
        if data[:1] not in (_WHOLE, _CHANGED):
            raise ValueError(f"their first byte must be 0 or 1, got {data[:1]!r}")
        while at < len(data):
            of_source, of_key, *row = _ROW.unpack_from(data, at)
            begin, middle = at + _ROW.size, at + _ROW.size + of_source
            at = middle + of_key
            if at > len(data) or max(of_source, of_key) > MOST_NAME or max(row) > MOST:
                raise ValueError(f"names must have <= {MOST_NAME} bytes, counts be <= {MOST}, rows end within the data")
            found[str(data[begin:middle], "utf-8"), str(data[middle:at], "utf-8")] = row
    except (struct.error, ValueError) as error:
        raise malformed(f"the counts of a batch cannot be decoded: {error}") from error
    return found


def merged_rows(several: Iterable[Mapping[Group, Sequence[int]]]) -> Rows:
    """Return the sum of several counts, of at most MOST_GROUPS groups: those with the most samples, and OTHER."""
    found: Rows = {}
    for rows in several:
        for group, row in rows.items():
            _add(found.setdefault(group, new_row()), row)
    if len(found.keys() - {OTHER}) < MOST_GROUPS:  # one place is for OTHER
        return found
    rest = found.setdefault(OTHER, new_row())
    order = sorted(found.keys() - {OTHER}, key=lambda group: (-found[group][SAMPLES], group))
    for group in order[MOST_GROUPS - 1 :]:
        _add(rest, _without_shares(found.pop(group)))
    return found


def by_source(rows: Mapping[Group, Sequence[int]]) -> dict[str, SampleCounts]:
    return _by(rows, 0)


def by_key(rows: Mapping[Group, Sequence[int]]) -> dict[str, SampleCounts]:
    """{} if no key was counted."""
    return _by(rows, 1) if any(group[1] for group in rows) else {}


def note_imbalance(rows: Mapping[Group, Row], ratio: float) -> None:
    """Add a step's imbalance to its batch's counts. `ratio`: cost of the most expensive box / mean cost of all."""
    row = next(iter(rows.values()))
    row[MEASURED], row[IMBALANCE] = 1, round(1e4 * ratio)


def imbalance_of(rows: Mapping[Group, Sequence[int]]) -> float | None:
    """Return the mean of (most expensive box's cost / boxes' mean cost) over measured steps (penstock.data.Balance)."""
    steps = sum(row[MEASURED] for row in rows.values())
    return sum(row[IMBALANCE] for row in rows.values()) / (1e4 * steps) if steps else None


def _by(rows: Mapping[Group, Sequence[int]], part: int) -> dict[str, SampleCounts]:
    found: dict[str, Row] = {}
    for group, row in rows.items():
        _add(found.setdefault(group[part], new_row()), row if part == 0 else _without_shares(row))
    return {name: SampleCounts.of(found[name]) for name in sorted(found)}


def _without_shares(row: Sequence[int]) -> Row:
    return [*row[:SHARE_OF_SAMPLES], 0, 0, *row[FIELDS:]]


# ---- states


def plain_rows(rows: Mapping[Group, Sequence[int]]) -> list[list[Any]]:
    """Return rows as a state saves them: [source, key, counts ..., numbers by length ...], without zeros at the end."""
    found = []
    for (source, key), row in sorted(rows.items()):
        last = next((width for width in range(_WIDTH, FIELDS, -1) if row[width - 1]), FIELDS)
        found.append([source, key, *row[:last]])
    return found


def saved_rows(plain: Any) -> Rows:
    """Raises StateCorruptError for a value that `plain_rows` did not make."""
    try:
        found: Rows = {}
        for source, key, *row in plain:
            if not all(isinstance(name, str) and len(name.encode()) <= MOST_NAME for name in (source, key)):
                raise ValueError(f"names must be texts of at most {MOST_NAME} bytes, got {source!r:.80}, {key!r:.80}")
            counts = all(type(count) is int and 0 <= count < MOST for count in row)
            if not counts or not FIELDS <= len(row) <= _WIDTH:
                raise ValueError(f"each row must have {FIELDS} to {_WIDTH} integers >= 0, got {row!r:.200}")
            found[source, key] = [*row, *([0] * (_WIDTH - len(row)))]
    except (TypeError, ValueError) as error:
        raise StateCorruptError(f"the counts in a loader's state are damaged: {error}. Load an older state") from error
    return found


def aggregated_counts(workers: Sequence[Any], workers_per_box: int) -> dict[str, Any] | None:
    """Return each box's counts, summed over its workers' states in order of global_worker_id. None if not counted."""
    if not workers or any(counts is None for counts in workers):
        return None
    boxes = [
        merged_rows(saved_rows(own.get("rows")) for own in workers[first : first + workers_per_box])
        for first in range(0, len(workers), workers_per_box)
    ]
    return {"by": workers[0].get("by"), "boxes": [plain_rows(rows) for rows in boxes]}


def counts_part(counts: Mapping[str, Any], box: int, num_boxes: int, worker: int) -> Rows:
    """Return the counts with which a worker begins: a box's first worker continues the box's, others none. On another
    number of boxes the first worker of box 0 continues the sum of all, the only defined one."""
    if worker:
        return {}
    boxes = counts.get("boxes")
    if not isinstance(boxes, list):
        raise StateCorruptError("the counts in a loader's state are damaged: no boxes. Load an older state")
    if len(boxes) == num_boxes:
        return saved_rows(boxes[box])
    return {} if box else merged_rows(saved_rows(rows) for rows in boxes)


def rows_of(state: Any) -> Rows | None:
    """Return the counts of all boxes together, from an aggregated state; None for a state without counts."""
    counts = state.get(COUNTS) if isinstance(state, Mapping) else None
    if not isinstance(counts, Mapping) or not isinstance(counts.get("boxes"), list):
        return None
    return merged_rows(saved_rows(rows) for rows in counts["boxes"])
