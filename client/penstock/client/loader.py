"""A loader as the user holds it: a description until it is iterated, then a stream with a position.

    DataLoader ── opens ──> Session: a Run at an Appliance, and the Feed that reads it

What a loader is at any time is one of three: never read (its state is that of a local instance), loaded and not started
(its state is what was loaded), or streaming (its state is fetched from the workers as of the last step). A stream ends
with its appliance, with an error, or with `load_state_dict`; only the last starts another one, for a position is never
lost silently.
"""

from __future__ import annotations

import copy
import secrets
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, cast

from penstock.client.appliance import Appliance, current_appliance, current_settings
from penstock.client.feed import Feed, Stats
from penstock.client.local import LocalLoader
from penstock.client.reference import encode_arguments, refer
from penstock.client.run import Run
from penstock.client.saved import Part, Saved, Start, blank, is_to_be_filled, read
from penstock.client.settings import Settings
from penstock.client.staging import feed_for
from penstock.proto.assignment import Assignment
from penstock.proto.digest import Cover
from penstock.proto.errors import (
    DeadlineError,
    EmptyInputError,
    NotRestartableError,
    PenstockError,
    StateMismatchError,
    StateUnavailableError,
)
from penstock.proto.position import Position
from penstock.proto.state import decode_state, encode_state
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import records_pb2

__all__ = ["DataLoader", "Session"]


@dataclass
class Session:
    """One opening of a loader."""

    appliance: Appliance
    run: Run
    feed: Feed
    name: str
    first_step: int
    """The step before its first batch."""
    pass_began_at: int
    """The step before the first batch of the pass under way."""
    whole_pass: bool
    """The pass under way was begun at its beginning, and not somewhere by a restored state."""
    told_ended: set[tuple[int, int]] = field(default_factory=set)
    """Ends of other boxes that the loop was warned of."""
    cut_due: bool = False
    """The pass was left by `break`; the next executor cuts it."""

    @property
    def progress(self) -> bool:
        return self.appliance.settings.progress

    def stats(self) -> Stats:
        feed = self.feed
        return replace(
            feed.stats,
            steps=feed.position.step - self.first_step,
            copies=feed.copies,
            waited_by_worker=dict(feed.stats.waited_by_worker),
        )

    def pass_ended(self) -> None:
        """The feed has come to the end of a pass. Raises EmptyInputError if there was nothing in it."""
        step = self.feed.position.step
        if self.whole_pass and step == self.pass_began_at:
            raise self.empty()
        self.pass_began_at, self.whole_pass = step, True

    def cut(self) -> None:
        self.feed.cut()
        self.cut_due = False
        self.pass_began_at, self.whole_pass = self.feed.position.step, True

    def warn_of_ended(self, step: int) -> None:
        """Say once of each other box that its pass ended before this step: a collective would wait for it."""
        for box, last in self.run.ended_boxes.items():
            # One that ended its pass where this box began its own is between two passes, as this one was.
            if self.pass_began_at < last < step and (box, last) not in self.told_ended:
                self.told_ended.add((box, last))
                warnings.warn(
                    f"{self.name}: the pass of box {box} ended at step {last}, and box {self.run.box} goes on with "
                    f"step {step}: a collective between them would hang. Give all boxes as many batches, or num_steps",
                    UserWarning,
                    stacklevel=3,
                )

    def empty(self) -> EmptyInputError:
        """No batch in a whole pass."""
        position = self.feed.position
        which = "no batch at all" if position.step == 0 else f"no batch in pass {max(position.epoch - 1, 0)}"
        return EmptyInputError(
            f"{self.name} yielded {which} on any worker of box {self.run.box}: check its data paths, its sharding, and "
            "whether it returns an iterator that is used up"
        )

    def expected_last(self) -> int | None:
        """The last step of this pass by what the workers' loaders say of their lengths; None if one does not."""
        position, last = self.feed.position, self.feed.position.step
        for slot in position.live:
            length = self.run.views[slot].traits.length
            if not self.run.views[slot].HasField("traits") or length < 0:
                return None
            last += max(0, length - position.delivered[slot])
        return last


class DataLoader:
    """Wraps a callable that returns a torch DataLoader or an iterable of nested tensors; it runs on the workers.

    Args:
        input_fn: a function (or class) at the top level of a module that workers can import; in embedded mode the main
            script will do.
        args, kwargs: passed to it on every worker. Plain values, tensors and arrays; copied here and now.

    Raises:
        TypeError: input_fn is not callable.
        InvalidArgumentError: input_fn cannot be imported by another process: a lambda, a local function, a partial.
    """

    def __init__(self, input_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self._reference = refer(input_fn)
        self.name = self._reference.name
        """ "module:qualname" of input_fn."""
        args, kwargs = copy.deepcopy(args), copy.deepcopy(kwargs)
        self._arguments = encode_arguments(self.name, args, kwargs)
        self._local = LocalLoader(self.name, input_fn, args, kwargs)
        self._session: Session | None = None
        self._executor: weakref.ref[Any] | None = None
        self._openings = 0
        self._loaded: Saved | None = None
        self._given: Any = None
        self._strict = True
        self._cached: tuple[int, Any] | None = None
        self._expected: Settings | None = None
        """Of the appliance that an executor was made for."""
        self._leaves_pass = False
        """The pass that the loaded state stands in is not gone on with."""
        self._drawn: int | None = None
        """The seed that was drawn for a state which was asked for before the run was open: the run gets it, too."""

    # ---- what executors need

    @property
    def step(self) -> int:
        """The last step handed to a loop, over the whole life of the run; that of a loaded state before the first."""
        if self._session is not None:
            return self._session.feed.position.step
        return self._loaded.step if self._loaded is not None else 0

    def begin(self, executor: Any, appliance: Appliance | None) -> Session:
        """Called by an executor that starts to iterate: the stream, opened if need be."""
        if self._iterating:
            raise RuntimeError(
                f"{self.name}: another executor is iterating this loader; finish or close() its iterator first, or "
                "make a second DataLoader for a second stream"
            )
        session = self._session
        if session is None:
            session = self._open(appliance if appliance is not None else current_appliance(self))
            if self._leaves_pass:
                self._traits(session)  # where the pass ends
                session.cut_due = session.expected_last() != session.feed.position.step
        elif session.run.error is not None:
            raise session.run.error
        elif session.run.closed:
            raise RuntimeError(
                f"{self.name}: its stream ended at step {self.step} with its appliance. To go on there, "
                "load_state_dict a state; to start anew, make a new DataLoader"
            )
        elif appliance is not None and appliance is not session.appliance:
            raise RuntimeError(
                f"{self.name} streams from {session.appliance!r}, and cannot be iterated on {appliance!r} too: "
                "load_state_dict its state to move it, or make a second DataLoader"
            )
        self._executor = weakref.ref(executor)
        session.feed.thread = threading.get_ident()
        try:
            if session.cut_due:
                session.cut()
            session.run.progress.pass_ended = False
        except BaseException:
            self._executor = None
            raise
        return session

    def finish(self, executor: Any, *, left_early: bool, pass_ended: bool) -> None:
        """Called by the executor when its loop is over in whatever way."""
        self._executor = None
        session = self._session
        if session is None or session.run.closed:
            return
        session.cut_due = left_early
        session.feed.flush()
        if pass_ended:
            session.run.progress.pass_ended = True
            if session.appliance.settings.num_boxes > 1:
                session.run.report()  # boxes that go on will wait for this one in their next collective

    @property
    def mid_pass(self) -> bool:
        """Whether batches of the pass are left, or may be left, behind the last step."""
        session = self._session
        if session is None or not any(session.feed.position.delivered):
            return False
        return session.expected_last() != session.feed.position.step

    def __getstate__(self) -> dict[str, Any]:
        if self._session is not None:
            raise TypeError(
                f"{self.name}: a loader that streams cannot be copied or pickled; save its state_dict(), and load that "
                "into a DataLoader of the same input_fn"
            )
        return self.__dict__

    def leave_pass(self) -> None:
        """After a load: the next executor begins with the next pass, as after a `break`."""
        if self._loaded is not None and self._loaded.methods != 4:
            raise StateMismatchError(
                f"the loaded state of {self.name} was saved at the end of an epoch that left its pass early, and a "
                "loader without aggregate_state_dict and deaggregate_state_dict may go on with that pass: load a state "
                "from the middle of an epoch, or let an epoch be a pass"
            )
        self._leaves_pass = True

    @property
    def place(self) -> tuple[int, int]:
        """(box, num_boxes) of this process in the loader's run; before that is open, those that it would have now."""
        settings = self._settings
        return settings.box, settings.num_boxes

    def expect(self, appliance: Appliance) -> None:
        """An executor will begin on this appliance: until then, questions are answered for its boxes and workers."""
        self._expected = appliance.settings

    @property
    def _settings(self) -> Settings:
        session = self._session
        if session is not None:
            return session.appliance.settings
        return self._expected if self._expected is not None else current_settings()

    @property
    def _iterating(self) -> bool:
        return self._executor is not None and self._executor() is not None

    def _open(self, appliance: Appliance) -> Session:
        settings = appliance.settings
        saved, seed = self._loaded, settings.seed
        cover = Cover.SAMPLE if settings.digest is None else Cover[settings.digest.upper()]
        if self._drawn is not None and seed is not None and seed != self._drawn:
            raise StateMismatchError(
                f"a state of {self.name} was taken before its run was opened, with seed {self._drawn} drawn for it, "
                f"and Appliance(seed={seed}) asks for another: take the state once the loop has begun, or on the "
                "appliance that it will run on"
            )
        if saved is None:
            seed = self._drawn if seed is None else seed
            start = Start(Position.start(settings.num_workers_per_box).to_proto(), b"", False)
        else:
            start = saved.start(settings.box, settings.num_boxes, settings.num_workers_per_box, strict=self._strict)
            if saved.methods == 0 and saved.positions and not settings.replay:
                raise NotRestartableError(
                    f"the loaded state of {self.name} was saved with replay=True, and is restored by replaying too: "
                    "ask for it by Appliance(replay=True)"
                )
            if seed is None and saved.seed is None:
                raise StateMismatchError(
                    f"the loaded state of {self.name} has no seed, for it was taken before its run was opened, by an "
                    "older Penstock: pass Appliance(seed=...), or start without it"
                )
            if seed is not None and saved.seed is not None and seed != saved.seed:
                raise StateMismatchError(
                    f"the loaded state of {self.name} was saved with seed {saved.seed}, and Appliance(seed={seed}) "
                    "asks for another: leave seed out, or start from no state"
                )
            seed = saved.seed if seed is None else seed
            if saved.positions and settings.digest is not None and cover != saved.cover:
                had = saved.cover.name.lower()
                raise StateMismatchError(
                    f"the loaded state of {self.name} was saved with digest={had!r}, and Appliance(digest="
                    f"{settings.digest!r}) asks for another: leave digest out, or start from no state"
                )
            cover = saved.cover if saved.positions else cover
        start.base.by_rows = cover == Cover.ROWS
        # Another key for every opening in one launch, or a loader that starts over would join what it has just left.
        key = f"#{self._openings}" if self._openings else ""
        run = appliance.open_run(self, self._reference, self._arguments, start, seed, key, cover)
        self._openings += 1
        position = Position.from_proto(start.base)
        feed = feed_for(settings.device, run, position, self.name, settings.timeout_s)
        self._session = session = Session(
            appliance,
            run,
            feed,
            self.name,
            first_step=position.step,
            pass_began_at=position.step - sum(position.delivered),
            whole_pass=start.same_shape or position.step == 0,
        )
        if self._leaves_pass and not start.same_shape:
            self.close()
            raise StateMismatchError(
                f"the loaded state of {self.name} was saved at the end of an epoch that left its pass early, and that "
                "is only known how to go on from with as many boxes and workers as it was saved with: use those, or a "
                "state from the middle of an epoch"
            )
        weakref.finalize(self, _abandon, run, feed).atexit = False
        return session

    # ---- the iterator protocol and len

    def __iter__(self) -> Iterator[Any]:
        """The same as iterating `DataExecutor(self)`."""
        from penstock.client.executor import DataExecutor  # the executor knows the loader; this is the way back

        return iter(DataExecutor(self))

    def __len__(self) -> int:
        """Batches of a pass over this box's workers: the sum of their loaders' len(). TypeError if one has none."""
        session = self._session
        if session is not None and not session.run.closed and session.run.error is None:
            lengths = [traits.length for traits in self._traits(session)]
            if min(lengths) < 0:
                raise TypeError(f"the loader that {self.name} returned has no len()")
            return sum(lengths)
        settings = self._settings
        seed = settings.seed if settings.seed is not None else 0
        places = [
            Assignment(settings.box, settings.num_boxes, slot, settings.num_workers_per_box, seed, self.step + 1)
            for slot in range(settings.num_workers_per_box)
        ]
        return self._local.length(places)

    def _traits(self, session: Session) -> list[records_pb2.LoaderTraits]:
        """What the workers found out about their loaders; waits for them."""
        run = session.run
        if not run.wait_for(_all_known, session.appliance.settings.timeout_s):
            late = [view for view in run.views if not _known(view)]
            raise DeadlineError(
                f"{self.name}: waited {session.appliance.settings.timeout_s:g} s for slot {late[0].slot} of box "
                f"{run.box} (worker {late[0].worker or 'none'}) to build its loader"
            )
        for view in run.views:
            if view.phase == pb.FAILED and not view.HasField("traits"):
                session.feed.raise_failed(view)
        return [view.traits for view in run.views]

    # ---- state

    @property
    def is_restartable(self) -> bool:
        """Whether state_dict() can be had: by the loader's own methods, or by replay if the appliance asks for it."""
        session = self._session
        if session is None or session.run.closed or session.run.error is not None:
            replay = (session.appliance.settings if session is not None else current_settings()).replay
            return replay or self._local.methods("is_restartable") > 0
        traits = self._traits(session)[0]
        if traits.not_restartable:
            return False
        return traits.state_methods > 0 or session.appliance.settings.replay

    def state_dict(self) -> dict[str, Any]:
        """The state after the last step that was handed to the loop, over all boxes; the same value on every box.

        Before the first step it is the state that was loaded, or that of an instance built here. May be called in the
        loop, between executors and after the last; always for the same step with the same result. (Except that
        torch.distributed.checkpoint.load, which asks for a state to load into, gets one to be filled.)

        Raises:
            NotRestartableError: the loader has no state methods, or something else stands against saving it.
            StateUnavailableError: the workers no longer keep this step, or the run is closed.
        """
        return self.state_at(self.step)

    def state_at(self, step: int) -> dict[str, Any]:
        """What state_dict() would have returned after this step, at most Appliance(retention_steps=) steps ago.

        For loops that get their batches from something that reads ahead of them: see penstock.client.Lookahead.

        Raises:
            StateUnavailableError: the step lies before the state that was loaded, was not handed out yet, or is one
                that the workers no longer keep; or the run is closed.
            NotRestartableError: as for state_dict().
        """
        if isinstance(step, bool) or not isinstance(step, int):
            raise TypeError(f"{self.name}: state_at(step) takes an int, not {step!r}")
        if is_to_be_filled():
            return blank()
        session = self._session
        first = session.first_step if session is not None else self.step
        if not first <= step <= self.step:
            raise StateUnavailableError(
                f"{self.name}: no state of step {step} can be had, only of {first} to {self.step}: the steps that were "
                "handed out since the loader was made or loaded"
            )
        if session is None or step == first:
            if self._loaded is not None:
                return cast(dict[str, Any], copy.deepcopy(self._given))
            return self._initial()
        if self._cached is None or self._cached[0] != step:
            self._cached = (step, self._fetch(session, step).to_dict())
        return cast(dict[str, Any], copy.deepcopy(self._cached[1]))

    def _initial(self) -> dict[str, Any]:
        session = self._session
        settings = self._settings
        methods = self._local.methods("the state before the first step")
        self._require_methods(methods, settings.replay)
        seed = session.run.seed if session is not None else self._seed_to_come(settings)
        saved = Saved(0, self.name, methods, 0, 0, seed)
        if methods == 4:
            saved.aggregated = self._local.initial_state(seed)
        return saved.to_dict()

    def _seed_to_come(self, settings: Settings) -> int:
        """The seed that the run will have; one that nobody gave is drawn here, or the state would fit any order."""
        if settings.seed is not None:
            return settings.seed
        if settings.num_boxes > 1:
            raise StateUnavailableError(
                f"{self.name}: no state can be had before the run is open, for its seed is drawn then, and all boxes "
                "must have the same: pass Appliance(seed=...), or take the state once the loop has begun"
            )
        if self._drawn is None:
            self._drawn = secrets.randbits(63)
        return self._drawn

    def _require_methods(self, methods: int, replay: bool) -> None:
        if methods == 0 and not replay:
            raise NotRestartableError(
                f"the loader that {self.name} returned cannot be saved, for it has no state_dict and "
                "load_state_dict: give it these two, use torchdata's StatefulDataLoader or a source of "
                "penstock.worker.datasets, or ask for replay by Appliance(replay=True)"
            )

    def _fetch(self, session: Session, step: int) -> Saved:
        settings, run = session.appliance.settings, session.run
        if run.error is not None:
            raise run.error
        if run.closed:
            raise StateUnavailableError(
                f"{self.name}: no state of step {step} can be had, for its appliance is closed; call state_dict() "
                "before that"
            )
        traits = self._traits(session)[0]
        if traits.not_restartable:
            raise NotRestartableError(f"{self.name} cannot be saved: {traits.not_restartable}")
        self._require_methods(traits.state_methods, settings.replay)
        if threading.get_ident() == session.feed.thread:
            session.feed.flush()
        return self._assemble(run, step, traits.state_methods, settings.timeout_s)

    def _assemble(self, run: Run, step: int, methods: int, timeout_s: float) -> Saved:
        fetched = run.fetch_state(step, timeout_s)
        boxes = sorted(fetched.positions)
        saved = Saved(
            step,
            self.name,
            methods,
            fetched.records[0][0].num_boxes,
            fetched.records[0][0].num_workers_per_box,
            run.seed,
            [Position.from_proto(fetched.positions[box]) for box in boxes],
            run.cover == Cover.FULL,
        )
        users = []
        for record, envelope in fetched.records:
            value = cast(dict[str, Any], decode_state(envelope))
            users.append(value["user"])
            saved.parts.append(
                Part(
                    record.box,
                    record.local_worker_id,
                    record.worker_step,
                    record.samples_streamed,
                    record.digest,
                    value["restart"],
                    None if methods == 4 else value["user"],
                    record.next_digest,
                    record.next_epoch,
                )
            )
        if methods == 4:
            if self._local.can_be_built:
                saved.aggregated = self._local.aggregate(users)
            else:
                saved.aggregated = decode_state(run.aggregate(encode_state(users), timeout_s))
        return saved

    def load_state_dict(self, sd: dict[str, Any], strict: bool = True) -> None:
        """Go on from a state of this loader; takes effect with the next executor. Not while one iterates.

        Args:
            sd: what state_dict() returned, in this process or another.
            strict: passed on to the loader's own methods, where they take it.

        Raises:
            StateMismatchError: it is the state of another loader, or no state at all.
            StateCorruptError, StateVersionError: it is damaged, or newer than this Penstock.
            RuntimeError: an executor iterates.
            TypeError: `strict` is on one of the loader's two methods only.
        """
        if self._iterating:
            raise RuntimeError(
                f"{self.name}: load_state_dict while an executor iterates; leave its loop first, or close() its "
                "iterator"
            )
        saved = read(sd)
        if not self._reference.same_as(saved.input_fn):
            raise StateMismatchError(
                f"the state is of the loader {saved.input_fn}, and this is the loader {self.name}; each loader loads "
                "its own"
            )
        if saved.methods == 4:
            try:
                self._local.check_strict("load_state_dict")
            except PenstockError:
                pass  # it cannot be built here; the workers check the same
        given = copy.deepcopy(sd)
        self.close()
        self._leaves_pass, self._drawn = False, None
        self._loaded, self._given, self._strict, self._cached = replace(saved), given, strict, None
        if saved.methods == 4:
            self._loaded.aggregated = copy.deepcopy(saved.aggregated)

    def close(self) -> None:
        """End the stream, if there is one, and free its workers. The next executor starts from the last loaded
        state."""
        session, self._session = self._session, None
        if session is not None:
            session.feed.close()
            session.run.close(forget=False)


def _known(view: pb.SlotView) -> bool:
    return view.phase in (pb.READY, pb.FAILED)


def _all_known(run: Run) -> bool:
    return all(_known(view) for view in run.views)


def _abandon(run: Run, feed: Feed) -> None:
    """The loader is gone. May run in the garbage collector: the run's own thread does what takes time or locks."""
    run.abandoned = True
    feed.close()
