"""A user's loader, and how it is brought to any position in its stream.

All code that opens, saves, restores or replays a loader is here; the runner that streams and the helper processes that
verify and make states run the same code. The order of the moments matters. It was found by trying all of them on
shuffled torch DataLoaders and StatefulDataLoaders with and without worker processes:

    open an epoch         take RNG R0, `iter(loader)`, take `state_dict()`, take RNG R1           -> an epoch start
    from an epoch start   load its state, set R0, `iter`, set R1, then replay n batches
    a snapshot            `state_dict()` after batch n and the RNG of that moment, encoded before the next `next()`
    from a snapshot       load it, `iter`, then set its RNG

RNG restored at any other moment gives other batches. No state is taken after StopIteration: a finished epoch is
(snapshot or epoch start, all of its batches). A loader that is its own iterator (a generator) is made anew by input_fn
for each epoch. A state is loaded only into a loader that input_fn has just made, because the other contents of a used
one are unknown.

A loader of four methods is only ever given what its `deaggregate_state_dict` returned, as the protocol says, unless it
declares `loads_own_state`. So it starts from the beginning, or from the state that the launch resumed from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import xxhash

from penstock.proto.batch.classes import MAX_NAME
from penstock.proto.errors import (
    InputFnError,
    NotRestartableError,
    PenstockError,
    ReplayMismatchError,
    StateMismatchError,
    format_remote,
)
from penstock.proto.state import assignment as place_of
from penstock.proto.state.generators import derive_seed, seed_rng
from penstock.proto.state.restartable import (
    DataLoaderCheckpoint,
    by_own_methods,
    state_methods,
    takes_strict,
    worker_state,
)
from penstock.proto.v1 import records_pb2
from penstock.runtime.process import forks
from penstock.worker.loader import loader_generators
from penstock.worker.loader.crossing_kinds import KEPT
from penstock.worker.loader.epoch_crossing import cross
from penstock.worker.loader.restart_points import END, Launch, RestartPoint, StreamHistory, StreamPosition
from penstock.worker.loader.skip_batch import CannotSkipError, skip_batch
from penstock.worker.loader.synthetic import NOT_SAVED, FirstBatch
from penstock.worker.loader.worker_info import as_main_process, offer_worker_info
from penstock.worker.processes.control_channel import describe
from penstock.worker.processes.user_code import load_input_fn, unpacked

__all__ = ["RestorableLoader"]


class RestorableLoader:
    """The loader of one slot. Every exception of user code leaves as InputFnError with its traceback."""

    def __init__(
        self,
        assignment: records_pb2.WorkerAssignment,
        doing: Callable[[str], None] = lambda activity: None,
        left_out: Callable[[int, int], None] = lambda epoch, count: None,
        load: Callable[[records_pb2.LoaderSpec], Callable[..., Any]] = load_input_fn,
    ) -> None:
        """Take the settings. `doing`: called with the activity that user code is called for. `left_out`: called with
        the epoch of the next batch, and the count of batches left out before it. `load`: finds the callable of the
        spec."""
        self.assignment = assignment
        self.position = StreamPosition(0, 0, 0, 0)
        self.capabilities = records_pb2.LoaderCapabilities(length=-1)
        self.digest = 0
        """Digest of the last batch, set by the code that flattens it."""
        self.unsaved: Exception | None = None
        """Reason why the state of the epoch start could not be taken."""
        point, slot = assignment.start, assignment.slot
        began = point.slots[slot].total if len(point.slots) > slot else 0
        self.history = StreamHistory(Launch(point.step, began), complete=point.step == 0 and not assignment.resume.blob)
        self.resume: dict[str, Any] | None = None
        """Decoded state from which the launch resumed; needed to start again from there by the loader's own methods."""
        self.restored = False
        """Flag that a state, and not its batches, brought the loader to the middle of its epoch."""
        self.strays = False
        """Flag that, restored at an epoch's start, it drew other random numbers than the loader that streamed: at the
        epoch's end the generators differ from those of that loader."""
        self.counts_from: RestartPoint | None = None
        """Start of the stream, if later restart points are counted from there because the loader's own states
        mislead."""
        self.awaited: dict[int, int] = {}
        """Batches in all at an epoch's end -> digest of the batch that came next when the state was saved there."""
        self._restored_at = 0
        self._doing = doing
        self._left_out = left_out
        self._load_fn = load
        self._skips = {(skip.epoch, skip.total): skip.count for skip in assignment.skips}
        self._loader: Any = None
        self._iterator: Iterator[Any] | None = None
        self._ahead: list[Any] = []
        """Batches that `peek` has taken; at most one."""
        self._rng_at_peek = b""
        self._held: tuple[Iterator[Any], list[Any], RestartPoint | None] | None = None
        """Next epoch, which the loader is in already, while this one is still to be ended."""
        self._taken_for = slot
        """Worker of its box that the loader was made as."""
        self._start: RestartPoint | None = None
        """Start of a loader that is restored by its own methods only."""
        self._unused = False
        self._rng_before_call = b""
        self._strict = False
        self._fn: Callable[..., Any] | None = None

    @property
    def name(self) -> str:
        """Name of the loader in messages."""
        a = self.assignment
        return f"{a.loader.input_fn} (box {a.box}, slot {a.slot})"

    @property
    def is_open(self) -> bool:
        """True while an epoch is open."""
        return self._iterator is not None

    @property
    def is_untouched(self) -> bool:
        """True if it was restored and has yielded nothing since: it may not know yet that it is in the middle of an
        epoch, and continue that when the next one is opened."""
        return self.restored and self.position.total == self._restored_at

    @property
    def is_ahead(self) -> bool:
        """True if the loader has made a batch more than `next` has returned."""
        return bool(self._ahead)

    @property
    def saves_state(self) -> bool:
        return self.capabilities.state_methods > 0 and not self.capabilities.not_restartable

    @property
    def by_own_methods(self) -> bool:
        """True if its load_state_dict takes only what its deaggregate_state_dict returns."""
        return by_own_methods(self.capabilities)

    @property
    def worker(self) -> int:
        """Number of the worker in its box as which the loader is built."""
        worker = self.history.launch.worker
        return self.assignment.slot if worker is None else worker

    @property
    def start(self) -> RestartPoint | None:
        """Start of the launch of a loader that is restored by its own methods only."""
        return self._start

    def another(self, assignment: records_pb2.WorkerAssignment) -> RestorableLoader:
        """Return a new loader of the same code, for this assignment."""
        return RestorableLoader(assignment, load=self._load_fn)

    def learn_resume(self, resume: dict[str, Any] | None) -> None:
        """Take the state from which the launch resumed, and the batch that came next if that was at an epoch's end."""
        self.resume, a = resume, self.assignment
        part = resume["slots"].get(a.slot) if resume is not None and a.resume.same_topology else None
        if part is not None and part.get("next_epoch") and part["next_digest"] and self.believes(part):
            self.awaited[a.start.slots[a.slot].total] = part["next_digest"]

    def believes(self, part: dict[str, Any]) -> bool:
        """Return whether the history in a saved part holds. If not, an older release wrote it, or the user has edited
        it or does not load it strictly: the history is unknown, and the loader's own state counts."""
        strict = self.capabilities.state_methods != 4 or self.resume is None or self.resume["strict"]
        return bool("history" in part["restart"] and strict and not part.get("changed"))

    # ---- building

    def build(self) -> None:
        """Seed, set the assignment for user code, call input_fn, and check what it returned."""
        a = self.assignment
        self._seed()
        self._introduce(a.start.step + 1)
        self._doing("input_fn")  # its module is the user's too
        with self._user("its module"):
            self._fn = self._load_fn(a.loader)
        self._call()
        loader, capabilities = self._loader, self.capabilities
        with self._user("its loader's methods"):
            capabilities.state_methods = state_methods(loader)
            capabilities.takes_strict = self._strict = takes_strict(loader)
            capabilities.is_iterator = hasattr(type(loader), "__next__")
            capabilities.loads_own_state = getattr(loader, "loads_own_state", False) is True
            capabilities.exact_states = getattr(loader, "exact_states", False) is True
            name = f"{type(loader).__module__}:{type(loader).__qualname__}"
            if callable(getattr(loader, "advance_state", None)) and len(name) <= MAX_NAME:
                capabilities.advances_state = name
            capabilities.own_workers = int(getattr(loader, "num_workers", 0) or 0)
            if capabilities.own_workers and getattr(loader, "persistent_workers", False):
                capabilities.not_restartable = (
                    "persistent_workers=True keeps worker processes, and what they hold, over the end of an epoch, "
                    "where no state reaches; use persistent_workers=False to save this loader"
                )
            try:
                capabilities.length = len(loader)
            except (TypeError, NotImplementedError):
                capabilities.length = -1
        if a.loader.options.synthetic:
            capabilities.not_restartable = NOT_SAVED
        if self.by_own_methods and self.history.launch.worker is None:
            self.history = self.history.of(replace(self.history.launch, worker=a.slot))

    def _introduce(self, step: int) -> None:
        """Set the assignment for user code, in a launch that begins with this step of the box."""
        a, worker = self.assignment, self.worker
        self._taken_for = worker
        offer_worker_info(a)
        place_of.set_assignment(place_of.Assignment(a.box, a.num_boxes, worker, a.num_workers_per_box, a.seed, step))

    def _seed(self) -> None:
        """Seed as before input_fn is called: the same whenever the slot starts over. After a change of topology the
        seed differs, or randomness would repeat."""
        a = self.assignment
        new_topology = a.start.step > 0 and not a.resume.same_topology
        seed_rng(derive_seed(a.seed, "slot", a.box, a.slot, *([a.start.step] if new_topology else [])))

    def _call(self) -> None:
        assert self._fn is not None
        with self._user("its arguments"):
            fn, args, kwargs = unpacked(self._fn, self.assignment.loader)
        self._rng_before_call = self.rng()
        self._loader = None  # it may hold something exclusive, such as an open database
        with self._user("input_fn", activity="input_fn"):
            loader = fn(*args, **kwargs)
        if loader is None or not (hasattr(type(loader), "__iter__") or hasattr(type(loader), "__getitem__")):
            what = "None" if loader is None else f"a {type(loader).__qualname__}, which is not iterable"
            raise InputFnError(
                f"{self.name} returned {what}; it must return a torch DataLoader or an iterable of batches"
            )
        self._loader = FirstBatch(loader) if self.assignment.loader.options.synthetic else loader
        self._unused = True

    # ---- epochs

    def open_epoch(self, *, step: int = 0) -> RestartPoint:
        """Open the epoch `position.epoch` and take its epoch start, as of the box's `step`."""
        if self._held is not None:
            return self._open_held(step)
        crosses = self.restored and not (self.capabilities.is_iterator or self.capabilities.exact_states)
        kept = self.history.crossing == KEPT and not self.is_untouched
        opened = cross(self, step) if crosses else self.open(step=step)
        self.restored &= kept  # any other way comes to a loader that runs all of its epoch
        return opened

    def open(self, *, step: int = 0, rng_after: bytes | None = None) -> RestartPoint:
        """Open the epoch with the present loader, whatever its state.

        `rng_after`: RNG states to continue with, on a resume.
        """
        before = self._begin()
        if rng_after is not None:
            self._restore_rng(rng_after)
        epoch_start = self._epoch_start(step, before)
        if self.by_own_methods and self._start is None:
            self._start = replace(epoch_start, state=None)
        return self._behind_start(epoch_start)

    def _epoch_start(self, step: int, before: bytes) -> RestartPoint:
        """The epoch start of the epoch that was just opened. `before`: the generators before."""
        state, asked = None, False
        if self.saves_state:
            try:
                state, asked = self.state(step)
            except PenstockError as error:
                self.unsaved = error  # the stream goes on; the save will report it
        return self.marked(
            RestartPoint(self.position.copy(), state, self.rng(), before, self.digest, step if asked else 0)
        )

    def hold_back(self, position: StreamPosition, epoch: int, epoch_start: RestartPoint | None = None) -> None:
        """End the epoch before the open one first: the open epoch is a later one than that of this position.
        `epoch_start`: how that epoch began; None if no batch of it was made yet."""
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
        return self._behind_start(self._epoch_start(step, self.rng()) if epoch_start is None else epoch_start)

    def enter(self, epoch: int) -> None:
        """Record that the loader, resumed at the end of an epoch, has continued with this one at once."""
        self.history = self.history.of(replace(self.history.launch, enters=epoch))
        assert self._start is not None
        self._start = replace(self._start, history=self._start.history.of(self.history.launch))

    def _behind_start(self, point: RestartPoint) -> RestartPoint:
        """Return the same point, reached by replay from the start, if only the start is a restart point."""
        start = self._start or self.counts_from
        return point if start is None or point.position == start.position else replace(point, behind=start)

    def abort(self) -> None:
        """Undo the opening of an epoch of which at most one batch was made."""
        self._iterator, self._ahead, self._held = None, [], None

    def peek(self) -> Any:
        """Return the next batch, or END; `next` will return it again. Only for digests: the loader's state is a batch
        ahead."""
        position, iterator, self._rng_at_peek = self.position.copy(), self._iterator, self.rng()
        self._ahead = [self.next()]
        self.position, self._iterator = position, iterator
        return self._ahead[0]

    def _begin(self) -> bytes:
        """Start iterating; return the RNG that a replay must set before it does the same."""
        if not self.capabilities.is_iterator:
            before = self.rng()
        else:
            if not self._unused:
                self._call()
            before = self._rng_before_call
        self._iterate()
        return before

    def _iterate(self) -> None:
        self._unused = False
        with self._user("iter()", activity="iter"):
            self._iterator = iter(self._loader)

    def next(self) -> Any:
        """Return the next batch, or END; the position moves with it, except for samples, which the caller counts."""
        assert self._iterator is not None
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
        # sys.exit() too is the user's code, and must not look like a crash of the runner
        except BaseException as error:
            raise self.failed(f"batch {self.position.total + 1}", error) from error
        self.position.delivered += 1
        self.position.total += 1
        return batch

    def _fetch(self) -> Any:
        assert self._iterator is not None
        try:
            if self._skips:
                self._leave_out()
            return next(self._iterator)
        finally:
            if forks.strayed:
                forks.leave()

    def _leave_out(self) -> None:
        """Skip the batches that are quarantined at this position."""
        position = self.position
        count = self._skips.get((position.epoch, position.total), 0)
        try:
            for _ in range(count):
                skip_batch(self._loader, self._iterator)
        except CannotSkipError as why:
            raise InputFnError(
                f"{self.name}: batch {position.total + 1} killed its runner each time, and cannot be skipped as "
                f'poison="skip" asks: {why}'
            ) from None
        self._left_out(position.epoch, count)

    def learn(self, point: RestartPoint) -> None:
        """Take over the history of this restart point, and skip the batches that were skipped when it was taken."""
        self.history = point.history.before(point.position.epoch).knowing(self.history.crossing)
        self.learn_skips(point)

    def learn_skips(self, point: RestartPoint) -> None:
        """Skip the batches that were skipped when this restart point was taken."""
        for epoch, total, count in point.skips:
            self._skips[epoch, total] = max(count, self._skips.get((epoch, total), 0))

    def learn_crossing(self, crossing: str) -> None:
        """Take over the crossing that was found (see epoch_crossing.py)."""
        self.history = self.history.knowing(crossing)

    def marked(self, point: RestartPoint, *, way_on: bool = False) -> RestartPoint:
        """Return the same restart point with the present history and all skipped batches. `way_on`: also with the
        epochs that former launches abandoned between there and the source's position, which this training loop does not
        know."""
        skips = tuple((epoch, total, count) for (epoch, total), count in self._skips.items())
        return replace(
            point, skips=skips, history=self.history if way_on else self.history.before(point.position.epoch)
        )

    def leave_epoch(self) -> None:
        """Close the epoch, which has ended or was abandoned; the next one can be opened."""
        self._iterator, self._ahead = None, []
        self.position.epoch += 1
        self.position.delivered = 0

    def abandon_epoch(self, total: int) -> None:
        """Close an epoch that the loop abandoned after batch `total`."""
        if self._ahead and self.saves_state:  # the generators of others are seeded by the caller
            self._restore_rng(self._rng_at_peek)
        self.history = self.history.leaving(self.position.epoch, total)
        self.leave_epoch()

    # ---- states

    def state(self, step: int) -> tuple[Any, bool]:
        """Return the loader's state_dict() now, as of the box's `step`; and whether it asked get_worker_state()."""
        a, position, launch = self.assignment, self.position, self.history.launch
        checkpoint = DataLoaderCheckpoint(
            self.worker,
            a.num_workers_per_box,
            a.num_boxes,
            a.box,
            max(0, step - launch.step),
            position.total - launch.batches,
            position.samples - launch.samples,
            lifetime_appliance_step=step,
            lifetime_worker_step=position.total,
            lifetime_samples_streamed=position.samples,
        )

        def save() -> tuple[Any, bool]:
            with worker_state(checkpoint) as context:
                return self._loader.state_dict(), context.was_read

        with self._user("state_dict()", activity="state_dict"):
            return as_main_process(save)

    def snapshot(self, step: int) -> RestartPoint:
        """Return a snapshot of this position, as of the box's `step`. Encode it before the next `next()`."""
        state, asked = self.state(step)
        taken = self.marked(
            RestartPoint(self.position.copy(), state, self.rng(), None, self.digest, step if asked else 0)
        )
        return self._behind_start(taken)

    def restore(self, point: RestartPoint) -> None:
        """Bring the source to the position of a restart point; may be called at any time.

        At the beginning of the stream a new loader is built and no state loaded: a loader that begins an epoch in its
        first next() could not record in a state that the epoch was opened.
        """
        self.learn(point)
        self.abort()
        as_made = point.is_beginning and self.history.complete
        if as_made:
            self.history = self.history.of(self._first_launch())
        anew = (
            not self._unused and not self.capabilities.is_iterator and (as_made or not self.capabilities.exact_states)
        )
        if anew or self._taken_for != self.worker:
            self._make_anew(self.history.launch.step + 1)
        if point.rng_before is not None:
            self._restore_rng(point.rng_before)
        if self.capabilities.is_iterator:
            self._call()
        if not as_made:
            self._load_restart_point(point)
        # A snapshot has no RNG from before its epoch; any will do, but the same one whenever it is restored, for worker
        # processes of the loader are seeded from it.
        if point.rng_before is None or not self.capabilities.is_iterator:
            self._restore_rng(point.rng if point.rng_before is None else point.rng_before)
        self._iterate()
        self.strays = (
            point.is_epoch_start
            and not (as_made or self.by_own_methods)
            and self.history.complete
            and self.rng() != point.rng
        )
        self._restore_rng(point.rng)
        self.position, self.digest = point.position.copy(), point.digest
        if not as_made and self.capabilities.state_methods:
            self.mark_restored()
        else:
            self.restored = False
        if self.by_own_methods:
            self._start = replace(point, state=None)
            launch, position = self.history.launch, point.position
            if launch.enters is not None and position.total == launch.batches:
                self.hold_back(position, launch.enters)

    def _first_launch(self) -> Launch:
        return Launch(worker=self.assignment.slot if self.by_own_methods else None)

    def _load_restart_point(self, point: RestartPoint) -> None:
        """Load the state of a restart point by the methods that this loader has."""
        if self.by_own_methods:
            if self.resume is None:
                raise StateMismatchError(
                    f"{self.name} now has all four state methods without loads_own_state, so it cannot load a state "
                    "that its state_dict returned: resume from a state of DataLoader.state_dict() instead"
                )
            self.resume_by_own_methods(self.resume["aggregated"], self.resume["strict"])
        elif point.state is not None:
            if self.capabilities.state_methods == 0:
                raise StateMismatchError(
                    f"{self.name} has no load_state_dict, but the state was saved by a loader that has one: add the "
                    "method"
                )
            self._load(point.state, True)

    def mark_restored(self) -> None:
        """Record that a state has just brought it to its position."""
        self.restored, self._restored_at = True, self.position.total

    def begin(self) -> None:
        """Bring the source to the slot's beginning: call input_fn again, load nothing, open no epoch."""
        self.abort()
        self.history = replace(self.history.of(self._first_launch()), abandoned=())
        self._make_anew(1)
        self.position, self.digest, self.restored, self._start = StreamPosition(0, 0, 0, 0), 0, False, None
        self.strays = False

    def renew(self, rng: bytes) -> None:
        """Let input_fn make a new loader, with the random generators as they were captured."""
        self._make_anew(self.history.launch.step + 1)
        self._restore_rng(rng)

    def make_as(self, worker: int) -> None:
        """Have input_fn make the loader as this worker of the box, if it was made as another one, to be resumed."""
        self.abort()
        self.history = self.history.of(replace(self.history.launch, worker=worker))
        self._start = None
        if self._taken_for != worker or not self._unused or self._loader is None:
            self._make_anew(self.history.launch.step + 1)

    def drop(self) -> None:
        """Release the loader: it may hold something exclusive."""
        self.abort()
        self._loader = None

    def _make_anew(self, step: int) -> None:
        self._introduce(step)
        self._seed()
        self._call()

    def resume_by_own_methods(self, aggregated: Any, strict: bool) -> None:
        """Give a four-method loader its part of an aggregated state; the epoch is opened after."""
        arguments = {"strict": strict} if self._strict else {}
        with self._user("deaggregate_state_dict()", activity="load_state_dict"):
            own = self._loader.deaggregate_state_dict(aggregated, **arguments)
        self._load(own, strict)

    def aggregate(self, states: list[Any]) -> Any:
        """Return one state made of all workers' states, in order of global_worker_id."""
        with self._user("aggregate_state_dict()"):
            return self._loader.aggregate_state_dict(states)

    def _load(self, state: Any, strict: bool) -> None:
        arguments = {"strict": strict} if self._strict else {}
        with self._user("load_state_dict()", activity="load_state_dict"):
            as_main_process(lambda: self._loader.load_state_dict(state, **arguments))

    def seek(
        self, total: int, epoch: int, seen: Callable[[Any], None], open_epoch: Callable[[], object] | None = None
    ) -> bool:
        """Replay until `total` batches, in the epoch `epoch` if that is not beyond; `seen` gets each batch.
        `open_epoch` is called to open the epochs on the way.

        Returns False if epoch `epoch` ended before; `position` then says after how many batches.
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
        """Step over the end of the epoch, which is known to be here. Raise ReplayMismatchError if it continues."""
        if self.is_open and self.next() is not END:
            raise ReplayMismatchError(
                f"{self.name}: epoch {self.position.epoch} has more batches than when it was delivered: the data have "
                "changed, or the loader is not deterministic (see penstock doctor)"
            )

    # ---- randomness

    def rng(self) -> bytes:
        """Return the states of the process's generators, and of those that the loader was given (`generator=`)."""
        return loader_generators.captured(self._loader)

    def rng_hash(self) -> int:
        """Return a hash of the states of the generators."""
        return xxhash.xxh3_64_intdigest(self.rng())

    def _restore_rng(self, data: bytes) -> None:
        loader_generators.restore(self._loader, data)

    def reseed(self, *path: int | str) -> None:
        """Seed all generators by the run's seed, the slot and `path`."""
        a = self.assignment
        seed_rng(derive_seed(a.seed, "slot", a.box, a.slot, *path))
        for number, generator in enumerate(loader_generators.given_to(self._loader)):
            generator.manual_seed(derive_seed(a.seed, "generator", number, a.box, a.slot, *path))

    # ---- errors

    @contextmanager
    def _user(self, what: str, activity: str | None = None) -> Iterator[None]:
        if activity:
            self._doing(activity)
        try:
            try:
                yield
            finally:
                if forks.strayed:
                    forks.leave()
        except PenstockError:
            raise
        except BaseException as error:
            raise self.failed(what, error) from error

    def failed(self, what: str, error: BaseException) -> PenstockError:
        """Return the error for an exception of user code."""
        if isinstance(error, PenstockError):
            return error
        return InputFnError(f"{self.name}: {what} raised {describe(error)}", remote_traceback=format_remote(error))

    def require_state(self) -> None:
        """Raise NotRestartableError, with the reason, unless state_dict() can be called."""
        if self.capabilities.not_restartable:
            raise NotRestartableError(f"{self.name} cannot be saved: {self.capabilities.not_restartable}")
