"""Crossings: the ways in which a loader that was restored within an epoch enters the next epoch.

The next epoch of a loader that ran the whole epoch is opened by `iter()`. A loader that was restored within an epoch
may not know any more where an epoch begins: a Hugging Face IterableDataset begins every later epoch at the restored
position. A new loader from input_fn begins an epoch at its beginning, but if it counts epochs, its count is wrong. A
loader replayed from the beginning is always right, but takes long. So there are three crossings:

    KEPT     continue with the restored loader
    FRESH    call input_fn() again, with the random generators as they are
    REPLAY   replay a new loader from the beginning

`StreamHistory.crossing` names the right crossing, once it is known. Until then KEPT and FRESH are both tried: each
makes the first batch of the next epoch. If the two batches are equal, and so are the results of `state_dict()` and the
random generators after them, FRESH is used. Otherwise the slot's stream is replayed from the beginning, once. The first
batch, the state and the generators after the replay show which crossing is right, and this one is used for the rest of
the run. If the stream cannot be replayed from the beginning, equal first batches are enough for FRESH, and others are
an error.

Comparing the batch alone is not enough: where the order of shards depends on the epoch's number, two epochs may begin
with the same batch. If a state was saved at the end of the restored epoch, the digest of the batch that followed is
known (`PositionedLoader.awaited`): a crossing that leads to another batch is wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from penstock.proto.batch.digest import cover_of
from penstock.proto.batch.replay_digest import ReplayDigest
from penstock.proto.errors import InputFnError, PenstockError, ReplayMismatchError
from penstock.proto.state.codec import encode_state
from penstock.worker.loader.crossing_kinds import (
    FRESH,
    KEPT,
    REPLAY,
    EpochBeginning,
    first_choice,
    lead_to_same_epoch,
    right_crossing,
)
from penstock.worker.loader.positioned_loader import PositionedLoader
from penstock.worker.loader.restart_plan import Leg, Target
from penstock.worker.loader.restart_points import END, RestartPoint, StreamHistory, StreamPosition
from penstock.worker.loader.travel import catch_up, travel

__all__ = ["cross"]

_log = logging.getLogger("penstock.worker")


def cross(source: PositionedLoader, step: int) -> RestartPoint:
    """Open the next epoch of a loader that was restored within an epoch, in the way that gives the right batches. The
    ways (crossings) are explained at the top of this module. If the right one is not known, it is found first. Return
    the epoch start: the loader's state at the new epoch's beginning.

    step: training step of the box (data-parallel rank) that `get_worker_state()` reports to the loader's state_dict().
    """
    end, untouched, history = source.rng(), source.is_untouched, source.history
    choice = first_choice(
        history.crossing,
        methods=source.capabilities.state_methods,
        whole=history.complete,
        untouched=untouched,
        strays=source.strays,
    )
    if choice == KEPT:
        return source.open(step=step)
    if source.by_own_methods:
        return _cross_as_resumed(source, step)
    if choice == FRESH:
        source.renew(end)
        return source.open(step=step)
    take = ReplayDigest(cover=cover_of(source.assignment.loader.options)).take
    if choice == REPLAY:
        _from_the_beginning(source, take)
        return source.open(step=step)
    kept = _tried(source, step, take)
    source.renew(end)
    fresh = _tried(source, step, take)
    if lead_to_same_epoch(kept, fresh, awaited=source.awaited.get(source.position.total), whole=history.complete):
        source.learn_crossing(FRESH)
        source.renew(end)
        return source.open(step=step)
    _from_the_beginning(source, take)
    opened = source.open(step=step)
    right = _beginning_of(source, take)
    if not untouched:
        source.learn_crossing(right_crossing(right, kept, fresh))
        opened = source.marked(opened)
        _log.warning(
            "%s: restored within epoch %d, the loader begins the next epoch differently from a new loader. A replay of "
            "all batches from the beginning has shown which of the two is right: %s",
            source.name,
            source.position.epoch - 1,
            {KEPT: "the restored loader", FRESH: "the new loader"}.get(source.history.crossing, "neither"),
        )
    return opened


def _cross_as_resumed(source: PositionedLoader, step: int) -> RestartPoint:
    """Open the next epoch of a loader that resumes by its own four state methods (deaggregate_state_dict, then
    load_state_dict), and so can be restored only to the start of its launch. Return the epoch start.

    First the loader opens the epoch in its present state. This is right if the first batch is the one that followed
    when a state was saved at this position. If that batch is not known or differs, a new loader is replayed from the
    beginning, once, and makes the right first batch. If both first batches are equal, the resumed loader is used from
    now on, otherwise the replayed loader.
    """
    take = ReplayDigest(cover=cover_of(source.assignment.loader.options)).take
    start, untouched, target, history = source.start, source.is_untouched, source.position.copy(), source.history
    awaited = source.awaited.get(target.total)
    came: EpochBeginning | None = None
    if history.crossing != REPLAY:
        try:
            opened = source.open(step=step)
            came = _beginning_of(source, take)
        except InputFnError as error:
            _log.info("%s: the restored loader failed to begin the next epoch: %s", source.name, error.message)
        else:
            if awaited is not None and came.digest == awaited:
                return opened
        source.abort()
    _from_the_beginning(source, take)
    opened = source.open(step=step)
    right = _beginning_of(source, take)
    if came is not None and came.digest == right.digest and start is not None:
        if not untouched:
            source.learn_crossing(KEPT)
        _as_resumed(source, start, target, history, take)
        return source.open(step=step)
    if not untouched and history.crossing != REPLAY:
        source.learn_crossing(REPLAY)
        opened = source.marked(opened)
        _log.warning(
            "%s: restored within epoch %d, the loader does not begin the next epoch with the right batch. To get the "
            "right batches, all batches are replayed from the beginning at the first end of an epoch after each "
            "restore, which takes long",
            source.name,
            target.epoch - 1,
        )
    return opened


def _to(source: PositionedLoader, target: StreamPosition, history: StreamHistory, seen: Callable[[Any], None]) -> None:
    """Replay the loader to the position `target`, and call `seen` with each batch. An epoch that ends before the
    position is not an error."""

    def go(leg: Leg) -> None:
        source.seek(leg.total, leg.epoch, seen)

    travel(source, Target(target.epoch, target.total, dict(history.abandoned)), go)


def _as_resumed(
    source: PositionedLoader,
    start: RestartPoint,
    target: StreamPosition,
    history: StreamHistory,
    take: Callable[[Any], tuple[int, int]],
) -> None:
    """Bring a loader that resumes by its own four state methods back to its position between two epochs: restore the
    state with which its launch began, then replay. On the way, iter() on the same loader opens each next epoch."""

    def seen(batch: Any) -> None:
        source.digest, samples = take(batch)
        source.position.samples += samples

    source.restore(start)
    source.restored = False
    _to(source, target, history, seen)
    catch_up(source, target.epoch)
    source.restored = True


def _beginning_of(source: PositionedLoader, take: Callable[[Any], tuple[int, int]]) -> EpochBeginning:
    batch = source.peek()
    digest = None if batch is END else take(batch)[0]
    try:
        return EpochBeginning(digest, encode_state(source.state(source.position.total)[0]) + source.rng())
    except PenstockError:
        return EpochBeginning(digest, b"")


def _tried(source: PositionedLoader, step: int, take: Callable[[Any], tuple[int, int]]) -> EpochBeginning:
    """Open the next epoch with the loader in its present state, return the epoch's beginning, and undo the opening. An
    error of the loader is part of the result, because some loaders cannot open an epoch after a restore."""
    try:
        source.open(step=step)
        return _beginning_of(source, take)
    except InputFnError as error:
        return EpochBeginning(None, b"", error.message)
    finally:
        source.abort()


def _from_the_beginning(source: PositionedLoader, take: Callable[[Any], tuple[int, int]]) -> None:
    """Replay a loader from the beginning of its stream up to its present position, which is between two epochs.

    Raises ReplayMismatchError if the stream cannot be replayed from the beginning, or if the replay does not end at the
    present position, with the batch that was delivered last.
    """
    target, digest, history = source.position.copy(), source.digest, source.history
    why = (
        f"{source.name}: the right first batch of epoch {target.epoch} cannot be determined: the loader was restored "
        "within the previous epoch, and may begin this epoch with another batch than a loader that was not restored"
    )
    if not history.complete:
        raise ReplayMismatchError(
            f"{why}; and the batches cannot be replayed from the beginning. That needs a run that began with the "
            "present numbers of boxes and workers, resumed from no edited state, and abandoned at most a thousand "
            "epochs by `break`. Return the epoch and the position in the epoch from state_dict(), so that a restored "
            "loader begins the next epoch as one that was not restored"
        )

    def seen(batch: Any) -> None:
        source.digest, samples = take(batch)
        source.position.samples += samples

    source.begin()
    _to(source, target, history, seen)
    catch_up(source, target.epoch)
    if (source.position.epoch, source.position.total) != (target.epoch, target.total) or (
        digest and source.digest != digest
    ):
        raise ReplayMismatchError(
            f"{why}; and in a replay from the beginning, the batches up to number {target.total} are not those that "
            "were delivered, or the epochs end elsewhere. The loader is not deterministic: run penstock doctor"
        )
    source.history = history.of(source.history.launch)
