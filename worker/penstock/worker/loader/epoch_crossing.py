"""Over the end of an epoch with a loader that was restored within it.

A loader that ran the whole epoch is asked for the next one by `iter()`. One that was restored in its middle may not
know any more where an epoch begins: a Hugging Face IterableDataset begins every later epoch there again. One that
input_fn makes anew begins where epochs begin, but may count epochs and know nothing of those before. The loader that
ran from the beginning shows what is right, where it can be compared. `StreamHistory.rewinds` says which of three ways
it is:

    KEPT     go on with the restored loader
    FRESH    input_fn() anew, with the generators as they are
    REPLAY   neither: only a loader that comes from the beginning

Where it is not known, the first batch of the next epoch is made in the first two ways. If they are equal, and what the
loader says of itself after them (its `state_dict()`, the generators), FRESH will do; else the slot's stream is made
again from the beginning, once, and what comes then is the answer for good. The batch alone would not tell: where an
epoch's number decides on the order of shards, two epochs may well begin with the same one. Where a state was saved at
an epoch's end, the batch that came next then is known (`RestorableLoader.awaited`): ways that agree on another one are
wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.proto.batch.digest import cover_of
from penstock.proto.batch.replay_digest import ReplayDigest
from penstock.proto.errors import InputFnError, PenstockError, ReplayMismatchError
from penstock.proto.state.codec import encode_state
from penstock.worker.loader.crossing_kinds import FRESH, KEPT, REPLAY
from penstock.worker.loader.restart_points import END, RestartPoint, StreamHistory, StreamPosition

if TYPE_CHECKING:
    from penstock.worker.loader.restorable_loader import RestorableLoader

__all__ = ["catch_up", "cross", "leave", "travel"]

_log = logging.getLogger("penstock.worker")


def cross(source: RestorableLoader, step: int) -> RestartPoint:
    """Open the next epoch of a restored source in the way that is right; returns its epoch start."""
    end, untouched = source.rng(), source.is_untouched
    no_other_word = (
        source.capabilities.state_methods == 4 and not source.history.complete
    )  # its stream began on another topology
    if no_other_word or (source.history.crossing == KEPT and not (untouched or source.strays)):
        return source.open(step=step)
    if source.by_own_methods:
        return _cross_as_resumed(source, step)
    if source.history.crossing == FRESH and not source.strays:
        source.renew(end)
        return source.open(step=step)
    take = ReplayDigest(cover=cover_of(source.assignment.loader.options)).take
    if source.history.crossing == REPLAY or source.strays:
        _from_the_beginning(source, take)
        return source.open(step=step)
    kept = _tried(source, step, take)
    source.renew(end)
    fresh = _tried(source, step, take)
    same = fresh == kept or (fresh.alike(kept) and not source.history.complete)  # where nothing could tell more
    awaited = source.awaited.get(source.position.total, fresh.digest)
    if same and awaited == fresh.digest:
        source.learn_rewinds(FRESH)
        source.renew(end)
        return source.open(step=step)
    _from_the_beginning(source, take)
    opened = source.open(step=step)
    right = _First.of(source, take)
    if not untouched:
        source.learn_rewinds(KEPT if right == kept else FRESH if right == fresh else REPLAY)
        opened = source.marked(opened)
        _log.warning(
            "%s: restored within pass %d, it does not begin the next one as a loader made anew. Which "
            "one is right was found out by making its stream again from the beginning, once: %s",
            source.name,
            source.position.epoch - 1,
            {KEPT: "the restored loader", FRESH: "the one made anew"}.get(source.history.crossing, "neither"),
        )
    return opened


def _cross_as_resumed(source: RestorableLoader, step: int) -> RestartPoint:
    """The same with a loader that is resumed by its own methods, and can be restored only where its launch began.

    What it makes of the next epoch is right if that begins with the batch that came when the state was saved there, or
    with that of a loader from the beginning, which is made once.
    """
    take = ReplayDigest(cover=cover_of(source.assignment.loader.options)).take
    start, untouched, goal, history = source.start, source.is_untouched, source.position.copy(), source.history
    awaited = source.awaited.get(goal.total)
    came: _First | None = None
    if history.crossing != REPLAY:
        try:
            opened = source.open(step=step)
            came = _First.of(source, take)
        except InputFnError as error:
            _log.info("%s: restored, it does not get over the end of its epoch: %s", source.name, error.message)
        else:
            if awaited is not None and came.digest == awaited:
                return opened
        source.abort()
    _from_the_beginning(source, take)
    opened = source.open(step=step)
    right = _First.of(source, take)
    if came is not None and came.digest == right.digest and start is not None:
        if not untouched:
            source.learn_rewinds(KEPT)
        _as_resumed(source, start, goal, history, take)
        return source.open(step=step)
    if not untouched and history.crossing != REPLAY:
        source.learn_rewinds(REPLAY)
        opened = source.marked(opened)
        _log.warning(
            "%s: restored within pass %d, it does not begin the next one with the right batch: its stream is made "
            "again from the beginning at the end of each epoch",
            source.name,
            goal.epoch - 1,
        )
    return opened


def _as_resumed(
    source: RestorableLoader,
    start: RestartPoint,
    goal: StreamPosition,
    history: StreamHistory,
    take: Callable[[Any], tuple[int, int]],
) -> None:
    """Bring a loader that is resumed as its launch was back to where it stood, between two epochs. It got over the ends
    on the way by itself, and does again: they are not looked at once more."""

    def seen(batch: Any) -> None:
        source.digest, samples = take(batch)
        source.position.samples += samples

    source.restore(start)
    source.restored = False
    travel(
        source, dict(history.abandoned), goal.total, goal.epoch, lambda total, epoch: source.seek(total, epoch, seen)
    )
    catch_up(source, goal.epoch)
    source.restored = True


@dataclass(frozen=True)
class _First:
    """What an epoch begins with."""

    digest: int | None
    """Of its first batch, None if it has none."""
    behind: bytes
    """The loader's state after it, and the generators; b"" if it cannot be had."""
    failure: str = ""
    """What the loader raised instead."""

    def alike(self, other: _First) -> bool:
        """The batch is the same one."""
        return (self.digest, self.failure) == (other.digest, other.failure)

    @classmethod
    def of(cls, source: RestorableLoader, take: Callable[[Any], tuple[int, int]]) -> _First:
        batch = source.peek()
        digest = None if batch is END else take(batch)[0]
        try:
            return cls(digest, encode_state(source.state(source.position.total)[0]) + source.rng())
        except PenstockError:
            return cls(digest, b"")


def _tried(source: RestorableLoader, step: int, take: Callable[[Any], tuple[int, int]]) -> _First:
    """What the epoch begins with if it is opened as the source is now. A loader that raises where it was restored may
    be one that cannot begin again, and another way is right; if it always raises, the last way says so."""
    try:
        source.open(step=step)
        return _First.of(source, take)
    except InputFnError as error:
        return _First(None, b"", error.message)
    finally:
        source.abort()


def _from_the_beginning(source: RestorableLoader, take: Callable[[Any], tuple[int, int]]) -> None:
    """Bring a loader from the beginning to where the source stands, between two epochs."""
    goal, digest, history = source.position.copy(), source.digest, source.history
    why = (
        f"{source.name}: how it begins pass {goal.epoch} cannot be known: it was restored within the epoch before, and "
        "would not begin this one as a loader that input_fn makes anew"
    )
    if not history.complete:
        raise ReplayMismatchError(
            f"{why}; and its stream cannot be made again from the beginning, for it began on another topology, or more "
            "than a thousand epochs were left by `break`. Give the loader a state that says where an epoch begins"
        )

    def seen(batch: Any) -> None:
        source.digest, samples = take(batch)
        source.position.samples += samples

    source.begin()
    travel(
        source, dict(history.abandoned), goal.total, goal.epoch, lambda total, epoch: source.seek(total, epoch, seen)
    )
    catch_up(source, goal.epoch)
    if (source.position.epoch, source.position.total) != (goal.epoch, goal.total) or (
        digest and source.digest != digest
    ):
        raise ReplayMismatchError(
            f"{why}; and made again from the beginning, batch {goal.total} is not the one that was delivered: the "
            "loader does not reproduce its batches (see penstock doctor)"
        )
    source.history = history.of(source.history.launch)


def travel(
    source: RestorableLoader, left: dict[int, int], total: int, epoch: int, seek: Callable[[int, int], object]
) -> None:
    """Go to batch `total` in epoch `epoch`, the way that the loop went: out of the epochs that it left, where it
    did."""
    for known in sorted(known for known in left if source.position.epoch <= known < epoch):
        seek(left[known], known)
        leave(source, known, left[known])
    seek(total, epoch)


def catch_up(source: RestorableLoader, epoch: int) -> None:
    """Go to where epoch `epoch` is opened, if the source is not that far, over the end of the epoch that it is in and
    of those in between, of which it had no batch. Raises ReplayMismatchError if one comes."""
    while source.position.epoch < epoch:
        if not source.is_open:
            source.open_epoch()
        source.reach_end()


def leave(source: RestorableLoader, epoch: int, total: int) -> None:
    """Leave epoch `epoch` after batch `total`, where the source stands, as the loop left it."""
    catch_up(source, epoch)
    if not source.is_open:
        source.open_epoch()
    if not source.saves_state:
        source.reseed("left", epoch, total)
    source.abandon_epoch(total)
