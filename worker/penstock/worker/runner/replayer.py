"""The program of a helper process: makes a second loader beside the streaming one, does one task with it, and ends. It
has its own memory, so user code that fails or hangs does not stop the stream.

- `state`: replay from a restart point to a position, and make one there, with a state if states are aggregated.
- `advance`: compute a later state by the method `advance_state`, without batches or input_fn.
- `mixture`: try a change of the mixture's weights, which an operator orders.
- `aggregate`: make one state of all workers' states, for a job that cannot build the loader itself.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any, cast

from penstock.proto.batch.digest import cover_of
from penstock.proto.batch.replay_digest import ReplayDigest
from penstock.proto.errors import LaneLostError, ReplayMismatchError
from penstock.proto.state.codec import decode_state, encode_state
from penstock.proto.v1 import coordinator_pb2, records_pb2
from penstock.worker.loader.epoch_goal import EpochGoal
from penstock.worker.loader.restart_plan import Target, route
from penstock.worker.loader.restart_points import END, UNFIT, RestartPoint, StreamPosition
from penstock.worker.loader.slot_loader import CHANGED, SlotLoader
from penstock.worker.loader.travel import leave
from penstock.worker.processes.control_channel import ControlChannel, ControlMessage, begin_slot
from penstock.worker.processes.progress_page import ENTRIES
from penstock.worker.processes.user_code import load_class
from penstock.worker.runner.user_errors import told


def run_task(channel: ControlChannel) -> None:
    """Receive `assign`, any number of `point`, and the task; send `done` or `failed`."""
    assignment = begin_slot(channel, "replayer")
    values: list[bytes] = []
    try:
        while (message := cast(ControlMessage, channel.receive())).kind == "point":
            values.append(message.payload)
        if message.kind == "advance":
            channel.send("done", _advanced(RestartPoint.decode(values[0]), assignment, message.fields))
            return
        source = SlotLoader(assignment)
        source.build()
        if message.kind == "mixture":
            trial = coordinator_pb2.MixtureTrial.FromString(values[0])
            resume = cast(dict[str, Any], decode_state(values[1])) if len(values) > 1 else None
            channel.send("done", source.plan_change(trial, resume))
            return
        if message.kind == "aggregate":
            states = cast(list[Any], decode_state(values[0]))
            channel.send("done", encode_state(source.aggregate(states)))
            return
        source.learn_labels({int(epoch): label for epoch, label in message.fields.get("labels", {}).items()})
        if len(values) > 1:
            source.learn_resume(cast(dict[str, Any], decode_state(values[1])))
        point = RestartPoint.decode(values[0]) if values else _beginning(message.fields)
        replay_digest = ReplayDigest(cover=cover_of(assignment.loader.options))
        result, data = state_at(source, point, message.fields, replay_digest)
        channel.send("done", data, **result)
    except LaneLostError:
        raise
    except Exception as error:
        channel.send("failed", error=told(error))


def _beginning(fields: dict[str, Any]) -> RestartPoint:
    return EpochGoal.beginning(fields["epoch"], fields["total"] - fields["delivered"], fields["samples"]).ways[0]


def _advanced(point: RestartPoint, assignment: records_pb2.WorkerAssignment, fields: dict[str, Any]) -> bytes:
    loader = load_class(fields["loader"], assignment.loader)
    position = StreamPosition(point.position.epoch, fields["delivered"], fields["total"], fields["samples"])
    state = loader.advance_state(point.state, position.total - point.position.total)
    return replace(
        point, position=position, state=state, digest=fields["digest"], chain=fields["chain"], rng_before=None, step=0
    ).encode()


def _no_batch_before(source: SlotLoader, epoch: int) -> bool:
    """Return False if a batch comes before epoch `epoch`: the loop has abandoned an earlier one, unknown here."""
    while source.position.epoch < epoch:
        if not source.is_open:
            source.open_epoch()
        if source.next() is not END:
            return False
    return True


def state_at(
    source: SlotLoader, point: RestartPoint, fields: dict[str, Any], replay_digest: ReplayDigest
) -> tuple[dict[str, Any], bytes]:
    """Replay from the point to a position, and save the loader there; from the epoch's beginning if a pure loader makes
    other batches than were delivered. Return the position's fields and the encoded state; without one b"" and
    `elsewhere` (not reached) or `ended` (the epoch ends after batch `total`).

    fields: `total`, `delivered`: the slot's batches up to the position, in all and in its `epoch`. `samples`: before
    that epoch. `step`: what `get_worker_state()` reports. `digests`: batch -> digest to compare. `left`: epoch -> the
    last batch, of all abandoned epochs from `abandoned_from` on. `following`: also make the next batch, for its digest.
    """
    try:
        source.restore(point)
        return _replayed(source, point, fields, replay_digest)
    except UNFIT as mismatch:
        if not source.is_pure or point.is_epoch_start:
            raise
        beginning = replace(_beginning(fields), skips=point.skips)
        source.log_unfit(mismatch)
        source.restore(beginning)
        return _replayed(source, beginning, fields, replay_digest)


def _replayed(
    source: SlotLoader, point: RestartPoint, fields: dict[str, Any], replay_digest: ReplayDigest
) -> tuple[dict[str, Any], bytes]:
    delivered = {int(total): digest for total, digest in fields["digests"].items()}
    replayed: deque[tuple[int, int, int]] = deque(maxlen=ENTRIES)

    def seen(batch: Any) -> None:
        source.count_replayed(batch, replay_digest)
        replayed.append((source.position.epoch, source.digest, source.position.samples))
        expected = delivered.get(source.position.total)
        if expected is not None and expected != source.digest:
            raise ReplayMismatchError(
                f"{source.name}: replayed batch {source.position.total} differs from the delivered one. {CHANGED}"
            )

    epoch, total = fields["epoch"], fields["total"]
    target = Target(epoch, total, {int(known): at for known, at in fields["left"].items()}).with_abandoned(
        point.history.abandoned
    )
    *abandoned, _ = route(point.position.epoch, target)
    for leg in abandoned:
        if not (source.seek(leg.total, leg.epoch, seen) and _no_batch_before(source, leg.epoch)):
            return {"elsewhere": True}, b""
        leave(source, leg.epoch, leg.total)
    opened = source.open_epoch(step=fields["step"]) if abandoned else None
    if not source.seek(total, epoch, seen):
        return {"ended": True, "epoch": epoch, "total": source.position.total}, b""
    position = source.position.copy()
    unknown_abandoned = point.position.epoch < fields["abandoned_from"] <= epoch
    if unknown_abandoned or (position.epoch == epoch and position.delivered != fields["delivered"]):
        return {"elsewhere": True}, b""
    user, rng = None, b""
    # only aggregated states are taken here; for others the restart point and the number of batches are saved
    if source.capabilities.state_methods == 4:
        source.require_state()
        if source.unsaved is not None:
            raise source.unsaved
        user = opened.state if opened is not None and opened.position == position else source.state(fields["step"])[0]
        rng = source.rng()
    data = source.marked(
        RestartPoint(position, user, rng, digest=source.digest, chain=source.chain, replayed_from=point)
    ).encode()
    if position.epoch < epoch and not _no_batch_before(source, epoch):
        return {"elsewhere": True}, b""
    there = {"samples": position.samples, "digest": source.digest, "chain": source.chain, "replayed": list(replayed)}
    following = 0
    if fields.get("following") and position.epoch == epoch:
        if source.peek() is END:
            source.next()
            source.open_epoch()
        if (batch := source.next()) is not END:
            replay_digest.take(batch)
            following = replay_digest.link
    return {"ended": False, "following": following, "over": source.position.epoch > epoch, **there}, data
