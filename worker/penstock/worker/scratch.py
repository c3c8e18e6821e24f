"""The child that restores a loader beside the one that streams, does one thing with it, and is gone.

- `check`: restore early snapshots and compare the next batches with those that were delivered. A loader that counts
  after its `yield`, or that prefetches in the background, restores to the wrong place, and nothing else would tell.
- `state`: replay from the nearest base to a place, and save the loader there.
- `aggregate`: make one state of all workers' states, for a training job that cannot build the loader itself.

It sits in memory of its own, so whatever the user's code does here, the stream goes on.
"""

from __future__ import annotations

import contextlib
from collections import deque
from typing import Any, cast

from penstock.proto.errors import LaneLostError, ReplayMismatchError
from penstock.proto.state import decode_state, encode_state
from penstock.proto.v1 import records_pb2
from penstock.worker.control import Channel, Message, plain_detail
from penstock.worker.ledger import ENTRIES
from penstock.worker.offprint import Offprint
from penstock.worker.source import END, Base, Source
from penstock.worker.starting import leave

__all__ = ["run_scratch"]


def run_scratch(channel: Channel) -> None:
    """One task: messages `assign`, `base` ..., then the task; the answer is `done` or `failed`."""
    with contextlib.suppress(LaneLostError):
        assignment = records_pb2.WorkerAssignment.FromString(cast(Message, channel.receive()).payload)
        values: list[bytes] = []
        try:
            while (message := cast(Message, channel.receive())).kind == "base":
                values.append(message.payload)
            source = Source(assignment)
            source.build()
            offprint = Offprint(full_digest=assignment.loader.options.full_digest)
            if message.kind == "check":
                _check(source, [Base.decode(value) for value in values], message.fields, offprint, channel)
            elif message.kind == "state":
                _state(source, Base.decode(values[0]), message.fields, offprint, channel)
            else:
                states = cast(list[Any], decode_state(values[0]))
                channel.send("done", encode_state(source.aggregate(states)))
        except LaneLostError:
            raise
        except Exception as error:
            channel.send("failed", error=plain_detail(error))


def _check(source: Source, bases: list[Base], fields: dict[str, Any], offprint: Offprint, channel: Channel) -> None:
    """`digests`: total -> digest of what was delivered. Says whether each base reproduced it, and where one did not."""
    delivered = {int(total): digest for total, digest in fields["digests"].items()}
    for base in bases:
        source.restore(base)
        while (expected := delivered.get(source.place.total + 1)) is not None:
            batch = source.next()
            if batch is END:
                differs, what = source.place.total + 1, "yields nothing more"
            elif offprint.take(batch)[0] != expected:
                differs, what = source.place.total, "yields another batch"
            else:
                continue
            channel.send("done", same=False, base_total=base.place.total, differs=differs, what=what)
            return
    channel.send("done", same=True)


def _all_over(source: Source, epoch: int) -> bool:
    """Nothing comes before pass `epoch`. Else the loop left a pass, of which nobody here knows, and who resumed from
    the state of this place would go on with what it left."""
    while source.place.epoch < epoch:
        if not source.is_open:
            source.open_pass()
        if source.next() is not END:
            return False
    return True


def _state(source: Source, base: Base, fields: dict[str, Any], offprint: Offprint, channel: Channel) -> None:
    """Replay to `total` in pass `epoch` and save there, as of the box's `step`."""
    delivered = {int(total): digest for total, digest in fields["digests"].items()}
    source.restore(base)
    replayed: deque[tuple[int, int, int]] = deque(maxlen=ENTRIES)

    def seen(batch: Any) -> None:
        source.digest, samples = offprint.take(batch)
        source.place.samples += samples
        replayed.append((source.place.epoch, source.digest, source.place.samples))
        expected = delivered.get(source.place.total)
        if expected is not None and expected != source.digest:
            raise ReplayMismatchError(
                f"{source.name}: replayed from its state after batch {base.place.total}, it yields another batch "
                f"{source.place.total} than was delivered; its state cannot be saved"
            )

    epoch, total = fields["epoch"], fields["total"]
    left = {int(known): at for known, at in fields["left"].items() if base.place.epoch <= int(known) < epoch}
    first, pass_of_base = base.place.total + 1, base.place.epoch
    sure = left.get(pass_of_base, total)
    if fields["doubting"] and first <= sure and not source.seek(first, pass_of_base, seen):
        channel.send("done", at_once=True)
        return
    for known in sorted(left):
        if not (source.seek(left[known], known, seen) and _all_over(source, known)):
            channel.send("done", elsewhere=True)
            return
        leave(source, known, left[known])
    if left:
        base = source.open_pass(step=fields["step"])
    if not source.seek(total, epoch, seen):
        channel.send("done", ended=True, epoch=epoch, total=source.place.total)
        return
    place = source.place.copy()
    unheard = pass_of_base < fields["left_from"] <= epoch
    if unheard or (place.epoch == epoch and place.delivered != fields["delivered"]):
        channel.send("done", elsewhere=True)
        return
    if left and place == base.place:  # a pass that begins is saved by its origin
        if source.unsaved is not None:
            raise source.unsaved
        data = source.marked(base).encode()
        channel.send("done", data, ended=False, samples=place.samples, digest=source.digest, replayed=list(replayed))
        return
    if source.traits.state_methods:
        source.require_state()
        user, _ = source.state(fields["step"])
    else:
        user = None
    rng = source.rng()
    if fields["from_origin"]:
        data = source.marked(base).encode_at(user, place, rng, source.digest)
    else:
        data = source.marked(Base(place, user, rng, None, source.digest)).encode()
    if place.epoch < epoch and not _all_over(source, epoch):
        channel.send("done", elsewhere=True)
        return
    channel.send("done", data, ended=False, samples=place.samples, digest=source.digest, replayed=list(replayed))
