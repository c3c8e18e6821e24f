"""Resume of a loader that vouches for its states, and its comparison with what the saved run delivered.

The saved state holds a restart point that lies before the last delivered batch. It is restored, and the batches up to
the position are made again. The last one must be the delivered one, so other data, other code and a generator whose
state the loader does not save are found, however slow the loader is. A loader with four methods then loads its part of
the aggregated state. A difference is an error: there is no second way, because the loader's word is that its states
are right.

On other numbers of boxes and workers the record's own box and slot are made once more, with the record's numbers: each
slot compares one of them, before it makes its own loader (`compare_record`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from penstock.proto.batch.digest import cover_of
from penstock.proto.batch.replay_digest import ReplayDigest
from penstock.proto.errors import ReplayMismatchError, StateMismatchError
from penstock.proto.v1 import records_pb2
from penstock.worker.loader.positioned_loader import PositionedLoader
from penstock.worker.loader.restart_plan import Leg, Target
from penstock.worker.loader.restart_points import END, RestartPoint, StreamHistory, StreamPosition
from penstock.worker.loader.travel import catch_up, cause_of, travel

__all__ = ["record_of", "resume_vouched"]

_log = logging.getLogger("penstock.worker")


def resume_vouched(
    source: PositionedLoader,
    part: dict[str, Any],
    then: int,
    keep: Callable[[RestartPoint, bool], None],
    go: Callable[[Leg], object],
) -> None:
    """Bring a loader that vouches for its states to the position of a saved state, on the saved numbers of boxes and
    workers.

    Args:
        part: the slot's part of the decoded state.
        then: number of the epoch that follows: the next one, if this slot had ended its epoch.
        keep, go: as in `start`.

    Raises ReplayMismatchError if the loader does not make the delivered batches.
    """
    a = source.assignment
    compares, point = source.trusts_history(part), RestartPoint.of(part)
    launch = replace(source.history.launch, samples=part.get("samples", 0))
    history = point.history.of(launch) if compares else StreamHistory(launch)
    digest = part["digest"] if compares else 0
    target = Target(a.start.epoch, a.start.slots[a.slot].total, dict(history.abandoned), digest)
    if source.capabilities.state_methods == 4:
        if compares and point.state is not None:
            _make_again(source, replace(point, history=history), target, go)
        _load_aggregated(source, part, history, keep)
    else:
        source.restore(replace(point, history=history))
        keep(source.marked(point), True)
    travel(source, target, go)
    catch_up(source, then)
    if compares and part.get("next_digest"):
        _compare_next(source, part, keep)


def _make_again(source: PositionedLoader, point: RestartPoint, target: Target, go: Callable[[Leg], object]) -> None:
    """Make the last batches before the position again, from an earlier state of this slot."""
    try:
        source.restore(point)
    except StateMismatchError as error:  # such as other ranges to skip, which only an aggregated state may have
        _log.info("%s: the last delivered batch is not compared: %s", source.name, error.message)
        return
    travel(source, target, go)


def _load_aggregated(
    source: PositionedLoader,
    part: dict[str, Any],
    history: StreamHistory,
    keep: Callable[[RestartPoint, bool], None],
) -> None:
    resume, restart = source.resume, part["restart"]
    assert resume is not None
    if source.capabilities.is_iterator:
        source.begin()
    source.abort()
    source.learn_skips(RestartPoint.of(part))
    source.history = history
    source.resume_by_own_methods(resume["aggregated"], resume["strict"])
    source.position, source.digest = StreamPosition(*restart["at"]), restart["digest"]
    keep(source.open(step=source.assignment.start.step, rng_after=restart.get("rng", b"")), True)


def _compare_next(source: PositionedLoader, part: dict[str, Any], keep: Callable[[RestartPoint, bool], None]) -> None:
    """Raise ReplayMismatchError unless the next batch is the one that followed when the state was saved. If that is the
    next epoch's first, it is compared when that epoch is opened."""
    if not source.is_open:
        keep(source.open_epoch(step=source.assignment.start.step), False)
    batch = source.peek()
    if batch is END and part.get("next_epoch"):
        return
    link_of = ReplayDigest(cover=cover_of(source.assignment.loader.options)).link_of
    if batch is END or link_of(batch) != part["next_digest"]:
        how = "ends its epoch instead of yielding" if batch is END else "yields another batch than"
        raise ReplayMismatchError(
            f"{source.name}: resumed from its state after batch {source.position.total} of the slot, the loader {how} "
            f"the batch that followed when the state was saved. {cause_of(source)}"
        )


def record_of(
    assignment: records_pb2.WorkerAssignment, resume: dict[str, Any] | None
) -> tuple[records_pb2.WorkerAssignment, dict[str, Any]] | None:
    """Return what a slot compares before it resumes on other numbers of boxes and workers than the saved ones: the
    assignment of one slot of the saved run, and the state from which that slot would resume. None: it compares nothing.
    """
    changed = not assignment.resume.same_topology
    record = resume.get("records", {}).get(assignment.slot) if resume is not None and changed else None
    if resume is None or record is None:
        return None
    if RestartPoint.of(record["part"]).history.launch.worker is not None:
        return None  # the loader resumes by its own four methods only
    there = records_pb2.WorkerAssignment()
    there.CopyFrom(assignment)
    there.box, there.slot, there.num_boxes, there.num_workers_per_box = record["place"]
    there.start.ParseFromString(record["position"])
    there.resume.same_topology, there.resume.anew = True, False
    return there, {**resume, "slots": {there.slot: record["part"]}}
