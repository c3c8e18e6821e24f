"""Position of a box in its stream of batches, and the rule by which it takes batches from its slots in turn. Pure
arithmetic.

A cursor points at the slot whose turn it is: its batch is delivered, and the cursor moves to the next live slot. A slot
whose input has ended at its turn is no longer live, and no step is taken. When none is live, the next epoch starts with
all, from slot 0. For loaders that only their own methods can resume, the rotation continues across epochs instead
(`carry`): they assign batches to workers in turn for the whole launch.

The training loop takes one step at a time; the coordinator computes any step from the attempt's start and the known
ends of slots' epochs (`advance`), so every rank gets the same. Batches of each slot are stored, because `worker_step(S)
= S // W + (k < S % W)` is true only while every slot is live. `chain` is the box's stream digest: the batches' digests,
combined in order, or None in code that does not know them."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from xxhash import xxh3_64_intdigest

from penstock.proto.batch.digest import MASK
from penstock.proto.errors import SAME_RELEASE, EmptyInputError, InvalidArgumentError, PenstockError, ProtocolError
from penstock.proto.state.epoch_labels import label_of, labels_in, to_messages
from penstock.proto.v1 import records_pb2

MOST = 1 << 62
"""Largest step, epoch or count that a position may have, so that sums still fit into 64 bits."""
EPOCHS_AHEAD = 64
"""Epochs by which a worker may be ahead: an empty input would otherwise send ends of epochs without pause."""
_FACTOR = 0x9E3779B97F4A7C15
_pack_link = struct.Struct("<QQ").pack
_pack_step = struct.Struct("<Q").pack


def linked(chain: int, digest: int) -> int:
    """Extend a slot's chain (0 at first) by a batch's digest: chain * an odd number + digest, modulo 2^64."""
    return (chain * _FACTOR + digest) & MASK


def link_between(before: int, after: int) -> int:
    """Return what was linked to the chain `before` to make it `after`."""
    return (after - before * _FACTOR) & MASK


def _linked(chain: int | None, digest: int | None) -> int | None:
    return None if digest is None or chain is None else xxh3_64_intdigest(_pack_link(chain, digest))


def _added(chain: int | None, digest: int | None, step: int) -> int | None:
    """Stream digest that sums rows (`by_rows`), extended by a batch. The step gives a factor, so that steps matter."""
    if digest is None or chain is None:
        return None
    return (chain + (xxh3_64_intdigest(_pack_step(step)) | 1) * digest) & MASK


@dataclass
class Position:
    step: int
    """Batches delivered to the box over the whole run."""
    epoch: int
    live: list[int]
    """Slots whose input has not ended in this epoch, in ascending order."""
    cursor: int
    """Index into `live` of the slot whose turn it is."""
    delivered: list[int]
    """Batches of each slot taken in this epoch."""
    total: list[int]
    """Batches of each slot taken over the run, or since it was last resumed on another topology."""
    chain: int | None = field(default=0, compare=False)
    """Stream digest of the box; None if unknown. After n steps it is chain(n), with chain(0) = 0 and chain(n) =
    xxh3_64(little-endian u64 chain(n - 1), u64 digest of batch n). With `by_rows` chain(n) = chain(n - 1) +
    (xxh3_64(little-endian u64 n) | 1) * digest, modulo 2^64."""
    by_rows: bool = field(default=False, compare=False)
    """True if digests are sums over rows: the sum of all boxes' then does not depend on the number of boxes."""
    first: int | None = field(default=None, compare=False)
    """Slot with which this epoch began, if the rotation continues across epochs; None: each begins with slot 0."""
    slot_chains: tuple[int, ...] = field(default=(), compare=False)
    """Chain of each slot's batches in this epoch where a box starts. Empty elsewhere: it does not move along."""
    labels: dict[int, int] = field(default_factory=dict, compare=False)
    ended_before: bool = field(default=False, compare=False)
    """True if the last epoch that ended had no batch, and no abandoned epoch since had one."""

    @classmethod
    def start(cls, num_slots: int, *, step: int = 0, epoch: int = 0) -> Position:
        if num_slots < 1:
            raise InvalidArgumentError(f"a box must have >= 1 worker slots, got {num_slots}: raise num_workers_per_box")
        if step > MOST or epoch > MOST:
            raise InvalidArgumentError(f"step and epoch must be <= {MOST}, got step {step} of epoch {epoch}")
        return cls(step, epoch, list(range(num_slots)), 0, [0] * num_slots, [0] * num_slots)

    def copy(self) -> Position:
        return replace(
            self,
            live=list(self.live),
            delivered=list(self.delivered),
            total=list(self.total),
            slot_chains=(),
            labels=dict(self.labels),
        )

    def carry(self) -> None:
        if self.first is None:
            self.first = 0

    @property
    def label(self) -> int:
        """Number of the epoch that user code of a pure loader sees."""
        return label_of(self.labels, self.epoch)

    @property
    def turn(self) -> int:
        return self.live[self.cursor]

    def deliver(self, digest: int | None = None) -> None:
        """Count a batch of the slot whose turn it is, and move the cursor to the next live slot."""
        slot = self.live[self.cursor]
        self.step += 1
        self.chain = _added(self.chain, digest, self.step) if self.by_rows else _linked(self.chain, digest)
        self.delivered[slot] += 1
        self.total[slot] += 1
        self.cursor = (self.cursor + 1) % len(self.live)

    def exhaust(self) -> bool:
        """Remove the slot whose turn it is: its input has ended. Return True if it was the last one: the position is
        then the start of the next epoch. Raises EmptyInputError if two epochs in a row have no batch, because the loop
        would run forever. (Those abandoned before their first batch do not count.)"""
        del self.live[self.cursor]
        if self.live:
            self.cursor %= len(self.live)
            return False
        if self.first is not None:
            self.first = (self.first + sum(self.delivered)) % len(self.total)
        empty = not any(self.delivered)
        if empty and self.ended_before:
            raise EmptyInputError("no worker's loader yielded a batch in two epochs: check data paths and sharding")
        self._next_epoch()
        self.ended_before = empty
        return True

    def abandon_epoch(self) -> None:
        """Begin the next epoch before the end of this one, with the slot with which this epoch began."""
        self.ended_before = self.ended_before and not any(self.delivered)
        self._next_epoch()

    def _next_epoch(self) -> None:
        count = len(self.total)
        self.epoch += 1
        self.live = list(range(count))
        self.cursor = self.first or 0
        self.delivered = [0] * count

    def to_proto(self) -> records_pb2.BoxPosition:
        slots = [
            records_pb2.SlotPosition(delivered=d, total=t) for d, t in zip(self.delivered, self.total, strict=True)
        ]
        return records_pb2.BoxPosition(
            step=self.step,
            epoch=self.epoch,
            live=self.live,
            cursor=self.cursor,
            slots=slots,
            chain=self.chain,
            by_rows=self.by_rows,
            first=self.first,
            labels=to_messages(self.labels),
        )

    @classmethod
    def received(cls, message: records_pb2.BoxPosition, kind: type[PenstockError] = ProtocolError) -> Position:
        """Return a peer's position. Raises an error of class `kind`, with the remedy, for impossible numbers."""
        try:
            return cls.from_proto(message)
        except InvalidArgumentError as error:
            raise kind(f"{error.message}. {SAME_RELEASE}") from error

    @classmethod
    def from_proto(cls, message: records_pb2.BoxPosition) -> Position:
        """Raises InvalidArgumentError for numbers that contradict each other or are too large."""
        count = len(message.slots)
        if len(message.live) > count:
            raise InvalidArgumentError(f"a position of {count} slots must not have {len(message.live)} live ones")
        position = cls(
            message.step,
            message.epoch,
            list(message.live),
            message.cursor,
            [slot.delivered for slot in message.slots],
            [slot.total for slot in message.slots],
            message.chain if message.HasField("chain") else None,
            message.by_rows,
            message.first if message.HasField("first") else None,
            tuple(slot.chain for slot in message.slots),
            labels_in(message.labels),
        )
        live = position.live
        if not live or sorted(set(live)) != live or live[-1] >= count:
            raise InvalidArgumentError(f"live worker slots must be ascending numbers below {count}, got {live}")
        if position.cursor >= len(live) or (position.first or 0) >= count:
            raise InvalidArgumentError(f"a cursor must be a live slot, got {position.cursor}, {position.first}")
        if (most := max(position.step, position.epoch, *position.total)) > MOST:
            raise InvalidArgumentError(f"step, epoch and totals of a position must be <= {MOST}, got {most}")
        if any(d > t for d, t in zip(position.delivered, position.total, strict=True)):
            raise InvalidArgumentError(f"no slot has more batches in an epoch than in all, got {position.delivered}")
        return position


def advance(
    base: Position,
    step: int,
    ends: Mapping[tuple[int, int], int],
    abandoned: Mapping[int, int] | None = None,
) -> Position:
    """Return the position of the box at `step`, computed from an earlier position and the known ends of epochs.

    Args:
        ends: (slot, epoch) -> number of the slot's last batch in this epoch, counted over the run; if known.
        abandoned: epoch -> last step of the box in this epoch, for each epoch that the loop has abandoned by `break`.

    As in the loop, an epoch ends only when a further step needs a batch. The cost is one iteration for each end of a
    slot. The stream digest of a later step is None: see `chain_at`. Raises InvalidArgumentError if `step` is before
    `base.step`, EmptyInputError if two epochs in a row had no batch."""
    if step < base.step:
        raise InvalidArgumentError(f"step must be at least {base.step}, the earliest known, got {step}")
    at = base.copy()
    while True:
        wanted = step - at.step
        if wanted == 0:
            return at
        live, cursor = at.live, at.cursor
        count = len(live)
        abandoned_at = abandoned.get(at.epoch) if abandoned else None
        stride = wanted if abandoned_at is None else min(wanted, abandoned_at - at.step)
        meets_end = False
        for index, slot in enumerate(live):
            end = ends.get((slot, at.epoch))
            if end is not None:
                turn = (index - cursor) % count + (end - at.total[slot]) * count
                if turn < stride:
                    stride, meets_end = turn, True
        for index, slot in enumerate(live):
            offset = (index - cursor) % count
            batches = (stride - offset + count - 1) // count if stride > offset else 0
            at.delivered[slot] += batches
            at.total[slot] += batches
        at.cursor = (cursor + stride) % count
        at.step += stride
        if stride:
            at.chain = None
        if meets_end:
            at.exhaust()
        elif at.step < step:
            at.abandon_epoch()


def chain_at(
    base: Position,
    step: int,
    ends: Mapping[tuple[int, int], int],
    abandoned: Mapping[int, int],
    digests: Mapping[tuple[int, int], int],
) -> int | None:
    """Return the stream digest at `step`; None if a digest is unknown. `digests`: (slot, total) -> a batch's."""
    at = base.copy()
    while at.step < step and at.chain is not None:
        slot = at.turn
        if abandoned.get(at.epoch) == at.step:
            at.abandon_epoch()
        elif ends.get((slot, at.epoch)) == at.total[slot]:
            at.exhaust()
        else:
            at.deliver(digests.get((slot, at.total[slot] + 1)))
    return at.chain
