"""The loader that a training script holds: a description until it is iterated, then a stream with a position.

    DataLoader ── opens ──> Session: a run at an Appliance, and the reader of its batches

A loader is in one of three conditions: never read (its state is that of a local instance), loaded and not started (its
state is the loaded one), or streaming (its state at the last step is fetched from the workers). A stream ends with its
appliance, with an error, or with `load_state_dict`. Only the last starts another one: a position is never lost
silently.
"""

from __future__ import annotations

import copy
import itertools
import logging
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

from penstock.client.api.appliance import Appliance, current_appliance, current_settings
from penstock.client.api.appliance_settings import ApplianceSettings
from penstock.client.api.session import Session
from penstock.client.states.batch_sizes import batch_size_of
from penstock.client.states.code_reference import ship
from penstock.client.states.local_loader import LocalLoader, check_strict
from penstock.client.states.run_opening import Opening
from penstock.client.states.saved_state import KEY, BoxStart, SavedState, blank, is_to_be_filled, read
from penstock.client.states.state_records import checkpoints_of, saved_of
from penstock.client.stream.stream_interfaces import Reader, StreamRun
from penstock.proto.batch.digest import DigestCover
from penstock.proto.errors import (
    DeadlineError,
    NotRestartableError,
    PenstockError,
    StateMismatchError,
    StateUnavailableError,
)
from penstock.proto.rpc.calls import FetchedState
from penstock.proto.state.assignment import Assignment
from penstock.proto.state.codec import decode_state, encode_state
from penstock.proto.state.position import Position
from penstock.proto.state.restartable import DataLoaderCheckpoint
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import records_pb2

__all__ = ["DataLoader"]

_ids = itertools.count(1)
_log = logging.getLogger("penstock.client")


class DataLoader:
    """Data loader whose batches are made on the workers, by the loader that `input_fn(*args, **kwargs)` returns there.

    Example::

        def make_loader(path, batch_size):
            return torch.utils.data.DataLoader(MyDataset(path), batch_size=batch_size)

        loader = DataLoader(make_loader, "/data/train", 32)
        for batch in loader:                     # one epoch
            ...
        torch.save(loader.state_dict(), "loader.pt")

    Batches have the structure, shapes and dtypes that input_fn's loader yields: nested dicts, lists, tuples and
    dataclasses of tensors, arrays and plain values.

    Args:
        input_fn: a callable that returns a torch DataLoader or an iterable of nested tensors: a function or class at
            the top level of a module that workers can import. In embedded mode, where workers are children of this
            process, any callable works: a function of the main script, a lambda, a partial, a method.
        args, kwargs: arguments of input_fn on every worker: plain values, tensors and arrays; in embedded mode also
            objects that can be pickled, and functions of any kind. They are copied at once.

    Raises:
        TypeError: input_fn is not callable; or it is a class (or is annotated to return one) that takes `strict` in
            only one of load_state_dict and deaggregate_state_dict.
        InvalidArgumentError, UnsupportedStateError: input_fn or an argument has neither a name to import nor a value
            to send. What can be sent only by value is refused when a run is opened on an appliance that is not
            embedded.
    """

    def __init__(self, input_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        args, kwargs = copy.deepcopy(args), copy.deepcopy(kwargs)
        self._reference, self._arguments = ship(input_fn, args, kwargs)
        self.name = self._reference.name
        """Name of input_fn, "module:qualname"."""
        self.id = next(_ids)
        """Number of the loader in this process, from 1."""
        check_strict(input_fn)
        self._local = LocalLoader(self.name, input_fn, args, kwargs)
        self._session: Session | None = None
        self._executor: weakref.ref[Any] | None = None
        self._openings = 0
        self._loaded: SavedState | None = None
        self._given: Any = None
        self._strict = True
        self._cached: tuple[int, Any] | None = None
        self._expected: ApplianceSettings | None = None
        """Settings of the appliance that an executor was made for."""
        self._leaves_epoch = False
        """True: the epoch of the loaded state is not resumed; the next executor begins the epoch after it."""
        self._drawn: int | None = None
        """Seed drawn for a state that was requested before the run was open; the run gets the same."""

    # ---- description

    @property
    def input_fn(self) -> Callable[..., Any]:
        """Function that makes the loader on each worker."""
        return self._local.input_fn

    @property
    def input_fn_params(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Copy of (args, kwargs), the arguments of input_fn."""
        return copy.deepcopy(self._local.arguments)

    @property
    def dataloader(self) -> Any:
        """Loader that input_fn makes in this process: worker 0 of 1, without worker processes of its own.

        It is built at the first access and kept. Its batches are not part of the run's stream. Raises InputFnError if
        input_fn fails here, for example because its data are missing.
        """
        return self._local.instance("DataLoader.dataloader")

    @property
    def batch_size(self) -> int | None:
        """Rows of the last delivered batch: the first dimension of its tensors. None before the first batch, and if
        its tensors differ in it."""
        layout = self._session.reader.layout if self._session is not None else None
        return None if layout is None else batch_size_of(*layout)

    def config(self) -> dict[str, Any]:
        """Return what decides which samples come in which order: {"input_fn": name, "loader": the result of the
        loader's own config(), or None}. Loaders with equal configs accept each other's states."""
        return self._local.config(self._seed_of_keys)

    def can_restore_sample(self) -> bool:
        """Return whether restore_sample() works: the loader has that method, and does not report that it cannot."""
        return self._local.can_restore_sample(self._seed_of_keys)

    def restore_sample(self, key: Any) -> Any:
        """Return the sample that a restore key names, read again in this process; the stream's position stays.

        The seed is that of the run, of the loaded state, or of Appliance(seed=). A key of another seed is refused.

        Raises NotRestartableError for a loader without restore_sample, InputFnError if input_fn fails here, and any
        error of the loader's own method.
        """
        return self._local.restore_sample(self._seed_of_keys, key)

    @property
    def _seed_of_keys(self) -> int:
        loaded = self._loaded.seed if self._loaded is not None else None
        given = [
            self._session.run.seed if self._session is not None else None,
            loaded,
            self._settings.seed,
            self._drawn,
        ]
        return next((seed for seed in given if seed is not None), 0)

    # ---- for executors

    @property
    def step(self) -> int:
        """Last delivered step, counted over the whole life of the run; before the first, the loaded state's step."""
        if self._session is not None:
            return self._session.reader.position.step
        return self._loaded.step if self._loaded is not None else 0

    def begin(self, executor: Any, appliance: Appliance | None) -> Session:
        """Return the stream for an executor that starts to iterate; open it if necessary."""
        if self._iterating:
            raise RuntimeError(
                f"{self.name}: another executor is iterating this loader; finish or close() its iterator first, or "
                "make a second DataLoader for a second stream"
            )
        session = self._session
        if session is None:
            session = self._open(appliance if appliance is not None else current_appliance(self))
            if self._leaves_epoch:
                self._capabilities(session)  # where the epoch ends
                session.cut_due = session.expected_last() != session.reader.position.step
        elif session.run.error is not None:
            raise session.run.error
        elif session.run.closed:
            raise RuntimeError(
                f"{self.name}: its stream ended at step {self.step} with its appliance. To continue from there, "
                "load_state_dict a state; to start anew, make a new DataLoader"
            )
        elif appliance is not None and appliance is not session.appliance:
            raise RuntimeError(
                f"{self.name} streams from {session.appliance!r} and cannot also be iterated on {appliance!r}: "
                "load_state_dict its state to move it, or make a second DataLoader"
            )
        self._executor = weakref.ref(executor)
        session.reader.thread = threading.get_ident()
        try:
            if session.cut_due:
                session.abandon_epoch()
            session.run.progress.epoch_ended = False
        except BaseException:
            self._executor = None
            raise
        return session

    def finish(self, executor: Any, *, left_early: bool, epoch_ended: bool) -> None:
        """Release the loader after an executor's loop has ended, in any way."""
        self._executor = None
        session = self._session
        if session is None or session.run.closed:
            return
        session.cut_due = left_early
        session.reader.flush()
        if epoch_ended:
            session.run.progress.epoch_ended = True
            if session.appliance.settings.num_boxes > 1:
                session.run.report()  # boxes that continue will wait for this one in their next collective

    @property
    def mid_epoch(self) -> bool:
        """True if the epoch has, or may have, batches after the last step."""
        session = self._session
        if session is None or not any(session.reader.position.delivered):
            return False
        return session.expected_last() != session.reader.position.step

    def __getstate__(self) -> dict[str, Any]:
        if self._session is not None:
            raise TypeError(
                f"{self.name}: a loader that streams cannot be copied or pickled; save its state_dict(), and load that "
                "into a DataLoader of the same input_fn"
            )
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, id=next(_ids))

    def leave_epoch(self) -> None:
        """Abandon the epoch of a loaded state: the next executor begins the next epoch, as after a `break`."""
        if self._loaded is not None and self._loaded.methods != 4:
            raise StateMismatchError(
                f"the loaded state of {self.name} was saved after the loop had left its epoch by `break`. A loader "
                "without aggregate_state_dict and deaggregate_state_dict cannot start the next epoch from it: load a "
                "state that was saved inside the loop, or let each epoch run to its end"
            )
        self._leaves_epoch = True

    @property
    def place(self) -> tuple[int, int]:
        """(box, num_boxes) of this process in the loader's run; before the run is open, those of current settings."""
        settings = self._settings
        return settings.box, settings.num_boxes

    def expect(self, appliance: Appliance) -> None:
        """Record the appliance that an executor will use: until it begins, its settings give boxes and workers."""
        self._expected = appliance.settings

    @property
    def _settings(self) -> ApplianceSettings:
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
        cover = DigestCover.SAMPLE if settings.digest is None else DigestCover[settings.digest.upper()]
        if self._drawn is not None and seed is not None and seed != self._drawn:
            raise StateMismatchError(
                f"a state of {self.name} was taken before its first loop, with the random seed {self._drawn}, but "
                f"Appliance(seed={seed}) sets another: take the state once the loop has begun, or inside `with "
                "Appliance(...)`"
            )
        start = self._start_of(settings, settings.box)
        if saved is None:
            seed = self._drawn if seed is None else seed
        elif settings.synthetic:
            raise NotRestartableError(
                f"a state of {self.name} was loaded, but Appliance(synthetic=True) repeats the first batch of each "
                "worker and cannot resume: load no state, or leave out synthetic= and PENSTOCK_SYNTHETIC"
            )
        else:
            if saved.methods == 0 and saved.positions and not settings.replay:
                raise NotRestartableError(
                    f"the loaded state of {self.name} was saved with replay=True, and can only be restored by replay: "
                    "pass Appliance(replay=True)"
                )
            if seed is None and saved.seed is None and not saved.by_hand:
                raise StateMismatchError(
                    f"the loaded state of {self.name} has no seed: an older Penstock took it before the first loop. "
                    "Pass Appliance(seed=...), or start without the state"
                )
            if seed is not None and saved.seed is not None and seed != saved.seed:
                raise StateMismatchError(
                    f"the loaded state of {self.name} was saved with seed {saved.seed}, but Appliance(seed={seed}) "
                    "sets another: leave out seed, or start without a state"
                )
            seed = saved.seed if seed is None else seed
            if saved.positions and settings.digest is not None and cover != saved.cover:
                had = saved.cover.name.lower()
                raise StateMismatchError(
                    f"the loaded state of {self.name} was saved with digest={had!r}, but Appliance(digest="
                    f"{settings.digest!r}) sets another: leave out digest, or start without a state"
                )
            cover = saved.cover if saved.positions else cover
        start_of = partial(_on, cover, partial(self._start_of, settings))
        start = start_of(settings.box)
        # Each opening in one launch has its own key: else a loader that starts over would join the run it just left.
        key = f"#{self._openings}" if self._openings else ""
        opening = Opening(self._reference, self._arguments, self._local.maker, start, start_of, seed, key, cover)
        run, reader = appliance.open_stream(self, opening)
        self._openings += 1
        position = reader.position
        self._session = session = Session(
            appliance,
            run,
            reader,
            self.name,
            first_step=position.step,
            epoch_began_at=position.step - sum(position.delivered),
            whole_epoch=start.same_topology or position.step == 0,
        )
        if self._leaves_epoch and not start.same_topology:
            self.close()
            raise StateMismatchError(
                f"the loaded state of {self.name} was saved after the loop had left its epoch by `break`. It can be "
                "resumed only with the same number of boxes and workers: use those, or a state that was saved inside "
                "the loop"
            )
        weakref.finalize(self, _abandon, run, reader).atexit = False
        return session

    def _start_of(self, settings: ApplianceSettings, box: int) -> BoxStart:
        saved = self._loaded
        if saved is None:
            return BoxStart(Position.start(settings.num_workers_per_box).to_proto(), b"", False)
        return saved.start(box, settings.num_boxes, settings.num_workers_per_box, strict=self._strict)

    # ---- the iterator protocol and len

    def __iter__(self) -> Iterator[Any]:
        """Iterate `DataExecutor(self)`: one epoch, or the rest of it."""
        from penstock.client.api.data_executor import DataExecutor  # here: that module imports this one

        return iter(DataExecutor(self))

    def __len__(self) -> int:
        """Return the batches of an epoch of this box: the sum of its workers' len(). TypeError if one has no len()."""
        session = self._session
        if session is not None and not session.run.closed and session.run.error is None:
            lengths = [capabilities.length for capabilities in self._capabilities(session)]
            if min(lengths) < 0:
                raise TypeError(f"the loader that {self.name} returned has no len()")
            return sum(lengths)
        settings = self._settings
        seed = settings.seed if settings.seed is not None else 0
        assignments = [
            Assignment(settings.box, settings.num_boxes, slot, settings.num_workers_per_box, seed, self.step + 1)
            for slot in range(settings.num_workers_per_box)
        ]
        return self._local.length(assignments)

    def _capabilities(self, session: Session) -> list[records_pb2.LoaderCapabilities]:
        """Wait for the workers' reports about their loaders, and return them."""
        run = session.run
        if not run.wait_for(_all_known, session.appliance.settings.timeout_s):
            late = [view for view in run.views if not _known(view)]
            raise DeadlineError(
                f"{self.name}: waited timeout_s={session.appliance.settings.timeout_s:g} s for slot {late[0].slot} of "
                f"box {run.box} (on worker {late[0].worker or 'none'}) to build its loader: `penstock status` shows "
                "what it waits for; raise timeout_s if input_fn needs longer"
            )
        for view in run.views:
            if view.phase == pb.FAILED and not view.HasField("capabilities"):
                session.reader.raise_failed(view)
        return [view.capabilities for view in run.views]

    # ---- state

    @property
    def is_restartable(self) -> bool:
        """True if state_dict() works: by the loader's own methods, or by replay with Appliance(replay=True)."""
        session = self._session
        if session is None or session.run.closed or session.run.error is not None:
            replay = (session.appliance.settings if session is not None else current_settings()).replay
            return replay or self._local.methods("is_restartable") > 0
        capabilities = self._capabilities(session)[0]
        if capabilities.not_restartable:
            return False
        return capabilities.state_methods > 0 or session.appliance.settings.replay

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all boxes after the last delivered step; the same value on every box.

        Example::

            torch.save({"model": model.state_dict(), "loader": loader.state_dict()}, path)
            ...
            loader.load_state_dict(torch.load(path)["loader"])

        Before the first step it is the loaded state, or the state of a loader that is built in this process. It may be
        called in the loop, between executors and after the last; the result depends only on the step.
        (torch.distributed.checkpoint.load, which requests a state to load into, gets one to be filled.)

        Raises:
            NotRestartableError: the loader has no state methods, or cannot be saved for another reason.
            StateUnavailableError: the workers no longer keep this step, or the run is closed.
        """
        return self.state_at(self.step)

    def state_at(self, step: int) -> dict[str, Any]:
        """Return what state_dict() returned after this step, at most Appliance(retention_steps=) steps ago.

        It is for loops whose batches come through a wrapper that reads ahead: see penstock.client.Lookahead.

        Raises:
            StateUnavailableError: the step lies before the loaded state, is not delivered yet, or is no longer kept by
                the workers; or the run is closed.
            NotRestartableError: as for state_dict().
            TypeError: step is not an int.
        """
        if isinstance(step, bool) or not isinstance(step, int):
            raise TypeError(f"{self.name}: step of state_at(step) must be an int, got {step!r}")
        if is_to_be_filled():
            return blank()
        session = self._session
        first = session.first_step if session is not None else self.step
        if not first <= step <= self.step:
            raise StateUnavailableError(
                f"{self.name}: step must be from {first} to {self.step}, got {step}: states exist for the steps "
                "delivered since the loader was made or loaded"
            )
        if session is None or step == first:
            if self._loaded is not None:
                return cast(dict[str, Any], copy.deepcopy(self._given))
            return self._initial()
        if self._cached is None or self._cached[0] != step:
            self._cached = (step, self._saved(session, step).to_dict())
        return cast(dict[str, Any], copy.deepcopy(self._cached[1]))

    def _initial(self) -> dict[str, Any]:
        session = self._session
        settings = self._settings
        methods = self._local.methods("the state before the first step")
        self._require_methods(methods, settings.replay)
        seed = session.run.seed if session is not None else self._seed_to_come(settings)
        saved = SavedState(0, self.name, methods, 0, 0, seed)
        if methods == 4:
            saved.aggregated = self._local.initial_state(seed)
        return saved.to_dict()

    def _seed_to_come(self, settings: ApplianceSettings) -> int:
        """Return the seed that the run will have. If none is given it is drawn here: else the state would fit any
        order."""
        if settings.seed is not None:
            return settings.seed
        if settings.num_boxes > 1:
            raise StateUnavailableError(
                f"{self.name}: no state is available before the first loop, because the random seed that all boxes "
                "share is not chosen yet. Pass Appliance(seed=...), or take the state once the loop has begun"
            )
        if self._drawn is None:
            self._drawn = secrets.randbits(63)
        return self._drawn

    def _require_methods(self, methods: int, replay: bool) -> None:
        if methods == 0 and not replay:
            raise NotRestartableError(
                f"the loader that {self.name} returned cannot be saved: it has no state_dict and load_state_dict. "
                "Give it these two, use torchdata's StatefulDataLoader or a source of penstock.data, or pass "
                "Appliance(replay=True)"
            )

    def checkpoints(self, step: int | None = None) -> list[DataLoaderCheckpoint]:
        """Return each worker's record of the state after a step, of all boxes, in order of global_worker_id.

        The counts are those of this launch, as get_worker_state() gave them; `lifetime_*` count all launches. For a
        loader with the four methods, `user_state_dict` is the result of its state_dict() on that worker at that step:
        the input of aggregate_state_dict. For another loader it is the state at the restart point of the worker, which
        may lie before the step; None if it has no state methods.

        Args:
            step: as for state_at(); None: the last delivered step.

        Raises the errors of state_at(), and StateUnavailableError before the first step.
        """
        session, step = self._session, self.step if step is None else step
        if session is None or not session.first_step < step <= self.step:
            first = session.first_step + 1 if session is not None else self.step + 1
            steps = f"steps {first} to {self.step} have" if first <= self.step else "no step has"
            raise StateUnavailableError(
                f"{self.name}: step {step} has no records: {steps} been delivered since the loader was made or its "
                "state loaded"
            )
        fetched, _ = self._fetch(session, step)
        return checkpoints_of(fetched, self._loaded, step)

    def _fetch(self, session: Session, step: int) -> tuple[FetchedState, int]:
        """Return all workers' records at a step, and the number of state methods of their loader."""
        settings, run = session.appliance.settings, session.run
        if run.error is not None:
            raise run.error
        if run.closed:
            raise StateUnavailableError(
                f"{self.name}: the state of step {step} is not available, because the appliance is closed: call "
                "state_dict() before that"
            )
        capabilities = self._capabilities(session)[0]
        if capabilities.not_restartable:
            raise NotRestartableError(f"{self.name} cannot be saved: {capabilities.not_restartable}")
        self._require_methods(capabilities.state_methods, settings.replay)
        if threading.get_ident() == session.reader.thread:
            session.reader.flush()
        return run.fetch_state(step, settings.timeout_s), capabilities.state_methods

    def _saved(self, session: Session, step: int) -> SavedState:
        fetched, methods = self._fetch(session, step)
        run = session.run
        saved, users = saved_of(fetched, step, self.name, methods, run.seed, full_digest=run.cover == DigestCover.FULL)
        if methods == 4 and self._local.can_be_built:
            saved.aggregated = self._local.aggregate(users)
        elif methods == 4:
            timeout_s = session.appliance.settings.timeout_s
            saved.aggregated = decode_state(run.aggregate(encode_state(users), timeout_s))
        return saved

    def load_state_dict(self, sd: dict[str, Any], strict: bool = True) -> None:
        """Resume from a state of this loader with the next executor.

        Args:
            sd: result of state_dict(), from this process or another. A loader with the four methods also accepts a
                dict that its deaggregate_state_dict understands: made by hand, or by another system with the same
                protocol. Steps then count from 0, and the run has a new seed.
            strict: passed on to those of the loader's own methods that take it.

        Raises:
            StateMismatchError: sd is the state of another loader, or not a state.
            UnsupportedStateError: sd was made by hand and holds values that a state cannot hold.
            StateCorruptError, StateVersionError: sd is damaged, or newer than this Penstock.
            RuntimeError: an executor is iterating.
            TypeError: only one of the loader's two methods takes `strict`.
        """
        if self._iterating:
            raise RuntimeError(
                f"{self.name}: load_state_dict was called while an executor iterates: leave its loop first, or close() "
                "its iterator"
            )
        saved = self._made_by_hand(sd) or read(sd)
        if not self._reference.same_as(saved.input_fn):
            raise StateMismatchError(
                f"the state was saved by the loader {saved.input_fn}, but loaded into the loader {self.name}: load "
                "each state into the loader that saved it"
            )
        if saved.methods == 4:
            try:
                self._local.check_strict("load_state_dict")
            except PenstockError:
                pass  # it cannot be built here; the workers check the same
        given = copy.deepcopy(sd)
        self.close()
        self._leaves_epoch, self._drawn = False, None
        self._loaded, self._given, self._strict, self._cached = replace(saved), given, strict, None
        if saved.methods == 4:
            self._loaded.aggregated = copy.deepcopy(saved.aggregated)

    def _made_by_hand(self, sd: object) -> SavedState | None:
        """Return a state without a record of Penstock, for a loader whose own methods can read it; else None."""
        if not isinstance(sd, Mapping) or KEY in sd:
            return None
        if self._local.can_be_built and self._local.methods("load_state_dict") != 4:
            return None
        encode_state(dict(sd))
        _log.warning(
            "%s: the loaded state was not made by DataLoader.state_dict(), so the loader's deaggregate_state_dict "
            "alone decides where the stream resumes; steps count from 0, and the seed is new unless Appliance(seed=) "
            "gives it",
            self.name,
        )
        return SavedState(0, self.name, 4, 0, 0, None, aggregated=dict(sd), by_hand=True)

    def close(self) -> None:
        """End the stream, if there is one, and free its workers; the next executor starts from the loaded state."""
        session, self._session = self._session, None
        if session is not None:
            session.reader.close()
            session.run.close(forget=False)


def _on(cover: DigestCover, start_of: Callable[[int], BoxStart], box: int) -> BoxStart:
    """Return where a box starts, with digests of this cover."""
    start = start_of(box)
    start.position.by_rows = cover == DigestCover.ROWS
    return start


def _known(view: pb.SlotView) -> bool:
    return view.phase in (pb.READY, pb.FAILED)


def _all_known(run: StreamRun) -> bool:
    return all(_known(view) for view in run.views)


def _abandon(run: StreamRun, reader: Reader) -> None:
    """End the stream of a loader that was collected. It may run in the garbage collector, so the run's own thread does
    what takes time or locks."""
    run.abandoned = True
    reader.close()
