"""Stream of a loader: how its run is opened from the code, the loaded state and the settings; and who iterates it.

`iter()` opens the run and raises the errors of the opening, but takes no part in the stream before its first `next()`,
because tqdm and other wrappers call iter() more than once. From then on the iterator has the stream until its loop
ends: after the last batch, by `break`, by an exception, because it is dropped, or because a later iterator takes a
batch. In each case the `finally` of the iterator's generator runs."""

from __future__ import annotations

import inspect
import itertools
import secrets
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from typing import Any

from penstock.client.api.appliance import Appliance, current_appliance, current_settings
from penstock.client.api.appliance_settings import ApplianceSettings
from penstock.client.api.session import Session
from penstock.client.states.code_reference import CodeReference
from penstock.client.states.local_loader import LocalLoader
from penstock.client.states.saved_state import KEEP, BoxStart, Layers, SavedState
from penstock.client.stream.streams import Opening, Reader, StreamRun
from penstock.proto.batch.digest import DigestCover
from penstock.proto.errors import NotRestartableError, PenstockError, StateMismatchError, StateUnavailableError
from penstock.proto.state.position import Position


class LoaderStream:
    def __init__(self, reference: CodeReference, arguments: bytes, local: LocalLoader, *, replay: bool) -> None:
        self.name, self.reference = reference.label, reference
        self._arguments, self._local = arguments, local
        self._replay = replay
        self.session: Session | None = None
        self._holder: weakref.ref[Steps] | None = None
        """Iterator that took the last batch, and whose loop has not ended."""
        self._openings = 0
        self.loaded: SavedState | None = None
        self._strict, self._layers = True, KEEP
        self.expected: ApplianceSettings | None = None
        """Settings of the appliance that was passed to a DataExecutor of this loader."""
        self._leaves_epoch = False
        """The next loop begins the epoch after that of the loaded state."""
        self._ends_epoch = False
        """The same holds, and the loaded state is that of the epoch's last batch by len()."""
        self.asked_epoch: int | None = None
        self.drawn: int | None = None
        """Random seed that the run will have, because a state was requested before it was open."""

    def __getstate__(self) -> dict[str, Any]:
        if self.session is not None:
            raise TypeError(
                f"{self.name}: a loader cannot be copied or pickled once it streams: load its state into a new one"
            )
        return {**self.__dict__, "_holder": None}

    @property
    def step(self) -> int:
        if self.session is not None:
            return self.session.reader.position.step
        return self.loaded.step if self.loaded is not None else 0

    @property
    def settings(self) -> ApplianceSettings:
        if self.session is not None:
            return self.session.appliance.settings
        return self.expected if self.expected is not None else current_settings()

    @property
    def live_session(self) -> Session | None:
        session = self.session
        return None if session is None or session.run.closed or session.run.error is not None else session

    @property
    def iterated(self) -> bool:
        return self._holder is not None and self._holder() is not None

    def load(self, saved: SavedState, *, strict: bool, layers: Layers) -> None:
        self.close()
        self.loaded, self._strict, self._layers = saved, strict, layers
        self._leaves_epoch = self._ends_epoch = False
        self.drawn = None

    def close(self) -> None:
        session, self.session = self.session, None
        if session is not None:
            session.reader.close()
            session.run.close(forget=False)

    # ---- for loops

    def open(self, appliance: Appliance | None) -> Session:
        """Open the run if it is not open, so that the workers begin to make batches; takes none and begins no loop."""
        session = self.session
        if session is None:
            session = self._open(appliance if appliance is not None else current_appliance())
        elif session.run.error is not None:
            raise session.run.error
        elif session.run.closed:
            raise RuntimeError(
                f"{self.name}: the stream ended at step {self.step}, because its appliance was closed: load a state to "
                "continue, or make a new DataLoader"
            )
        elif appliance is not None and appliance is not session.appliance:
            raise RuntimeError(
                f"{self.name} streams from {session.appliance!r}, not from {appliance!r}: load its state to move it, "
                "or make a second DataLoader"
            )
        return session

    def begin(self, steps: Steps, appliance: Appliance | None) -> Session:
        """Give the stream to an iterator that is to take a batch. An epoch that an earlier loop has left ends here."""
        session = self.open(appliance)
        holder = self._holder() if self._holder is not None else None
        begins = session.beginning.acquire(blocking=False)
        try:
            if not begins or (holder is not None and not (holder.number < steps.number and holder.give_up())):
                raise RuntimeError(
                    f"{self.name}: only one loop can take the batches of a loader, and another one is at step "
                    f"{self.step}: finish it, or close() its iterator, or make a second DataLoader"
                )
            if session.leave_due:
                session.leave_epoch(ends_epoch=self._ends_epoch)
            self._holder, session.holder = weakref.ref(steps), steps.number
            session.reader.thread = threading.get_ident()
            session.run.progress.epoch_ended = session.run.progress.finished = False
        finally:
            if begins:
                session.beginning.release()
        return session

    def check_continues(self, number: int, session: Session) -> None:
        """Raise RuntimeError unless this iterator was the last that took the stream, in `session`."""
        if self.session is not session:
            raise RuntimeError(
                f"{self.name}: this iterator has ended, because a state was loaded or the loader closed: call iter()"
            )
        if session.holder != number:
            raise RuntimeError(
                f"{self.name}: this iterator has ended, because another loop has taken batches (now step {self.step}): "
                "finish one loop before the next, or make a second DataLoader"
            )

    def finish(self, *, left_early: bool, epoch_ended: bool, finished: bool) -> None:
        """Take the stream back after a loop has ended. `left_early`: by `break` or an exception, so that the next loop
        begins the next epoch. `epoch_ended`: the loop was over one epoch, and took it to its end. `finished`: it took
        all that it was to take."""
        self._holder = None
        session = self.session
        if session is None or session.run.closed:
            return
        session.run.progress.finished = finished
        session.leave_due = left_early
        session.reader.flush()
        if epoch_ended:
            session.run.progress.epoch_ended = True
            if session.appliance.settings.num_boxes > 1:
                session.run.report()  # boxes that continue will wait for this one in their next collective

    @property
    def mid_epoch(self) -> bool:
        session = self.session
        if session is None or not any(session.reader.position.delivered):
            return False
        return session.expected_last() != session.reader.position.step

    def leave_epoch(self, *, at_its_end: bool = False) -> None:
        if not at_its_end and self.loaded is not None and self.loaded.methods != 4:
            raise self._left_epoch("can start the next epoch only with the four state methods")
        self._leaves_epoch, self._ends_epoch = not at_its_end, at_its_end

    def _left_epoch(self, limit: str) -> StateMismatchError:
        return StateMismatchError(
            f"the loaded state of {self.name}, saved after a framework had left an epoch before its end (Lightning: "
            f"limit_train_batches), {limit}: load a state from inside the framework's epoch"
        )

    # ---- opening

    def _open(self, appliance: Appliance) -> Session:
        settings, saved = appliance.settings, self.loaded
        self._check_resumes(settings)
        cover = self._cover(settings)

        def start_of(box: int) -> BoxStart:
            start = self._start_of(settings, box)
            start.position.by_rows = cover == DigestCover.ROWS
            return start

        start = start_of(settings.box)
        opening = Opening(
            reference=self.reference,
            arguments=self._arguments,
            make=self._local.maker,
            start_of=start_of,
            start=start,
            seed=self._seed(settings),
            # Otherwise a loader that starts over would join the run that it has just left.
            key=f"#{self._openings}" if self._openings else "",
            replay=self.replays(settings),
            cover=cover,
        )
        run, reader = appliance.open_stream(self, opening)
        if saved is not None:
            reader.counts.begin(saved.counts_of(settings.box, settings.num_boxes))
        self._openings += 1
        position = reader.position
        self.session = session = Session(
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
            raise self._left_epoch("can be resumed only with the same numbers of boxes and workers")
        weakref.finalize(self, _abandon, run, reader).atexit = False
        return session

    def _check_resumes(self, settings: ApplianceSettings) -> None:
        saved = self.loaded
        if saved is not None and settings.synthetic:
            raise NotRestartableError(
                f"a state of {self.name} was loaded, which PENSTOCK_SYNTHETIC cannot resume: leave one out"
            )
        if saved is not None and saved.methods == 0 and saved.positions and not self.replays(settings):
            raise NotRestartableError(
                f"the loaded state of {self.name} was saved with Appliance(replay=True): pass replay=True here too"
            )

    def _seed(self, settings: ApplianceSettings) -> int | None:
        saved, seed = self.loaded, settings.seed
        if seed is not None and self.drawn not in (None, seed):
            raise StateMismatchError(
                f"seed must be {self.drawn}, which a state of {self.name} got when it was taken before the first loop, "
                f"got Appliance(seed={seed}): take the state in the loop, or inside `with Appliance(...)`"
            )
        if saved is None:
            return self.drawn if seed is None else seed
        if seed is None and saved.seed is None and not saved.by_hand:
            raise StateMismatchError(
                f"the loaded state of {self.name} has no seed (an older Penstock saved it): pass Appliance(seed=...)"
            )
        if seed is not None and saved.seed not in (None, seed):
            raise StateMismatchError(
                f"seed must be {saved.seed}, as in the loaded state of {self.name}, got Appliance(seed={seed})"
            )
        return saved.seed if seed is None else seed

    def _cover(self, settings: ApplianceSettings) -> DigestCover:
        saved = self.loaded if self.loaded is not None and self.loaded.positions else None
        if settings.digest is None:
            return DigestCover.SAMPLE if saved is None else saved.cover
        cover = DigestCover[settings.digest.upper()]
        if saved is not None and cover != saved.cover:
            raise StateMismatchError(
                f"digest must be {saved.cover.name.lower()!r}, as in the loaded state of {self.name}, got "
                f"Appliance(digest={settings.digest!r}): leave it out"
            )
        return cover

    def replays(self, settings: ApplianceSettings) -> bool:
        return self._replay or settings.replay

    def _start_of(self, settings: ApplianceSettings, box: int) -> BoxStart:
        saved = self.loaded
        if saved is None:
            start = BoxStart(Position.start(settings.slots_per_box).to_proto(), b"", False)
        else:
            start = saved.start(
                box, settings.num_boxes, settings.slots_per_box, strict=self._strict, layers=self._layers
            )
        begins = saved is None or saved.step == 0 or start.anew  # an epoch from its beginning
        if begins and self.asked_epoch not in (None, start.position.epoch):
            start.position.labels.add(epoch=start.position.epoch, label=self.asked_epoch)
        return start

    def seed_to_come(self, settings: ApplianceSettings) -> int:
        """Return the run's seed; draw it now: a state without a seed could be resumed with another order of samples."""
        if settings.seed is not None:
            return settings.seed
        if settings.num_boxes > 1:
            raise StateUnavailableError(
                f"{self.name}: there is no state before the boxes have agreed on a seed: pass Appliance(seed=...)"
            )
        if self.drawn is None:
            self.drawn = secrets.randbits(63)
        return self.drawn


class Steps(Iterator[Any]):
    """Iterator that a loop holds: a generator of batches, made by `batches` when the loop takes its first one, from the
    session and the number of the last step before it.

    After an error of `next`, such as a DeadlineError or Ctrl-C, no batch is lost, and the loader is free for other
    loops. If there was none, `next` may be called again for the same batch."""

    def __init__(
        self,
        stream: LoaderStream,
        appliance: Appliance | None,
        batches: Callable[[Session, int], Generator[Any, None, None]],
    ) -> None:
        self.number = next(_numbers)
        self._stream, self._appliance, self._batches_from = stream, appliance, batches
        self._batches: Generator[Any, None, None] | None = None
        self._session: Session | None = None
        self._first = 0

    def __next__(self) -> Any:
        batches = self._batches
        try:
            if batches is None:
                batches = self._batches = self._begin()
            return next(batches)
        except StopIteration:
            raise
        except PenstockError as error:
            self._batches = None  # finished by the error
            if self._stream.session is not None:
                self._stream.session.failed(error)
            raise error.with_traceback(None) from error.__cause__  # the generator's frame says nothing to users
        except BaseException as error:
            if batches is not None and _runs(batches):
                raise RuntimeError(
                    f"{self._stream.name}: next() was called while another thread was in it: guard it by a lock"
                ) from error
            self._batches = None  # finished by the error
            raise

    def _begin(self) -> Generator[Any, None, None]:
        if self._session is not None:
            self._stream.check_continues(self.number, self._session)
        session = self._stream.begin(self, self._appliance)
        if self._session is None:
            self._session, self._first = session, session.reader.position.step
        return self._batches_from(session, self._first)

    def give_up(self) -> bool:
        """End the loop, because a later iterator takes a batch. Return False while another thread is in `next`."""
        batches = self._batches
        if batches is not None:
            if _runs(batches):
                return False
            batches.close()
            self._batches = None
        return True

    def close(self) -> None:
        if self._batches is None:
            self._batches = (batch for batch in list[Any]())
        self._batches.close()


def _runs(generator: Generator[Any, None, None]) -> bool:
    return inspect.getgeneratorstate(generator) == inspect.GEN_RUNNING


_numbers = itertools.count(1)


def _abandon(run: StreamRun, reader: Reader) -> None:
    """Let the run's watch thread close it, because this function may run inside the garbage collector."""
    run.abandoned = True
    reader.close()
