"""Position of a box in its stream, and the round robin over its slots. Pure arithmetic.

The rule: deliver from the slot under the cursor, then move to the next live slot. A slot whose input ends at its turn
leaves the live slots without taking a step. When none is left the epoch ends, and the next one starts with all slots
live and the cursor at 0. If only the loader's own methods can resume it (`carry`), the rotation continues across epochs
instead: such a loader counts the samples of all workers, and deals its batches to workers in turn for the whole launch.

The training loop follows this rule one step at a time (`turn`, `deliver`, `exhaust`, `abandon_epoch`). The coordinator
computes the position at any step from the attempt's start and the known ends of slots (`advance`), many steps at a
time. The result depends only on these, so every rank gets the same one. The counts must be stored: `worker_step(S) = S
// W + (k < S % W)` holds only while every slot is live.

A position carries the stream digest of its box: the chain of the digests of all batches in order. Code that has the
digests extends it (`deliver`, `chain_at`); other code sets it to None.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

from xxhash import xxh3_64_intdigest

from penstock.proto.batch.digest import MASK
from penstock.proto.errors import EmptyInputError, InvalidArgumentError
from penstock.proto.v1 import records_pb2

__all__ = ["EPOCHS_AHEAD", "MOST", "Position", "advance", "chain_at"]

MOST = 1 << 62
"""Highest step, epoch or count of a position that is read: sums with it still fit 64 bits."""
EPOCHS_AHEAD = 64
"""Largest number of epochs that a worker may be ahead of the loop. Only empty epochs reach it, because they take no
entry of the ring: without a limit a worker with an empty input would send ends of epochs without pause."""
_pack_link = struct.Struct("<QQ").pack
_pack_step = struct.Struct("<Q").pack


def _linked(chain: int | None, digest: int | None) -> int | None:
    return None if digest is None or chain is None else xxh3_64_intdigest(_pack_link(chain, digest))


def _added(chain: int | None, digest: int | None, step: int) -> int | None:
    """Return the chain extended by a sum over rows. Each step has its own factor, so that the same rows at another step
    give another chain."""
    if digest is None or chain is None:
        return None
    return (chain + (xxh3_64_intdigest(_pack_step(step)) | 1) * digest) & MASK


@dataclass
class Position:
    """Position of a box. Steps and counts are in batches; slots and epochs count from 0."""

    step: int
    """Batches of the box over the whole life of the run."""
    epoch: int
    live: list[int]
    """Slots that have not ended in this epoch, in their order."""
    cursor: int
    """Index into `live` of the slot whose turn it is."""
    delivered: list[int]
    """Batches of each slot in this epoch."""
    total: list[int]
    """Batches of each slot over the run: its worker_step."""
    chain: int | None = field(default=0, compare=False)
    """Stream digest: chain(0) = 0, chain(n) = xxh3_64(little-endian u64 chain(n - 1), u64 digest of batch n); None: not
    known. With `by_rows` chain(n) = chain(n - 1) + (xxh3_64(little-endian u64 n) | 1) * digest, modulo 2^64."""
    by_rows: bool = field(default=False, compare=False)
    """True if digests are sums over rows. The sum of the boxes' chains is then the same on any number of boxes."""
    first: int | None = field(default=None, compare=False)
    """Slot that this epoch began with, if the rotation continues across epochs; None: each epoch begins with slot 0."""
    ended_before: bool = field(default=False, compare=False)
    """True if the previous epoch ended without a step; see `exhaust`."""

    @classmethod
    def start(cls, num_slots: int, *, step: int = 0, epoch: int = 0) -> Position:
        """Return a position with all slots live and nothing delivered."""
        if num_slots < 1:
            raise InvalidArgumentError(f"a box must have >= 1 worker slots, got {num_slots}")
        if step > MOST or epoch > MOST:
            raise InvalidArgumentError(f"step and epoch must be <= {MOST}, got step {step} of epoch {epoch}")
        return cls(step, epoch, list(range(num_slots)), 0, [0] * num_slots, [0] * num_slots)

    def copy(self) -> Position:
        return Position(
            self.step,
            self.epoch,
            list(self.live),
            self.cursor,
            list(self.delivered),
            list(self.total),
            self.chain,
            self.by_rows,
            self.first,
            self.ended_before,
        )

    def carry(self) -> None:
        """Make the rotation continue across epochs from now on."""
        if self.first is None:
            self.first = 0

    @property
    def turn(self) -> int:
        """Return the slot under the cursor."""
        return self.live[self.cursor]

    def deliver(self, digest: int | None = None) -> None:
        """Count a batch from the slot under the cursor. digest: the batch's digest, None if it is not known."""
        slot = self.live[self.cursor]
        self.step += 1
        self.chain = _added(self.chain, digest, self.step) if self.by_rows else _linked(self.chain, digest)
        self.delivered[slot] += 1
        self.total[slot] += 1
        self.cursor = (self.cursor + 1) % len(self.live)

    def exhaust(self) -> bool:
        """End the slot under the cursor at its turn. Return True if that ended the epoch; the next one has then begun.

        Raises EmptyInputError for two epochs in a row without any batch, because the loop would then run for ever.
        """
        del self.live[self.cursor]
        if self.live:
            self.cursor %= len(self.live)
            return False
        if self.first is not None:
            self.first = (self.first + sum(self.delivered)) % len(self.total)
        empty = not any(self.delivered)
        if empty and self.ended_before:
            raise EmptyInputError("no worker's loader yields a batch: check data paths and sharding")
        self._next_epoch()
        self.ended_before = empty
        return True

    def abandon_epoch(self) -> None:
        """Begin the next epoch before the end of this one, with the slot that this one began with."""
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
        )

    @classmethod
    def from_proto(cls, message: records_pb2.BoxPosition) -> Position:
        """Return the position. Raises InvalidArgumentError for a record that a round robin cannot reach."""
        if len(message.live) > len(message.slots):
            raise InvalidArgumentError(
                f"live slots must be at most {len(message.slots)}, one per slot, got {len(message.live)}"
            )
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
        )
        count = len(position.total)
        if not position.live or sorted(set(position.live)) != position.live or position.live[-1] >= count:
            raise InvalidArgumentError(
                f"the live slots of a position must be rising numbers below {count}, got {position.live}"
            )
        if position.cursor >= len(position.live):
            raise InvalidArgumentError(
                f"the cursor of a position must be below its {len(position.live)} live slots, got {position.cursor}"
            )
        if position.first is not None and position.first >= count:
            raise InvalidArgumentError(f"the first slot of a position must be below {count}, got {position.first}")
        if max(position.step, position.epoch, *position.total) > MOST:
            raise InvalidArgumentError(
                f"counts of a position must be <= {MOST}, got step {position.step}, epoch {position.epoch}"
            )
        if any(d > t for d, t in zip(position.delivered, position.total, strict=True)):
            raise InvalidArgumentError(
                "the batches of a slot in this epoch must be at most its batches in all, got more"
            )
        return position


def advance(
    base: Position,
    step: int,
    ends: Mapping[tuple[int, int], int],
    abandoned: Mapping[int, int] | None = None,
) -> Position:
    """Return the position of the box at `step`, computed from `base` and the known ends of epochs.

    Args:
        base: position to start from; not changed.
        step: absolute, >= `base.step`.
        ends: (slot, epoch) -> the slot's total when that epoch ended. An epoch that is not listed counts as unfinished;
            call again once more ends are known.
        abandoned: epoch -> the last step taken in it before the loop abandoned it by `break`.

    As in the loop, the end of an epoch counts only once a further step needs its next batch. The cost is one iteration
    for each end, independent of the number of steps. The chain of the result is None if `step` is above `base.step`:
    see `chain_at`.
    """
    if step < base.step:
        raise InvalidArgumentError(f"step must be at least {base.step}, where this launch started, got {step}")
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
    """Return the chain of the box at `step`, computed one step at a time from digests by (slot, total). Otherwise like
    `advance`.

    Returns None if the chain is not known at `base`, or one of the digests is not.
    """
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
