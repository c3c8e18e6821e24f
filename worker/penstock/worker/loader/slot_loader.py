"""A user's loader, made by input_fn for a slot.

All calls of the user's loader are in this module. Before a call, Penstock sets what user code may read: the assignment,
the random generators and torch's worker information. An exception of user code is raised as InputFnError with its
traceback.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from inspect import getattr_static
from typing import Any, Self

import torch.utils.data

from penstock.proto.batch.classes import MAX_NAME
from penstock.proto.errors import InputFnError, NotRestartableError, PenstockError, ReplayMismatchError
from penstock.proto.state import assignment as assignments
from penstock.proto.state.counts import Group, Tally
from penstock.proto.state.epoch_labels import label_of, labels_in
from penstock.proto.state.found_generators import plain_numbers
from penstock.proto.state.generators import derive_seed, seed_rng
from penstock.proto.state.restartable import (
    DataLoaderCheckpoint,
    by_own_methods,
    is_pure,
    is_vouched,
    state_methods,
    takes_strict,
    worker_state,
)
from penstock.proto.tracebacks import format_remote
from penstock.proto.v1 import coordinator_pb2, records_pb2
from penstock.runtime.process import forks
from penstock.runtime.telemetry.logs import plain
from penstock.worker.loader.restart_points import Launch, StreamHistory, StreamPosition
from penstock.worker.processes.control_channel import describe
from penstock.worker.processes.user_code import load_input_fn, unpacked
from penstock.worker.user_loader.changed_mixture import apply_changes, plan_change
from penstock.worker.user_loader.foreign_barriers import refuse_separate_barriers
from penstock.worker.user_loader.loader_generators import LoaderGenerators, parts_of, process_generators, set_epoch
from penstock.worker.user_loader.skip_batch import CannotSkipError, skip_batch
from penstock.worker.user_loader.synthetic import NOT_SAVED, FirstBatch
from penstock.worker.user_loader.worker_info import as_main_process, offer_worker_info, uncounted

__all__ = ["SlotLoader"]

MOST_SHOWN = 500
"""Largest number of characters of an exception's text that a loader's capabilities contain."""
MOST_NAMED = 8
"""Largest number of random generators that an error names."""


def _vouches(loader: Any) -> bool:
    """Return True if the loader, or its dataset, declares that each of its states is exact (`exact_states`)."""
    return any(getattr(holder, "exact_states", False) is True for holder in (loader, getattr(loader, "dataset", None)))


def _iterable(loader: Any) -> Any:
    """Return the user's iterable: the IterableDataset of a torch loader, or a loader that is no torch loader; None for
    a map-style dataset, and for what Penstock or torch has made."""
    held = getattr(loader, "dataset", None) if isinstance(loader, torch.utils.data.DataLoader) else loader
    if isinstance(loader, torch.utils.data.DataLoader) and not isinstance(held, torch.utils.data.IterableDataset):
        return None
    return None if type(held).__module__.partition(".")[0] in ("penstock", "torch") else held


def _keeps_place(loader: Any) -> bool:
    held = _iterable(loader)
    return state_methods(held) > 0 and not callable(getattr(held, "set_epoch", None))


def draws_nothing(loader: Any) -> bool:
    """Return True if a loader declares that its batches do not depend on the process's random generators. An attribute
    that a wrapper only forwards does not count, because the wrapper may draw."""
    return getattr_static(loader, "draws_nothing", False) is True


class SlotLoader:
    """Loader that input_fn made for one slot, and the position up to which the loader was read."""

    def __init__(
        self,
        assignment: records_pb2.WorkerAssignment,
        doing: Callable[[str], None] = lambda activity: None,
        skipped: Callable[[int, int], None] = lambda epoch, count: None,
        load: Callable[[records_pb2.LoaderSpec], Callable[..., Any]] = load_input_fn,
    ) -> None:
        """Store the settings, without calling user code.

        Args:
            assignment: the slot, and the loader to make for it.
            doing: called before user code is called, with one of the names in progress_page.ACTIVITIES.
            skipped: called before each batch if the slot has quarantined batches, with the epoch and the number of
                batches that were skipped right before that batch, often 0.
            load: imports and returns input_fn; its argument is the loader's part of the assignment.
        """
        self.assignment = assignment
        self.position = StreamPosition(0, 0, 0, 0)
        self.capabilities = records_pb2.LoaderCapabilities(length=-1)
        point, slot = assignment.start, assignment.slot
        began = point.slots[slot].total if len(point.slots) > slot else 0
        self.history = StreamHistory(Launch(point.step, began))
        self._doing = doing
        self._skipped = skipped
        self._load_fn = load
        self.labels = labels_in(point.labels)
        """Labels of epochs: what user code of a pure loader sees as their numbers."""
        self._skips = {(skip.epoch, skip.total): skip.count for skip in assignment.skips}
        self._loader: Any = None
        self._iterator: Iterator[Any] | None = None
        self._taken_for = slot
        """Worker number in the box (data-parallel rank) with which the present loader was made."""
        self._counts = False
        """True if the loader counts its samples, for example per source, in an attribute `tally`."""
        self._unused = False
        """True if the present loader has not begun to iterate."""
        self._loaded = False
        """True if the loader has loaded a state since input_fn made it."""
        self._generators: LoaderGenerators | None = None
        self._rng_before_call = b""
        self._strict = False
        self._fn: Callable[..., Any] | None = None

    @property
    def name(self) -> str:
        """Name of the loader in messages, such as "data:train (box 0, slot 1)": its input_fn, box and slot."""
        a = self.assignment
        return f"{a.loader.input_fn} (box {a.box}, slot {a.slot})"

    @property
    def worker(self) -> int:
        """Worker number within the box that user code sees when the loader is made."""
        worker = self.history.launch.worker
        return self.assignment.slot if worker is None else worker

    @property
    def saves_state(self) -> bool:
        """True if the loader's state_dict() can be called and used."""
        return self.capabilities.state_methods > 0 and not self.capabilities.not_restartable

    @property
    def by_own_methods(self) -> bool:
        """True if the loader has all four state methods, and its load_state_dict accepts only results of its
        deaggregate_state_dict."""
        return by_own_methods(self.capabilities)

    @property
    def is_vouched(self) -> bool:
        """True if any state that the loader returned is a restart point, because it vouches for its states."""
        return is_vouched(self.capabilities)

    @property
    def is_pure(self) -> bool:
        """True if each epoch of the loader is made by itself, as a function of its number (positioned_loader.py)."""
        return is_pure(self.capabilities)

    @property
    def is_iterable(self) -> bool:
        """True if the user's code gives samples or batches in an order of its own, and not by their numbers."""
        return self._loader is not None and _iterable(self._loader) is not None

    def numbers(self) -> dict[str, float]:
        """Return the numbers that dataset, samplers and collate_fn hold as attributes, by name."""
        own = int(isinstance(self._loader, torch.utils.data.DataLoader))  # what torch's loader counts is not the user's
        return plain_numbers(parts_of(self._loader)[own:])

    def another(self, assignment: records_pb2.WorkerAssignment) -> Self:
        """Return a new object of this class, for the loader of another assignment. Its input_fn is imported by the same
        function `load`."""
        return type(self)(assignment, load=self._load_fn)

    # ---- making it

    def build(self) -> None:
        """Make the loader: set the seeds and the assignment that user code reads, call input_fn, and check the result.
        Set `capabilities`."""
        a = self.assignment
        self._seed()
        self._introduce(a.start.step + 1)
        self._doing("input_fn")  # the import of its module runs user code too
        with self._user("the import of its module"):
            self._fn = self._load_fn(a.loader)
        self._call()
        loader, capabilities = self._loader, self.capabilities
        with self._user("reading the loader's methods"):
            refuse_separate_barriers(loader, self.name)
            capabilities.state_methods = state_methods(loader)
            capabilities.takes_strict = self._strict = takes_strict(loader)
            capabilities.is_iterator = hasattr(type(loader), "__next__")
            capabilities.loads_own_state = getattr(loader, "loads_own_state", False) is True
            capabilities.exact_states = capabilities.state_methods > 0 and _vouches(loader)
            name = f"{type(loader).__module__}:{type(loader).__qualname__}"
            if callable(getattr(loader, "advance_state", None)) and len(name) <= MAX_NAME:
                capabilities.advances_state = name
            capabilities.keeps_place = self.is_pure and self.is_iterable and _keeps_place(loader)
            capabilities.own_workers = int(getattr(loader, "num_workers", 0) or 0)
            try:
                capabilities.length = len(loader)
            except Exception as error:
                capabilities.length = -1
                if hasattr(type(loader), "__len__"):
                    capabilities.no_length = plain(describe(error), MOST_SHOWN)
        if a.loader.options.synthetic:
            capabilities.not_restartable = NOT_SAVED
        if self.by_own_methods and self.history.launch.worker is None:
            self.history = self.history.of(replace(self.history.launch, worker=a.slot))

    def _introduce(self, step: int) -> None:
        """Set the assignment that user code reads, for a launch that begins with training step `step` of the box."""
        a, worker = self.assignment, self.worker
        self._taken_for = worker
        offer_worker_info(a)
        assignments.set_assignment(
            assignments.Assignment(a.box, a.num_boxes, worker, a.num_workers_per_box, a.seed, step)
        )

    def _seed(self) -> None:
        """Seed the random generators before input_fn is called. All launches and runners of the slot use the same seed,
        so that input_fn makes the same loader, for example the same random_split."""
        a = self.assignment
        seed_rng(derive_seed(a.seed, "slot", a.box, a.slot))

    @property
    def _moved(self) -> bool:
        """True if this launch resumed after a step on another number of boxes or workers. What is drawn in its epoch
        must not be drawn again as the saved run drew it."""
        a = self.assignment
        return bool(a.resume.blob) and not (a.resume.same_topology or a.resume.anew) and a.start.step > 0

    def _call(self) -> None:
        assert self._fn is not None
        with self._user("unpacking its arguments"):
            fn, args, kwargs = unpacked(self._fn, self.assignment.loader)
        self._rng_before_call = process_generators()
        self._loader = self._generators = (
            None  # the old loader may hold an exclusive resource, such as an open database
        )
        with self._user("input_fn", activity="input_fn"):
            loader = fn(*args, **kwargs)
        if loader is None or not (hasattr(type(loader), "__iter__") or hasattr(type(loader), "__getitem__")):
            what = "None" if loader is None else f"a {type(loader).__qualname__}, which is not iterable"
            raise InputFnError(
                f"{self.name} returned {what}. It must return a torch DataLoader or another iterable of batches"
            )
        if self._moved:
            a = self.assignment
            seed_rng(derive_seed(a.seed, "slot", a.box, a.slot, a.start.step))
        with self._user("change_mixture()"):
            apply_changes(loader, self.assignment)
        self._counts = isinstance(getattr(loader, "tally", None), Tally)
        self._loader = FirstBatch(loader) if self.assignment.loader.options.synthetic else loader
        self._unused, self._loaded = True, False
        self._generators = LoaderGenerators(loader, self._fn)

    def _make_again(self, step: int) -> None:
        self._introduce(step)
        self._seed()
        self._call()

    def _begin_epoch(self, epoch: int) -> None:
        """Set all that an epoch of a pure loader depends on, before `iter()`: the random generators, and the epoch's
        label, for set_epoch() and current_assignment().epoch."""
        a = self.assignment
        assert self._generators is not None
        label = label_of(self.labels, epoch)
        assignments.set_epoch(label)
        moved = self._moved and epoch == a.start.epoch
        self._generators.begin(a.seed, a.box, a.slot, label, *([a.start.step] if moved else []))
        with self._user("set_epoch()"):
            set_epoch(self._loader, label)

    # ---- batches

    def changed_counts(self) -> bytes:
        """Return the counts of samples (for example per source) that have changed since the last call of this method,
        encoded as in a BATCH frame; b"" if the loader does not count its samples."""
        tally = self._tally
        return b"" if tally is None else tally.take()

    @property
    def key_field(self) -> str | None:
        """Name of the field of a batch that holds its restore keys (they say where each sample can be read again), from
        the loader's attribute `key_field`; None if the loader has no such attribute."""
        name = getattr(self._loader, "key_field", None)
        return name if isinstance(name, str) else None

    def last_batch(self) -> tuple[list[range] | None, Mapping[Group, Sequence[int]] | None]:
        """Return two facts about the batch that the loader yielded last. The first is the sample numbers of the global
        batch (the batches of all boxes together), in the form that the loader's method `skip` accepts. The second is
        the counts of its samples. Each is None if the loader does not know it."""
        numbers, tally = getattr(self._loader, "last_samples", None), self._tally
        with self._user("last_samples()"):
            return (numbers() if callable(numbers) else None), (None if tally is None else tally.last)

    @property
    def _tally(self) -> Tally | None:
        """Object in which the loader counts its samples: the attribute `tally` of the loaders of penstock.data and of
        wrappers that forward it; None if the loader has no such attribute."""
        if not self._counts:
            return None
        tally = self._loader.tally
        return tally if isinstance(tally, Tally) else None

    def _iterate(self) -> None:
        self._unused = False
        with self._user("iter()", activity="iter"):
            self._iterator = iter(self._loader)

    def _fetch(self) -> Any:
        assert self._iterator is not None
        try:
            if self._skips:
                self._skip_quarantined()
            return next(self._iterator)
        finally:
            if forks.strayed:
                forks.leave()

    def _skip_quarantined(self) -> None:
        """Skip the batches at the present position that are quarantined: batches that killed their runner several
        times."""
        position = self.position
        count = self._skips.get((position.epoch, position.total), 0)
        try:
            for _ in range(count):
                skip_batch(self._loader, self._iterator)
        except CannotSkipError as why:
            raise InputFnError(
                f"{self.name}: batch {position.total + 1} killed its runner process each time, and cannot be skipped, "
                f'as poison="skip" requires: {why}. Correct the sample or the code that kills the process'
            ) from None
        self._skipped(position.epoch, count)

    # ---- states

    def state(self, step: int) -> tuple[Any, bool]:
        """Return the loader's state_dict(), and True if state_dict() called get_worker_state().

        step: training step of the box (data-parallel rank) that `get_worker_state()` reports to state_dict().
        """
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

    def resume_by_own_methods(self, aggregated: Any, strict: bool) -> None:
        """Load the loader's part of an aggregated state by its deaggregate_state_dict and load_state_dict. The caller
        must open the epoch afterwards."""
        self._load(self.deaggregate(aggregated, strict), strict)

    def deaggregate(self, aggregated: Any, strict: bool) -> Any:
        """Return the loader's part of an aggregated state, made by its deaggregate_state_dict."""
        arguments = {"strict": strict} if self._strict else {}
        with self._user("deaggregate_state_dict()", activity="load_state_dict"), uncounted():
            return self._loader.deaggregate_state_dict(aggregated, **arguments)

    def aggregate(self, states: list[Any]) -> Any:
        """Return one state made of all workers' states by the loader's aggregate_state_dict. `states` is in order of
        global_worker_id."""
        with self._user("aggregate_state_dict()"), uncounted():
            return self._loader.aggregate_state_dict(states)

    def plan_change(self, trial: coordinator_pb2.MixtureTrial, resume: Mapping[str, Any] | None) -> bytes:
        """Try a change of the weights of the data sources that this loader mixes, and return the result as bytes; see
        changed_mixture.py. The loader must not be used for anything else afterwards."""
        with self._user("plan_change()"):
            return plan_change(self._loader, trial, resume)

    def _load(self, state: Any, strict: bool) -> None:
        arguments = {"strict": strict} if self._strict else {}
        with self._user("load_state_dict()", activity="load_state_dict"):
            as_main_process(lambda: self._loader.load_state_dict(state, **arguments))
        self._loaded = True

    # ---- randomness

    @property
    def seeds(self) -> tuple[int, ...]:
        """Hashes of the states in which input_fn left the generators that the loader holds."""
        return () if self._generators is None else self._generators.seeds

    def require_seeds(self, seeds: tuple[int, ...]) -> None:
        """Raise ReplayMismatchError if input_fn has left the generators that the loader holds in other states than when
        their hashes were these; none = any."""
        others = self._generators.others_than(seeds) if seeds and self._generators is not None else []
        if others:
            raise ReplayMismatchError(
                f"{self.name}: input_fn has left {', '.join(others[:MOST_NAMED])} in another state than when it was "
                "called before, so the stream would be another one. Seed each random generator from a constant, such "
                "as np.random.default_rng(0), and not from the clock or the system's entropy. One that draws for no "
                "batch, such as the jitter of a client's retries, may be a random.SystemRandom()"
            )

    def rng(self) -> bytes:
        """Return the states of the process's random generators, and of the generators given to the loader
        and its modules; b"" for a loader of penstock.data whose batches depend on none of them."""
        assert self._generators is not None
        return b"" if draws_nothing(self._loader) else self._generators.capture()

    def _restore_rng(self, data: bytes) -> None:
        """Set the random generators to the states `data`. Without states, seed them by the loader's position: whatever
        draws from them draws the same after each restore there."""
        assert self._generators is not None
        if data:
            self._generators.restore(data)
            return
        a, position = self.assignment, self.position
        seed_rng(derive_seed(a.seed, "slot", a.box, a.slot, "restored", position.epoch, position.total))

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
        """Return the error to raise for an exception of user code: a PenstockError unchanged, any other exception as
        InputFnError.

        what: name of the call that raised the exception, for the message.
        """
        if isinstance(error, PenstockError):
            return error
        return InputFnError(f"{self.name}: {what} raised {describe(error)}", remote_traceback=format_remote(error))

    @property
    def suspects(self) -> str:
        """Part of a sentence about a loader that makes other batches than before: its class, that of its dataset, and
        the random generators that they hold."""
        loader, generators = self._loader, self._generators
        dataset = getattr(loader, "dataset", None)
        over = "" if dataset is None else f" over {type(dataset).__qualname__}"
        names = ", ".join(generators.names[:MOST_NAMED]) if generators is not None else ""
        holds = f"which holds the random generators {names}" if names else "in which no random generator was found"
        return f"{type(loader).__qualname__}{over}, {holds}"

    def require_state(self) -> None:
        """Raise NotRestartableError, with the reason, if the loader cannot be saved."""
        if self.capabilities.not_restartable:
            raise NotRestartableError(f"{self.name} cannot be saved: {self.capabilities.not_restartable}")
