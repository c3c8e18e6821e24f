"""The program of a helper process: makes a second loader beside the streaming one, does one task with it, and ends.

- `verify`: restore a restart point (a loader's state and position) and compare the next batches with the delivered
  ones: see verification.py.
- `state`: replay from the restart point that the daemon names to a position, and make a restart point there, with the
  loader's state if its states are aggregated.
- `advance`: compute a later state without making batches, for loaders with a method `advance_state`; input_fn is not
  called.
- `mixture`: try a change of the weights of the loader's mixture, which an operator orders.
- `aggregate`: make one state of all workers' states, for a training job that cannot build the loader itself.

The helper has memory of its own, so user code that fails or hangs there does not stop the stream.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections import deque
from dataclasses import replace
from typing import Any, Protocol, cast

from penstock.proto.batch.digest import cover_of
from penstock.proto.batch.replay_digest import ReplayDigest
from penstock.proto.errors import InputFnError, LaneLostError, ReplayMismatchError
from penstock.proto.state.codec import decode_state, encode_state
from penstock.proto.v1 import coordinator_pb2, records_pb2
from penstock.runtime.process import forks
from penstock.worker.loader.crossing_kinds import FRESH, REPLAY, to_try
from penstock.worker.loader.restart_plan import Target, route
from penstock.worker.loader.restart_points import END, UNFIT, RestartPoint, StreamPosition
from penstock.worker.loader.restorable_loader import RestorableLoader
from penstock.worker.loader.travel import leave
from penstock.worker.processes.control_channel import ControlChannel, ControlMessage, begin_slot, plain_detail
from penstock.worker.processes.progress_page import ENTRIES
from penstock.worker.processes.user_code import MAIN, load_class

__all__ = ["run_task", "state_at"]

_log = logging.getLogger("penstock.worker")

MOST_MODULES = 8192
"""Largest number of module names that a helper process reports."""


class _Answer(Protocol):
    def send(self, kind: str, payload: bytes = b"", **fields: Any) -> None: ...


class _ReportingAnswer:
    """Wrapper of a channel that adds to an answer the names of the modules imported for the task, so that warm helpers
    can import the same modules (helper_process.py)."""

    def __init__(self, channel: ControlChannel, known: set[str]) -> None:
        self._channel, self._known = channel, known

    def send(self, kind: str, payload: bytes = b"", **fields: Any) -> None:
        modules = [name for name in list(sys.modules) if name not in self._known and name != MAIN][:MOST_MODULES]
        self._channel.send(kind, payload, modules=modules, **fields)


def run_task(channel: ControlChannel) -> None:
    """Do one task: receive the message `assign`, any number of messages `point`, and the task; send `done` or
    `failed`."""
    forks.host_user_code()
    forks.keep(channel)
    known = set(sys.modules)
    with contextlib.suppress(LaneLostError):
        assignment = begin_slot(cast(ControlMessage, channel.receive()), "replayer")
        values: list[bytes] = []
        began = time.process_time()
        try:
            while (message := cast(ControlMessage, channel.receive())).kind == "point":
                values.append(message.payload)
            answer: _Answer = _ReportingAnswer(channel, known) if message.fields.get("learn") else channel
            if message.kind == "advance":
                answer.send("done", _advanced(RestartPoint.decode(values[0]), assignment, message.fields))
                return
            source = RestorableLoader(assignment)
            source.build()
            if message.kind == "mixture":
                trial = coordinator_pb2.MixtureTrial.FromString(values[0])
                resume = cast(dict[str, Any], decode_state(values[1])) if len(values) > 1 else None
                answer.send("done", source.plan_change(trial, resume))
                return
            replay_digest = ReplayDigest(cover=cover_of(assignment.loader.options))
            if message.kind == "aggregate":
                states = cast(list[Any], decode_state(values[0]))
                answer.send("done", encode_state(source.aggregate(states)))
                return
            if message.kind == "verify":
                points = [RestartPoint.decode(value) for value in values]
                result = _verify(source, points[0], message.fields, replay_digest, *points[1:])
                answer.send("done", took=time.process_time() - began, **result)
                return
            if len(values) > 1:
                source.learn_resume(cast(dict[str, Any], decode_state(values[1])))
            result, data = state_at(source, RestartPoint.decode(values[0]), message.fields, replay_digest)
            answer.send("done", data, **result)
        except LaneLostError:
            raise
        except Exception as error:
            channel.send("failed", error=plain_detail(error))


def _verify(
    source: RestorableLoader,
    point: RestartPoint,
    fields: dict[str, Any],
    replay_digest: ReplayDigest,
    opened: RestartPoint | None = None,
) -> dict[str, Any]:
    """Return the result of a verification as fields. `same` is True if the restart point leads to the delivered
    batches. With `same` False, `differs` is the number of the first wrong batch, `what` says how it differs, and
    `alike` is False if a new loader makes other first batches of the slot than before. With `same` True, `crossing` is
    the loader's crossing (its way into the next epoch; see epoch_crossing.py), "" if it was not searched for.

    Args:
        source: a newly built loader.
        point: the restart point to verify.
        fields: fields of the task, listed below.
        opened: a snapshot of the streaming loader after the first batch of the next epoch; None if there is none.

    Fields of the task:
        digests: number of the batch in its slot -> [epoch, digest], for the delivered batches after the restart point.
            If some belong to later epochs, the loader's crossing is searched for.
        crossing: the crossing known so far; "" = none.
        left: True if the training loop abandoned the restart point's epoch. Otherwise the loader must end that epoch
            after the last of these batches in it.
        generators: see `_compare`.
        early: like `digests`, for the slot's first batches, or empty. If the restart point is wrong, and the stream can
            be replayed from the beginning, these batches are compared with those of a new loader.
    """
    delivered = {int(total): (epoch, digest) for total, (epoch, digest) in fields["digests"].items()}
    source.restore(point)
    differs, what = _compare(source, delivered, replay_digest, point.position.epoch, fields["generators"])
    beyond = {total: entry for total, entry in delivered.items() if entry[0] > point.position.epoch}
    if not what and beyond and not fields["left"] and source.next() is not END:
        differs, what = source.position.total, "continues after the last batch of its epoch"
    if what:
        early = {int(total): (epoch, digest) for total, (epoch, digest) in fields["early"].items()}
        alike = True
        if early and source.history.complete:
            source.begin()
            source.open_epoch()
            alike = not _compare(source, early, replay_digest, 0)[1]
        return {"same": False, "differs": differs, "what": what, "alike": alike}
    if beyond and fields["left"]:
        source.abandon_epoch(source.position.total)
    crossing = ""
    if beyond and source.restored:
        crossing = _find_crossing(source, beyond, replay_digest, fields["crossing"], opened)
    return {"same": True, "crossing": crossing}


def _find_crossing(
    source: RestorableLoader,
    beyond: dict[int, tuple[int, int]],
    replay_digest: ReplayDigest,
    known: str,
    opened: RestartPoint | None,
) -> str:
    """Return the crossing (way into the next epoch, crossing_kinds.py) with which the loader, now at the end of its
    epoch, continues with the right batches of later epochs. Return `known` if it is still right, otherwise one that
    comes later in WAYS.

    beyond: number of the batch -> (epoch, digest), for the delivered batches of later epochs.
    """
    end, position = source.rng(), source.position.copy()
    for way in to_try(known):
        source.position = position.copy()
        try:
            if way == FRESH:
                source.renew(end)
            if _leads_on(source, beyond, replay_digest, opened):
                return way
        except InputFnError as error:  # some loaders cannot open another epoch after a restore
            _log.info(
                "%s: a loader with a restored state failed to begin the next epoch; trying another way: %s",
                *(source.name, error.message),
            )
        source.abort()
    return REPLAY


def _leads_on(
    source: RestorableLoader,
    beyond: dict[int, tuple[int, int]],
    replay_digest: ReplayDigest,
    opened: RestartPoint | None,
) -> bool:
    """Return True if the loader, which is between two epochs, continues with the right batches.

    beyond: number of the batch -> (epoch, digest), for the delivered batches of later epochs. opened: snapshot of the
    streaming loader after the first of these batches. The loader's state must equal this snapshot, because later epochs
    may depend on the state.
    """
    for epoch in sorted({epoch for epoch, _ in beyond.values()}):
        while source.position.epoch < epoch:
            if not source.is_open:
                source.open()
            if source.next() is not END:
                return False
        source.open()
        if _compare(source, beyond, replay_digest, epoch, opened=opened)[1]:
            return False
    return True


def _compare(
    source: RestorableLoader,
    delivered: dict[int, tuple[int, int]],
    replay_digest: ReplayDigest,
    epoch: int,
    generators: int = 0,
    opened: RestartPoint | None = None,
) -> tuple[int, str]:
    """Make the delivered batches of epoch `epoch` again, and compare them. Return the number of the first batch that
    differs, and a text that says how; 0 and "" if all batches are the same.

    delivered: number of the batch -> (epoch, digest). generators: hash that the random generators must have after the
    first batch; 0 = any. opened: snapshot that the streaming loader took after one of these batches. After the same
    batch, this loader must have the same state; None = any state.
    """
    while (expected := delivered.get(source.position.total + 1)) is not None and expected[0] == epoch:
        batch = source.next()
        if batch is END:
            return source.position.total + 1, "yields nothing more"
        digest, samples = replay_digest.take(batch)
        source.position.samples += samples
        if digest != expected[1]:
            return source.position.total, "yields another batch"
        if generators and source.rng_hash() != generators:
            return source.position.total, "draws other random numbers"
        if opened is not None and source.position.total == opened.position.total and not _equals(source, opened):
            return source.position.total, "is in another state"
        generators = 0
    return 0, ""


def _equals(source: RestorableLoader, point: RestartPoint) -> bool:
    """Return True if the states of the loader and of the random generators equal those in the snapshot `point`."""
    state = source.state(point.step or point.position.total)[0]
    return source.rng() == point.rng and encode_state(state) == encode_state(point.state)


def _advanced(point: RestartPoint, assignment: records_pb2.WorkerAssignment, fields: dict[str, Any]) -> bytes:
    """Return the encoded state for a later position in the restart point's epoch, computed by the loader's class
    (`advance_state`)."""
    loader = load_class(fields["loader"], assignment.loader)
    position = StreamPosition(point.position.epoch, fields["delivered"], fields["total"], fields["samples"])
    state = loader.advance_state(point.state, position.total - point.position.total)
    return replace(point, position=position, state=state, digest=fields["digest"], rng_before=None, step=0).encode()


def _no_batch_before(source: RestorableLoader, epoch: int) -> bool:
    """Return True if the loader reaches the beginning of epoch `epoch` without yielding a batch. If it yields one, the
    training loop has abandoned an earlier epoch, and this process was not told. A resume from this state would continue
    the abandoned epoch."""
    while source.position.epoch < epoch:
        if not source.is_open:
            source.open_epoch()
        if source.next() is not END:
            return False
    return True


def state_at(
    source: RestorableLoader, point: RestartPoint, fields: dict[str, Any], replay_digest: ReplayDigest
) -> tuple[dict[str, Any], bytes]:
    """Replay the slot's batches from the restart point to a position, and save the loader's state there. If the replay
    makes other batches than were delivered, replay from the beginning of the run.

    Return the fields that describe the position, and the encoded state. Without a state, return b"" and the field
    `elsewhere` (the replay does not lead to the position) or `ended` (its epoch ends before it, after batch `total`).

    fields: fields of the task. `total`: number of the slot's batches over the run up to the position. `epoch`: the
    position's epoch. `delivered`: number of the slot's batches in that epoch up to the position. `step`: training step
    of the box (data-parallel rank) that `get_worker_state()` reports to the loader's state_dict(). `digests`: number of
    the batch -> digest, for batches whose replay is compared. `left`: abandoned epochs, as number of the epoch ->
    number of the slot's last batch in it. All abandoned epochs from `abandoned_from` on are in it. `following`: True to
    make the batch after the position too, for its digest.
    """
    try:
        source.restore(point)
        return _replayed(source, point, point.position.epoch, fields, replay_digest)
    except UNFIT as mismatch:
        as_made = point.is_beginning and not source.capabilities.exact_states  # see RestorableLoader.restore
        if as_made or not point.history.complete:
            raise
        _log.warning("%s; the slot's batches are replayed from the beginning of the run instead", mismatch.message)
        history = source.history = point.history
        source.begin()
        return _replayed(
            source, replace(source.open_epoch(), history=history), point.position.epoch, fields, replay_digest
        )


def _replayed(
    source: RestorableLoader, point: RestartPoint, known_until: int, fields: dict[str, Any], replay_digest: ReplayDigest
) -> tuple[dict[str, Any], bytes]:
    """Replay a loader from the restart point, where it is now, to the position in `fields`, and save the loader's state
    there. Return the same as `state_at`.

    known_until: number of an epoch. The restart point's history lists the abandoned epochs before this one completely.
    """
    delivered = {int(total): digest for total, digest in fields["digests"].items()}
    replayed: deque[tuple[int, int, int]] = deque(maxlen=ENTRIES)

    def seen(batch: Any) -> None:
        source.digest, samples = replay_digest.take(batch)
        source.position.samples += samples
        replayed.append((source.position.epoch, source.digest, source.position.samples))
        expected = delivered.get(source.position.total)
        if expected is not None and expected != source.digest:
            raise ReplayMismatchError(
                f"{source.name}: in a replay from the position after batch {point.position.total}, the loader makes "
                f"another batch {source.position.total} than the one that was delivered. The loader is not "
                "deterministic: run penstock doctor"
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
    unknown_abandoned = known_until < fields["abandoned_from"] <= epoch
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
    data = source.marked(RestartPoint(position, user, rng, digest=source.digest, replayed_from=point)).encode()
    if position.epoch < epoch and not _no_batch_before(source, epoch):
        return {"elsewhere": True}, b""
    there = {"samples": position.samples, "digest": source.digest, "replayed": list(replayed)}
    following = 0
    if fields.get("following") and position.epoch == epoch:
        if source.peek() is END:
            source.next()
            source.open_epoch()
        following = 0 if (batch := source.next()) is END else replay_digest.take(batch)[0]
    return {"ended": False, "following": following, "over": source.position.epoch > epoch, **there}, data
