"""A user's loader with its position: opening, saving, restoring and replaying it.

There are three kinds of loaders:

    pure           An epoch is a function of (code, arguments, data, seed, topology, number of the epoch). Each epoch is
                   made by a loader that has made no other, so nothing that one epoch leaves behind reaches the next.
    vouched        `exact_states = True`: one object, kept over epochs. Any of its states is a restart point.
    four methods   The protocol of Cerebras: one object for a launch. It is restored only by its
                   deaggregate_state_dict, so it starts from the beginning, or from the state of the launch.

A pure loader begins epoch e so: the generators of the process are seeded by (seed, box, slot, e), those that the loader
and its modules hold are seeded anew, set_epoch(e) is called where there is one, then `iter(loader)`
(user_loader/loader_generators.py). A snapshot of it is `state_dict()` and all generators after a batch, encoded before
the next `next()`. To restore it: begin the epoch without `iter`, load the state, `iter`, set the generators. Set at any
other moment they give other batches. No state is taken after StopIteration.

The other two kinds are opened by `iter()` alone (RNG: the states of all random generators):

    open an epoch         take RNG R0, `iter(loader)`, take `state_dict()`, take RNG R1           -> an epoch start
    from an epoch start   load its state, set R0, `iter`, set R1, then replay n batches

The runner that streams and the helper processes run the same code, in this module. A loader that makes a second epoch
in one process (in a helper process, or in the training process) is made again by input_fn first, if it is pure.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from penstock.proto.batch.digest import cover_of
from penstock.proto.batch.replay_digest import ReplayDigest
from penstock.proto.errors import PenstockError, ReplayMismatchError, StateMismatchError
from penstock.proto.state.epoch_labels import label_of
from penstock.proto.v1 import records_pb2
from penstock.worker.loader.restart_points import END, Launch, RestartPoint, StreamPosition
from penstock.worker.loader.slot_loader import SlotLoader
from penstock.worker.processes.user_code import load_input_fn

__all__ = ["PositionedLoader"]

_log = logging.getLogger("penstock.worker")


class PositionedLoader(SlotLoader):
    """Loader of a slot that can be replayed, saved and restored. To *open* an epoch means to call iter() on the loader.
    Exceptions of user code are raised as InputFnError.
    """

    def __init__(
        self,
        assignment: records_pb2.WorkerAssignment,
        doing: Callable[[str], None] = lambda activity: None,
        skipped: Callable[[int, int], None] = lambda epoch, count: None,
        load: Callable[[records_pb2.LoaderSpec], Callable[..., Any]] = load_input_fn,
    ) -> None:
        super().__init__(assignment, doing, skipped, load)
        self.digest = 0
        """Digest (hash) of the last batch, which the caller of `next` computes and sets; 0 = not known."""
        self.chain = 0
        """Hash over the batches of the open epoch (proto/state/position.py, `linked`), which the caller of `next`
        extends. It is complete for a pure loader."""
        self.spent_s = 0.0
        """Seconds that the loader has spent on the batches of the open epoch, which the caller of `next` adds up."""
        self.unsaved: Exception | None = None
        """Error that state_dict() raised at an epoch start, which therefore has no state; None if it raised none."""
        self.resume: dict[str, Any] | None = None
        """Decoded state from which the launch resumed; None if it began without a state. A loader that resumes by its
        own methods (deaggregate_state_dict, then load_state_dict) loads this state again when it is restored."""
        self.awaited: dict[tuple[int, int], int] = {}
        """Digests of the first batches of epochs that an earlier runner or launch has made, by (epoch, number of the
        slot's batches before it)."""
        self._has_first = not assignment.start.step and assignment.box == assignment.slot == 0
        """True if the slot makes the run's first batch."""
        self._ahead: list[Any] = []
        """Batch that `peek` has taken and `next` has not returned yet, as a list of at most one."""
        self._rng_at_peek = b""
        self._held: tuple[Iterator[Any], list[Any], RestartPoint | None] | None = None
        """Next epoch, if the loader has begun it before `next` has returned END for the present one: the iterator, the
        batch taken by `peek`, and the epoch start. None otherwise."""
        self._start: RestartPoint | None = None
        """Restart point at the start of the launch, for a loader that resumes by its own methods (see ARCHITECTURE.md):
        it can be restored only there. None for any other loader."""

    def open_epoch(self, *, step: int = 0) -> RestartPoint:
        """Open epoch `position.epoch`. Return the epoch start: a restart point, with the loader's state unless the
        loader is pure.

        step: training step of the box (data-parallel rank) that `get_worker_state()` reports to the loader's
        state_dict().
        """
        if self._held is not None:
            return self._open_held(step)
        return self._open_pure(step) if self.is_pure else self.open(step=step)

    def _open_pure(self, step: int) -> RestartPoint:
        if not self._unused:
            self._make_again(self.history.launch.step + 1)
        self._begin_epoch(self.position.epoch)
        self._iterate()
        self.compare_first()
        if self._loaded:  # a state on another topology: without it nothing leads to this position
            return self.snapshot(step)
        self.spent_s, self.chain = 0.0, 0
        return self.marked(RestartPoint(self.position.copy(), None, b"", b"", self.digest))

    def compare_first(self) -> None:
        """Raise ReplayMismatchError if the loader is at the beginning of an epoch whose first batch is known, and it
        makes another one."""
        position = self.position
        expected = None if position.delivered else self.awaited.get((position.epoch, position.total))
        if expected is None:
            return
        batch = self._ahead[0] if self._ahead else self.peek()
        if batch is END or ReplayDigest(cover=cover_of(self.assignment.loader.options)).link_of(batch) != expected:
            raise ReplayMismatchError(
                f"{self.name}: epoch {self.position.epoch} does not begin with the batch with which it began before: a "
                f"{self.suspects}. The data or the code has changed, or the loader is not deterministic: run "
                "penstock doctor"
            )

    @property
    def is_open(self) -> bool:
        """True while the loader iterates over an epoch."""
        return self._iterator is not None

    @property
    def is_ahead(self) -> bool:
        """True if `peek` has taken a batch that `next` has not returned yet."""
        return bool(self._ahead)

    @property
    def start(self) -> RestartPoint | None:
        """Restart point at the start of the launch, for a loader that resumes by its own methods (see ARCHITECTURE.md):
        it can be restored only there. None for any other loader."""
        return self._start

    def learn_resume(self, resume: dict[str, Any] | None) -> None:
        """Record the state from which the launch resumed; None = it began without a state. If the state was saved at an
        epoch's end, record in `awaited` also the digest of the batch that followed."""
        self.resume, a = resume, self.assignment
        part = resume["slots"].get(a.slot) if resume is not None and a.resume.same_topology else None
        known = part is not None and part.get("next_epoch") and part["next_digest"] and not self.by_own_methods
        if part is not None and known and self.trusts_history(part):
            self.awaited[a.start.epoch + 1, a.start.slots[a.slot].total] = part["next_digest"]

    def learn_firsts(self, firsts: Iterable[Sequence[int]]) -> None:
        """Record first batches of epochs that earlier runners have made, each as three numbers: its epoch, the slot's
        batches before it, its digest."""
        self.awaited.update({(epoch, began): digest for epoch, began, digest in firsts})

    def learn_labels(self, labels: dict[int, int]) -> None:
        """Record labels of epochs that the training loop has given. First batches that are awaited under other labels
        are forgotten: the loop wants another epoch than the one that a launch before had begun."""
        later = self.labels | labels
        for epoch, total in list(self.awaited):
            if label_of(later, epoch) != label_of(self.labels, epoch):
                del self.awaited[epoch, total]
        self.labels = later

    def trusts_history(self, part: dict[str, Any]) -> bool:
        """Return True if the history (launch and abandoned epochs) in a slot's part of a saved state can be used.
        Return False if an older release wrote the part, if the user edited it, or if the user loads it with
        strict=False. Then only the loader's own state is used, and its batches are not compared."""
        strict = self.resume is None or self.resume["strict"]
        return bool("history" in part["restart"] and strict and not part.get("changed"))

    # ---- epochs

    def open(self, *, step: int = 0, rng_after: bytes | None = None) -> RestartPoint:
        """Open the next epoch with the present loader, in whatever state the loader is, and return the epoch start.

        step: training step of the box (data-parallel rank) that `get_worker_state()` reports to the loader's
        state_dict(). rng_after: states of the random generators to set once the epoch is open; None = leave them. Set
        on a resume.
        """
        before = self._begin()
        if rng_after is not None:
            self._restore_rng(rng_after)
        epoch_start = self._epoch_start(step, before)
        if self.by_own_methods and self._start is None:
            self._start = replace(epoch_start, state=None)
        self.compare_first()
        return self._reached_from_start(epoch_start)

    def _epoch_start(self, step: int, before: bytes) -> RestartPoint:
        """Return the epoch start of the epoch that was just opened.

        step: training step of the box (data-parallel rank) that `get_worker_state()` reports to the loader's
        state_dict(). before: states of the random generators before the epoch was opened.
        """
        state, asked = None, False
        if self.saves_state:
            try:
                state, asked = self.state(step)
            except PenstockError as error:
                self.unsaved = error  # the stream continues; the next save reports the error
        return self.marked(
            RestartPoint(
                self.position.copy(),
                state,
                self.rng(),
                before,
                self.digest,
                self.spent_s,
                self.chain,
                step if asked else 0,
            )
        )

    def end_previous_epoch_first(
        self, position: StreamPosition, epoch: int, epoch_start: RestartPoint | None = None
    ) -> None:
        """Let `next` return END for the previous epoch first, although epoch number `epoch` is open already; then the
        batches of this epoch.

        position: the slot's position, which is still in the previous epoch. epoch_start: epoch start of the open epoch;
        None if none of its batches was made yet.
        """
        assert self._iterator is not None
        self._held = self._iterator, self._ahead, epoch_start
        self._iterator, self._ahead = iter(()), []
        self.position = replace(
            position, epoch=epoch - 1, delivered=position.delivered if epoch - 1 == position.epoch else 0
        )

    def _open_held(self, step: int) -> RestartPoint:
        assert self._held is not None
        self._iterator, self._ahead, epoch_start = self._held
        self._held = None
        return self._reached_from_start(self._epoch_start(step, self.rng()) if epoch_start is None else epoch_start)

    def enter(self, epoch: int) -> None:
        """Record that the loader was resumed at the end of an epoch, and then yielded batches of epoch number `epoch`
        at once, without a StopIteration for the old epoch."""
        self.history = self.history.of(replace(self.history.launch, enters=epoch))
        assert self._start is not None
        self._start = replace(self._start, history=self._start.history.of(self.history.launch))

    def _reached_from_start(self, point: RestartPoint) -> RestartPoint:
        """Return `point`, or a copy of it for a loader that can be restored only to the start of its launch (`_start`).
        In the copy `replayed_from` is that start: the point's position is reached by
        a replay from there."""
        start = self._start
        return point if start is None or point.position == start.position else replace(point, replayed_from=start)

    def abort(self) -> None:
        """Close the open epoch and forget that it was opened. Only `peek` may have made one of its batches."""
        self._iterator, self._ahead, self._held = None, [], None

    def peek(self) -> Any:
        """Return the next batch, or END at the end of the epoch, without advancing the position: `next` then returns
        the same batch. The loader itself is one batch ahead meanwhile, so `peek` is only for comparing digests."""
        position, iterator, self._rng_at_peek = self.position.copy(), self._iterator, self.rng()
        self._ahead = [self.next()]
        self.position, self._iterator = position, iterator
        return self._ahead[0]

    def _begin(self) -> bytes:
        """Start to iterate over the loader. If the loader is its own iterator, and its iteration has begun before, call
        input_fn for a new one first. Return the states of the random generators that a replay must set before this
        step."""
        if not self.capabilities.is_iterator:
            before = self.rng()
        else:
            if not self._unused:
                self._call()
            before = self._rng_before_call
        self._iterate()
        return before

    def next(self) -> Any:
        """Return the next batch and advance the position by it, or return END at the end of the epoch. The caller must
        add the batch's samples to `position.samples`."""
        assert self._iterator is not None
        if self._has_first and self.position.total in (1, 2):
            self._note_first()
        try:
            if self._ahead:
                batch = self._ahead.pop()
                if batch is END:
                    raise StopIteration
            else:
                batch = self._fetch()
        except StopIteration:
            self.leave_epoch()
            return END
        # BaseException, because sys.exit() in user code must not look like a crash of the runner
        except BaseException as error:
            raise self.failed(f"batch {self.position.total + 1}", error) from error
        self.position.delivered += 1
        self.position.total += 1
        return batch

    def _note_first(self) -> None:
        """Record the digest of the run's first batch, unless its second batch is the same: a later launch that begins
        with it has lost its position."""
        if self.by_own_methods and self.position.total == 1:
            self.history = replace(self.history, first=self.digest)
        elif self.position.total == 2 and self.history.first == self.digest:
            self.history = replace(self.history, first=0)

    def log_unfit(self, error: Exception, _: object) -> None:
        """Log that a restart point does not lead to the delivered batches, so that another one is tried."""
        _log.warning("%s; an earlier state of the loader is tried instead", getattr(error, "message", error))

    def learn(self, point: RestartPoint) -> None:
        """Copy the stream's history (launch, abandoned epochs) from this restart point, and skip the batches that were
        quarantined when the point was taken."""
        self.history = point.history.before(point.position.epoch)
        self.learn_skips(point)

    def learn_skips(self, point: RestartPoint) -> None:
        """Add the restart point's list of quarantined batches to the batches that this loader skips."""
        for epoch, total, count in point.skips:
            self._skips[epoch, total] = max(count, self._skips.get((epoch, total), 0))

    def marked(self, point: RestartPoint, *, whole_history: bool = False) -> RestartPoint:
        """Return a copy of the restart point with the loader's present history (launch, abandoned epochs) and its
        list of quarantined batches, which are skipped.

        whole_history: False keeps in the history only abandoned epochs before the point's own epoch. True keeps all of
        them.
        """
        if self._has_first and self.position.total in (1, 2):
            self._note_first()
        skips = tuple((epoch, total, count) for (epoch, total), count in self._skips.items())
        history = self.history if whole_history else self.history.before(point.position.epoch)
        seeds = self.seeds if self.is_pure else ()
        return replace(point, skips=skips, history=history, seeds=seeds)

    def leave_epoch(self) -> None:
        """Close the epoch, which has ended or was abandoned, and set the position to the beginning of the next one."""
        self._iterator, self._ahead, self.chain = None, [], 0
        self.position.epoch += 1
        self.position.delivered = 0

    def abandon_epoch(self, total: int) -> None:
        """Close the epoch that the training loop abandoned after batch `total`, and add the epoch to the history."""
        if self._ahead and not self.is_pure:
            self._restore_rng(self._rng_at_peek)
        self.history = self.history.leaving(self.position.epoch, total)
        self.leave_epoch()

    # ---- states

    def snapshot(self, step: int) -> RestartPoint:
        """Return a snapshot (the loader's state and position). The caller must encode the snapshot before the next call
        of `next`, because the state may share objects with the loader.

        step: training step of the box (data-parallel rank) that `get_worker_state()` reports to the loader's
        state_dict().
        """
        state, asked = self.state(step)
        taken = self.marked(
            RestartPoint(
                self.position.copy(),
                state,
                self.rng(),
                None,
                self.digest,
                self.spent_s,
                self.chain,
                step if asked else 0,
            )
        )
        return self._reached_from_start(taken)

    def restore(self, point: RestartPoint) -> None:
        """Bring the loader to the position of a restart point (a saved position with the loader's state). May be called
        at any time.

        A loader with four methods is made anew, and loads the state from which its launch resumed, if any.
        """
        self.abort()
        if self.is_pure:
            self.learn_skips(point)
            self._restore_pure(point)
            return
        self.learn(point)
        kept = self.capabilities.is_iterator or (self.capabilities.exact_states and point.state is not None)
        if (not self._unused and not kept) or self._taken_for != self.worker:
            self._make_again(self.history.launch.step + 1)
        if point.rng_before is not None:
            self._restore_rng(point.rng_before)
        if self.capabilities.is_iterator:
            self._call()
        self._load_restart_point(point)
        # A snapshot has no RNG from before its epoch. Worker processes of the loader are seeded from the RNG here, so
        # it must be the same at each restore; any value is right.
        if point.rng_before is None or not self.capabilities.is_iterator:
            self._restore_rng(point.rng if point.rng_before is None else point.rng_before)
        self._iterate()
        self.position, self.digest = point.position.copy(), point.digest
        self._restore_rng(point.rng)
        if self.by_own_methods:
            self._start = replace(point, state=None)
            launch, position = self.history.launch, point.position
            if launch.enters is not None and position.total == launch.batches:
                self.end_previous_epoch_first(position, launch.enters)

    def _restore_pure(self, point: RestartPoint) -> None:
        self.position, self.digest = point.position.copy(), point.digest
        self.spent_s, self.chain = point.spent_s, point.chain
        if point.is_epoch_start:
            self.open_epoch()
            return
        if not self._unused:
            self._make_again(self.history.launch.step + 1)
        self._begin_epoch(point.epoch)
        self._load_restart_point(point)
        self._iterate()
        self._restore_rng(point.rng)

    def _first_launch(self) -> Launch:
        return Launch(worker=self.assignment.slot if self.by_own_methods else None)

    def _load_restart_point(self, point: RestartPoint) -> None:
        """Load the state that a restart point holds into the loader, by the loader's own state methods."""
        if self.by_own_methods:
            if self.resume is not None:
                self.resume_by_own_methods(self.resume["aggregated"], self.resume["strict"])
            elif self.history.launch.step:
                raise StateMismatchError(
                    f"{self.name}: the loader now has all four state methods without loads_own_state, so it cannot "
                    "load a state that its state_dict returned. Resume from a state of DataLoader.state_dict() instead"
                )
        elif point.state is not None:
            if self.capabilities.state_methods == 0:
                raise StateMismatchError(
                    f"{self.name}: the loader must have state_dict and load_state_dict to load this state, which was "
                    "saved by a loader with both methods. Add the methods"
                )
            self._load(point.state, True)

    def begin(self) -> None:
        """Bring the loader to the beginning of the slot's stream: call input_fn again, without loading a state or
        opening an epoch."""
        self.abort()
        self.history = replace(self.history.of(self._first_launch()), abandoned=())
        self._make_again(1)
        self.position, self.digest, self._start = StreamPosition(0, 0, 0, 0), 0, None

    def make_as(self, worker: int) -> None:
        """Let user code see `worker` as its worker number in the box from now on. Call input_fn again, unless the
        present loader is unused and was made with this number."""
        self.abort()
        self.history = self.history.of(replace(self.history.launch, worker=worker))
        self._start = None
        if self._taken_for != worker or not self._unused or self._loader is None:
            self._make_again(self.history.launch.step + 1)

    def drop(self) -> None:
        """Release the loader, because it may hold an exclusive resource, such as a lock or an open database."""
        self.abort()
        self._loader = None

    def seek(
        self, total: int, epoch: int, seen: Callable[[Any], None], open_epoch: Callable[[], object] | None = None
    ) -> bool:
        """Replay until the slot has made `total` batches in the run. Return True then. Stop at the end of epoch number
        `epoch`, and return False if the slot has made fewer batches by then.

        Args:
            seen: called with each batch.
            open_epoch: opens each epoch on the way; None: `self.open_epoch`.
        """
        self._doing("replay")
        while self.position.total < total:
            if not self.is_open:
                (open_epoch or self.open_epoch)()
            at_epoch = self.position.epoch
            batch = self.next()
            if batch is not END:
                seen(batch)
            elif at_epoch >= epoch:
                return False
        return True

    def reach_end(self) -> None:
        """Check that the epoch ends here. Raise ReplayMismatchError if the loader yields one more batch."""
        if self.is_open and self.next() is not END:
            raise ReplayMismatchError(
                f"{self.name}: epoch {self.position.epoch} has more batches than before. The data have changed, or the "
                "loader is not deterministic: run penstock doctor"
            )
