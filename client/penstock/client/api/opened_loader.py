"""Base class of DataLoader that opens the loader's run. Before that, a loader is only a description. Afterwards it is a
stream of batches with a position.

    DataLoader ── opens ──> Session: a run on an Appliance, and the reader of its batches

A loader is in one of three conditions: new (its state is that of the user's loader, made in this process), loaded and
not started (its state is the loaded one), or streaming (its state at the last step is fetched from the workers). A
stream ends when its appliance is closed, at an error, at `load_state_dict`, or at `close`. Only after `load_state_dict`
or `close` does an executor start another stream, so that a position is never lost silently.
"""

from __future__ import annotations

import copy
import itertools
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, ParamSpec, Protocol, overload

from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset

from penstock.client.api.appliance import Appliance, current_appliance, current_settings
from penstock.client.api.appliance_settings import ApplianceSettings
from penstock.client.api.session import Session
from penstock.client.states.code_reference import check_arguments, ship
from penstock.client.states.local_loader import LocalLoader, check_strict, no_length
from penstock.client.states.run_opening import Opening
from penstock.client.states.saved_state import BoxStart, SavedState
from penstock.client.stream.checkpoint_schedule import checked_int
from penstock.client.stream.stream_interfaces import Reader, StreamRun
from penstock.proto.batch.digest import DigestCover
from penstock.proto.errors import (
    DeadlineError,
    NotRestartableError,
    StateMismatchError,
)
from penstock.proto.state.assignment import Assignment
from penstock.proto.state.position import MOST, Position
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import records_pb2

__all__ = ["OpenedLoader"]

_Arguments = ParamSpec("_Arguments")
_ids = itertools.count(1)


class Steps(Protocol):
    """What a loader needs to know of an iterator over its batches."""

    number: int
    """Number of the iterator in this process: one that was made later has a higher number."""

    def give_up(self) -> bool:
        """End the iterator's loop, as `break` does, because a later iterator takes a batch. Return False if that is not
        possible, because another thread is in its `next`."""


class OpenedLoader:
    """Base class of DataLoader, with what a DataExecutor needs: it opens the loader's run, and keeps the run and its
    reader as a Session."""

    @overload
    def __init__(self, input_fn: Callable[_Arguments, Any], *args: _Arguments.args, **kwargs: _Arguments.kwargs): ...
    @overload
    def __init__(self, input_fn: Dataset[Any] | TorchLoader[Any], *args: Any, **kwargs: Any) -> None: ...
    def __init__(
        self, input_fn: Callable[..., Any] | Dataset[Any] | TorchLoader[Any], *args: Any, **kwargs: Any
    ) -> None:
        self._replay = False
        """True if this loader, which has no state methods, can be saved even without Appliance(replay=True): its
        batches are counted, and made again after a resume."""
        if isinstance(input_fn, Dataset) or not callable(input_fn):
            from penstock.client.torch_loaders import taken_over  # imported here, because it imports the data sources

            taken = taken_over(input_fn, *args, **kwargs)
            input_fn, args, kwargs, self._replay = taken.input_fn, taken.args, taken.kwargs, taken.replay
        else:
            check_arguments(input_fn, args, kwargs)
            args, kwargs = copy.deepcopy(args), copy.deepcopy(kwargs)
        self._reference, self._arguments = ship(input_fn, args, kwargs)
        self.name = self._reference.name
        """Name of input_fn, "module:qualname"."""
        self.id = next(_ids)
        """Number that identifies the loader in this process, from 1."""
        check_strict(input_fn)
        self._local = LocalLoader(self.name, input_fn, args, kwargs)
        self._session: Session | None = None
        self._holder: weakref.ref[Steps] | None = None
        """Iterator that has the stream: it took the last batch, and its loop has not ended. None if no loop is
        running."""
        self._openings = 0
        self._loaded: SavedState | None = None
        self._given: Any = None
        self._strict = True
        self._cached: tuple[int, Any] | None = None
        self._expected: ApplianceSettings | None = None
        """Settings of the appliance that was passed to a DataExecutor of this loader; None if none was passed."""
        self._leaves_epoch = False
        """True if the next loop begins the epoch after that of the loaded state, and does not resume the epoch of the
        loaded state."""
        self._ends_epoch = False
        """True if the same holds, and the loaded state is that of the epoch's last batch by len()."""
        self.asked_epoch: int | None = None
        """Number of the next epoch by `set_epoch`; None if it was not called for it."""
        self._drawn: int | None = None
        """Random seed that was drawn because a state was requested before the run was open. The run gets this seed.
        None: no seed was drawn."""

    def __getstate__(self) -> dict[str, Any]:
        if self._session is not None:
            raise TypeError(
                f"{self.name}: a loader cannot be copied or pickled once it streams: save its state_dict(), and load "
                "the state into a new DataLoader of the same input_fn"
            )
        return {**self.__dict__, "_holder": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, id=next(_ids))

    # ---- for executors

    def set_epoch(self, epoch: int) -> None:
        """Give the next epoch that the loop begins its number, as Hugging Face's Trainer and Accelerate do. A pure
        loader (docs/restarts.md) then makes the epoch of this number: its user code gets it, and the random generators
        are seeded by it. Later epochs count on from there.

        An epoch that is resumed, or has been opened already, keeps its number, and so do the epochs of other loaders,
        which Penstock counts itself, over restarts too. Another number is then logged once.
        """
        self.asked_epoch = checked_int("epoch", epoch, least=0, most=MOST)

    @property
    def step(self) -> int:
        """Number of the last delivered step, counted over the whole life of the run. Before the first loop begins: the
        step of the loaded state, or 0 without a loaded state."""
        if self._session is not None:
            return self._session.reader.position.step
        return self._loaded.step if self._loaded is not None else 0

    def open(self, appliance: Appliance | None) -> Session:
        """Return the loader's session (its run and reader). Open the run if it is not open, so that the workers begin
        to make batches: this takes no batch and begins no loop. `appliance`: appliance passed to the executor; None:
        that of the open run, else current_appliance()."""
        session = self._session
        if session is None:
            session = self._open(appliance if appliance is not None else current_appliance(self))
        elif session.run.error is not None:
            raise session.run.error
        elif session.run.closed:
            raise RuntimeError(
                f"{self.name}: the stream ended at step {self.step}, because its appliance was closed. To continue, "
                "load a state by load_state_dict(); to start again from the beginning, make a new DataLoader"
            )
        elif appliance is not None and appliance is not session.appliance:
            raise RuntimeError(
                f"{self.name} streams from {session.appliance!r} and cannot also be iterated on {appliance!r}: load "
                "its state by load_state_dict() to move the stream, or make a second DataLoader"
            )
        return session

    def begin(self, steps: Steps, appliance: Appliance | None) -> Session:
        """Give the stream to an iterator that is to take its first batch, or tries again after an error, and return the
        loader's session. An epoch that an earlier loop has left ends here."""
        session = self.open(appliance)
        holder = self._holder() if self._holder is not None else None
        begins = session.beginning.acquire(blocking=False)
        try:
            if not begins or (holder is not None and not (holder.number < steps.number and holder.give_up())):
                raise RuntimeError(
                    f"{self.name}: only one loop can take the batches of a loader at a time, and another one is at "
                    f"step {self.step}: finish the other loop, or close() its iterator, or make a second DataLoader "
                    "for a second stream"
                )
            if session.leave_due:
                self._leave(session)
            self._holder, session.holder = weakref.ref(steps), steps.number
            session.reader.thread = threading.get_ident()
            session.run.progress.epoch_ended = False
        finally:
            if begins:
                session.beginning.release()
        return session

    def _leave(self, session: Session) -> None:
        step = session.reader.position.step
        if step == session.began_at:  # it is the epoch of the loaded state that is left
            self._capabilities(session)  # waits until the epoch's length is known
            if self._ends_epoch and session.expected_last() != step:
                session.leave_due = False  # the length has changed since
                return
        session.leave_epoch()

    def check_continues(self, number: int, session: Session) -> None:
        """Raise RuntimeError unless the iterator with this number, which took the stream in `session`, is the last one
        that did."""
        if self._session is not session:
            raise RuntimeError(
                f"{self.name}: this iterator has no further batch, because a state was loaded, or the loader was "
                "closed, since its last one: make a new iterator by iter()"
            )
        if session.holder != number:
            raise RuntimeError(
                f"{self.name}: this iterator has no further batch, because another loop over this loader has taken "
                f"batches since its last one (now step {self.step}), and a loader has one stream: finish one loop "
                "before the next, or make a second DataLoader for a second stream"
            )

    def finish(self, *, left_early: bool, epoch_ended: bool) -> None:
        """Take the stream back from the iterator that has it, after its loop has ended: at its end, by `break`, or by
        an exception.

        `left_early`: True if the loop left its epoch by `break` or an exception, so that the next loop begins the next
        epoch.
        `epoch_ended`: True if the loop was over one epoch (without num_steps), and took it to its end.
        """
        self._holder = None
        session = self._session
        if session is None or session.run.closed:
            return
        session.leave_due = left_early
        session.reader.flush()
        if epoch_ended:
            session.run.progress.epoch_ended = True
            if session.appliance.settings.num_boxes > 1:
                session.run.report()  # boxes that continue will wait for this one in their next collective

    @property
    def mid_epoch(self) -> bool:
        """True if the present epoch has batches after the last step, or may have some because a loader has no len().
        False before the epoch's first batch."""
        session = self._session
        if session is None or not any(session.reader.position.delivered):
            return False
        return session.expected_last() != session.reader.position.step

    def leave_epoch(self, *, at_its_end: bool = False) -> None:
        """Leave the epoch of the loaded state: the next loop begins the next epoch, as after a `break`. For frameworks
        that limit the batches of an epoch.

        at_its_end: True if the state was saved after the last batch by len(): the next loop drops batches beyond len(),
        as it would have without a stop. On another topology the call then has no effect.

        Raises StateMismatchError without `at_its_end`, if the loader that saved the state does not have all four state
        methods.
        """
        if not at_its_end and self._loaded is not None and self._loaded.methods != 4:
            raise StateMismatchError(
                f"the loaded state of {self.name} was saved after a framework had left the loader's epoch before its "
                "end (Lightning: limit_train_batches). A loader without aggregate_state_dict and "
                "deaggregate_state_dict cannot start the next epoch from such a state: load a state that was saved "
                "inside the framework's epoch, or let each epoch run to its end"
            )
        self._leaves_epoch, self._ends_epoch = not at_its_end, at_its_end

    @property
    def box_and_num_boxes(self) -> tuple[int, int]:
        """Number of this process's box, and number of boxes, in the loader's run. Before the run is open: those of the
        appliance's settings."""
        settings = self._settings
        return settings.box, settings.num_boxes

    def expect(self, appliance: Appliance) -> None:
        """Record the appliance that an executor of this loader will use. Until the executor begins, box and numbers of
        boxes and workers are those of this appliance's settings."""
        self._expected = appliance.settings

    @property
    def _settings(self) -> ApplianceSettings:
        session = self._session
        if session is not None:
            return session.appliance.settings
        return self._expected if self._expected is not None else current_settings()

    @property
    def _iterating(self) -> bool:
        return self._holder is not None and self._holder() is not None

    def _open(self, appliance: Appliance) -> Session:
        settings = appliance.settings
        saved, seed = self._loaded, settings.seed
        cover = DigestCover.SAMPLE if settings.digest is None else DigestCover[settings.digest.upper()]
        if self._drawn is not None and seed is not None and seed != self._drawn:
            raise StateMismatchError(
                f"seed must be {self._drawn}, the random seed that a state of {self.name} got when it was taken before "
                f"the first loop, got Appliance(seed={seed}): take the state once the loop has begun, or inside `with "
                "Appliance(...)`"
            )
        start = self._start_of(settings, settings.box)
        if saved is None:
            seed = self._drawn if seed is None else seed
        elif settings.synthetic:
            raise NotRestartableError(
                f"a state of {self.name} was loaded, but Appliance(synthetic=True), which repeats the first batch of "
                "each worker, cannot resume: load no state, or leave out synthetic= and PENSTOCK_SYNTHETIC"
            )
        else:
            if saved.methods == 0 and saved.positions and not self._replays(settings):
                raise NotRestartableError(
                    f"the loaded state of {self.name} was saved with Appliance(replay=True) and can be resumed only "
                    "with the same setting: pass Appliance(replay=True)"
                )
            if seed is None and saved.seed is None and not saved.by_hand:
                raise StateMismatchError(
                    f"the loaded state of {self.name} has no seed, because an older Penstock saved it before the first "
                    "loop. Pass Appliance(seed=...), or start without the state"
                )
            if seed is not None and saved.seed is not None and seed != saved.seed:
                raise StateMismatchError(
                    f"seed must be {saved.seed}, as in the loaded state of {self.name}, got Appliance(seed={seed}): "
                    "leave out seed= and PENSTOCK_SEED, or start without a state"
                )
            seed = saved.seed if seed is None else seed
            if saved.positions and settings.digest is not None and cover != saved.cover:
                had = saved.cover.name.lower()
                raise StateMismatchError(
                    f"digest must be {had!r}, as in the loaded state of {self.name}, got Appliance(digest="
                    f"{settings.digest!r}): leave out digest= and PENSTOCK_DIGEST, or start without a state"
                )
            cover = saved.cover if saved.positions else cover
        start_of = partial(_on, cover, partial(self._start_of, settings))
        start = start_of(settings.box)
        # Each opening in one launch needs its own key. Otherwise a loader that starts over would join the run that it
        # has just left.
        key = f"#{self._openings}" if self._openings else ""
        opening = Opening(
            self._reference,
            self._arguments,
            self._local.maker,
            start,
            start_of,
            seed,
            key,
            self._replays(settings),
            cover,
        )
        run, reader = appliance.open_stream(self, opening)
        run.progress.counts = reader.counts
        if saved is not None:
            reader.counts.begin(saved.counts_of(settings.box, settings.num_boxes))
        self._openings += 1
        position = reader.position
        self._session = session = Session(
            appliance,
            run,
            reader,
            self.name,
            began_at=position.step,
            epoch_began_at=position.step - sum(position.delivered),
            epoch_start_known=start.same_topology or position.step == 0,
            leave_due=self._leaves_epoch or (self._ends_epoch and start.same_topology),
        )
        if self._leaves_epoch and not start.same_topology:
            self.close()
            raise StateMismatchError(
                f"the loaded state of {self.name} was saved after a framework had left the loader's epoch before its "
                "end (Lightning: limit_train_batches). Such a state can be resumed only with the same numbers of boxes "
                "and workers: use the same numbers, or load a state that was saved inside the framework's epoch"
            )
        weakref.finalize(self, _abandon, run, reader).atexit = False
        return session

    def _replays(self, settings: ApplianceSettings) -> bool:
        """Return True if the loader can be saved even without state methods, by counting its batches and making them
        again after a resume."""
        return self._replay or settings.replay

    def _start_of(self, settings: ApplianceSettings, box: int) -> BoxStart:
        saved = self._loaded
        if saved is None:
            start = BoxStart(Position.start(settings.slots_per_box).to_proto(), b"", False)
        else:
            start = saved.start(box, settings.num_boxes, settings.slots_per_box, strict=self._strict)
        begins = saved is None or saved.step == 0 or start.anew  # an epoch from its beginning
        if begins and self.asked_epoch not in (None, start.position.epoch):
            start.position.labels.add(epoch=start.position.epoch, label=self.asked_epoch)
        return start

    # ---- the workers' loaders

    def __len__(self) -> int:
        """Return the number of batches in an epoch of this box: the sum of len() over its workers' loaders. While no
        run is open, the loaders are built in this process. Raises TypeError if a loader has no len(), or if its len()
        raises any error, which the text then contains."""
        session = self._session
        if session is not None and not session.run.closed and session.run.error is None:
            slots = self._capabilities(session)
            unsized = next((one for one in slots if one.length < 0), None)
            if unsized is not None:
                raise TypeError(no_length(self.name, unsized.no_length))
            return sum(one.length for one in slots)
        settings = self._settings
        seed = settings.seed if settings.seed is not None else 0
        assignments = [
            Assignment(settings.box, settings.num_boxes, slot, settings.slots_per_box, seed, self.step + 1)
            for slot in range(settings.slots_per_box)
        ]
        return self._local.length(assignments)

    def _capabilities(self, session: Session) -> list[records_pb2.LoaderCapabilities]:
        """Wait until all workers of this box have made their loaders, and return for each slot what its loader can do:
        state methods, length. Raises DeadlineError if a worker takes too long, and the error of a loader that could not
        be made."""
        run = session.run
        if not run.wait_for(_all_known, session.appliance.settings.timeout_s):
            late = [view for view in run.views if not _known(view)]
            raise DeadlineError(
                f"{self.name}: worker slot {late[0].slot} of box {run.box} (on worker {late[0].worker or 'none'}) has "
                f"not built its loader within timeout_s={session.appliance.settings.timeout_s:g} s: run `penstock "
                "status` to see the cause, or pass a larger Appliance(timeout_s=) if input_fn needs longer"
            )
        for view in run.views:
            if view.phase == pb.FAILED and not view.HasField("capabilities"):
                session.reader.raise_failed(view)
        return [view.capabilities for view in run.views]

    def close(self) -> None:
        """Close the loader's run, if it is open, and free its workers. The next executor starts from the loaded state,
        or from the beginning without one."""
        session, self._session = self._session, None
        if session is not None:
            session.reader.close()
            session.run.close(forget=False)


def _on(cover: DigestCover, start_of: Callable[[int], BoxStart], box: int) -> BoxStart:
    """Return `start_of(box)`, the position and state from which a box starts. In the position, set `by_rows` to True if
    `cover` is DigestCover.ROWS (digests by rows), else to False."""
    start = start_of(box)
    start.position.by_rows = cover == DigestCover.ROWS
    return start


def _known(view: pb.SlotView) -> bool:
    return view.phase in (pb.READY, pb.FAILED)


def _all_known(run: StreamRun) -> bool:
    return all(_known(view) for view in run.views)


def _abandon(run: StreamRun, reader: Reader) -> None:
    """Close the reader of a garbage-collected loader, and let its run be closed. This function may run inside the
    garbage collector, so it only sets a flag for the run; the run's watch thread then calls the coordinator."""
    run.abandoned = True
    reader.close()
