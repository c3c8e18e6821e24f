"""A user's loader in its slot: making, reading, saving and restoring it. All calls of the user's loader are here.

    pure           An epoch is a function of (code, arguments, data, seed, topology, number of the epoch). Each epoch is
                   made by a loader that has made no other, so nothing that one epoch leaves behind reaches the next.
    vouched        `exact_states = True`: one object, kept over epochs. Any of its states is a restart point.
    four methods   The protocol of Cerebras: one object for a launch. It is restored only by its
                   deaggregate_state_dict, so it starts from the beginning, or from the state of the launch.

A pure loader begins an epoch so: seed the generators (loader_generators.py), set_epoch(e) where there is one, `iter`. A
snapshot is `state_dict()` and all generators after a batch, encoded before the next `next()`. To restore it: begin the
epoch without `iter`, load the state, `iter`, set the generators: set at any other moment they give other batches. No
state is taken after StopIteration. The others are opened by `iter()` alone (RNG: the states of all random generators):

    open an epoch         take RNG R0, `iter(loader)`, take `state_dict()`, take RNG R1           -> an epoch start
    from an epoch start   load its state, set R0, `iter`, set R1, then replay n batches

Runners and helper processes run the same code. A pure loader that makes a second epoch in one process (a helper, or the
training process) is made again by input_fn first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from inspect import getattr_static
from typing import Any, Self

import torch.utils.data

from penstock.proto.batch.classes import MAX_NAME
from penstock.proto.batch.digest import cover_of
from penstock.proto.batch.replay_digest import ReplayDigest
from penstock.proto.errors import (
    InputFnError,
    InvalidArgumentError,
    NotRestartableError,
    PenstockError,
    ReplayMismatchError,
    StateMismatchError,
)
from penstock.proto.state import assignment as assignments
from penstock.proto.state.counts import Group, Tally
from penstock.proto.state.epoch_labels import label_of, labels_in
from penstock.proto.state.found_generators import plain_numbers
from penstock.proto.state.generators import derive_seed, seed_rng
from penstock.proto.state.loader_names import name_of
from penstock.proto.state.position import linked
from penstock.proto.state.restartable import (
    DataLoaderCheckpoint,
    by_own_methods,
    is_pure,
    is_vouched,
    state_methods,
    takes,
    takes_strict,
    worker_state,
)
from penstock.proto.tracebacks import format_remote
from penstock.proto.v1 import coordinator_pb2, records_pb2
from penstock.runtime.process import forks
from penstock.runtime.telemetry.logs import plain
from penstock.worker.loader.changed_mixture import apply_changes, plan_change
from penstock.worker.loader.loader_generators import LoaderGenerators, parts_of, process_generators, set_epoch
from penstock.worker.loader.restart_points import END, Launch, RestartPoint, StreamHistory, StreamPosition
from penstock.worker.loader.user_loaders import (
    NOT_SAVED,
    CannotSkipError,
    FirstBatch,
    refuse_separate_barriers,
    skip_batch,
)
from penstock.worker.loader.worker_info import as_main_process, offer_worker_info, uncounted
from penstock.worker.processes.control_channel import describe
from penstock.worker.processes.user_code import load_input_fn, unpacked

_log = logging.getLogger("penstock.worker")

CHANGED = "The data or the code has changed, or the loader is not deterministic: run penstock doctor"
MOST_SHOWN = 500
MOST_NAMED = 8
_SET = "set before each sample and batch, from the seed and its position"
_OF_EPOCH = "in the first epoch as input_fn left them, in later ones seeded by that and the epoch"
_LEFT = "left to the loader, and saved with its state"
_LATER = "made at their first use, so seeded by user code alone"


def part_of(a: records_pb2.WorkerAssignment, resume: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the slot's own part of a state of the same topology."""
    return resume["slots"].get(a.slot) if resume is not None and a.resume.same_topology else None


def _vouches(loader: Any) -> bool:
    return any(getattr(holder, "exact_states", False) is True for holder in (loader, getattr(loader, "dataset", None)))


def _named(generators: list[str]) -> str:
    return plain(", ".join(generators[:MOST_NAMED]) + (", ..." if len(generators) > MOST_NAMED else ""), MOST_SHOWN)


def _iterable(loader: Any) -> Any:
    """Return a torch loader's IterableDataset, or a loader that is not torch's; None: a map-style dataset, or made by
    Penstock or torch."""
    held = getattr(loader, "dataset", None) if isinstance(loader, torch.utils.data.DataLoader) else loader
    if isinstance(loader, torch.utils.data.DataLoader) and not isinstance(held, torch.utils.data.IterableDataset):
        return None
    return None if type(held).__module__.partition(".")[0] in ("penstock", "torch") else held


def _keeps_place(loader: Any) -> bool:
    held = _iterable(loader)
    return state_methods(held) > 0 and not callable(getattr(held, "set_epoch", None))


class SlotLoader:
    """Loader that input_fn made for one slot, with its position. To *open* an epoch means to call iter(). Exceptions of
    user code become InputFnError. doing: called before user code, with one of ACTIVITIES. skipped: called before each
    batch of a slot with quarantined ones: epoch, number skipped right before. load: imports input_fn."""

    def __init__(
        self,
        assignment: records_pb2.WorkerAssignment,
        doing: Callable[[str], None] = lambda activity: None,
        skipped: Callable[[int, int], None] = lambda epoch, count: None,
        load: Callable[[records_pb2.LoaderSpec], Callable[..., Any]] = load_input_fn,
    ) -> None:
        self.assignment = assignment
        self.position = StreamPosition(0, 0, 0, 0)
        self.capabilities = records_pb2.LoaderCapabilities(length=-1)
        point, slot = assignment.start, assignment.slot
        began = point.slots[slot].total if len(point.slots) > slot else 0
        self.history = StreamHistory(Launch(point.step, began))
        self.labels = labels_in(point.labels)
        """Labels of epochs: what user code of a pure loader sees as their numbers."""
        self.digest = 0
        """Digest of the last batch, set by the caller of `next`; 0 = not known."""
        self.chain = 0
        """Hash over the open epoch's batches (position.py, `linked`), extended by `next`'s caller; complete for a pure
        loader."""
        self.spent_s = 0.0
        """Seconds spent on the open epoch's batches, added up by `next`'s caller."""
        self.unsaved: Exception | None = None
        """Error of state_dict() at an epoch start, which therefore has no state."""
        self.resume: dict[str, Any] | None = None
        """Decoded state from which the launch resumed, if any. One that resumes by its own methods loads it at each
        restore."""
        self.awaited: dict[tuple[int, int], int] = {}
        """Digests of first batches of epochs that earlier runners or launches made, by (epoch, the slot's batches
        before)."""
        self._doing, self._skipped, self._load_fn = doing, skipped, load
        self._skips = {(skip.epoch, skip.total): skip.count for skip in assignment.skips}
        self._fn: Callable[..., Any] | None = None
        self._loader: Any = None
        self._iterator: Iterator[Any] | None = None
        self._generators: LoaderGenerators | None = None
        self._rng_before_call = self._rng_at_peek = b""
        self._taken_for = slot
        self._counts = False
        self._unused = False
        self._loaded = False
        self._has_first = not assignment.start.step and assignment.box == assignment.slot == 0
        self._ahead: list[Any] = []
        """Batch that `peek` has taken and `next` has not returned, if any."""
        self._held: tuple[Iterator[Any], list[Any], RestartPoint | None] | None = None
        """Next epoch, begun before `next` has returned END for the present one: iterator, `peek`'s batch, epoch
        start."""
        self._start: RestartPoint | None = None
        """The launch's start, where alone a loader that resumes by its own methods can be restored; None for others."""

    # ---- what it is

    @property
    def name(self) -> str:
        a = self.assignment
        return f"{name_of(a.loader)} (box {a.box}, slot {a.slot})"

    @property
    def worker(self) -> int:
        worker = self.history.launch.worker
        return self.assignment.slot if worker is None else worker

    @property
    def saves_state(self) -> bool:
        return self.capabilities.state_methods > 0 and not self.capabilities.not_restartable

    @property
    def by_own_methods(self) -> bool:
        """True if the loader has four state methods, and load_state_dict accepts only deaggregate_state_dict's
        results."""
        return by_own_methods(self.capabilities)

    @property
    def is_vouched(self) -> bool:
        return is_vouched(self.capabilities)

    @property
    def is_pure(self) -> bool:
        return is_pure(self.capabilities)

    @property
    def is_iterable(self) -> bool:
        """True if user code gives samples or batches in an order of its own, not by number."""
        return self._loader is not None and _iterable(self._loader) is not None

    @property
    def is_open(self) -> bool:
        return self._iterator is not None

    @property
    def is_ahead(self) -> bool:
        return bool(self._ahead)

    @property
    def suspects(self) -> str:
        """Part of an error's sentence: the classes of loader and dataset, and the generators that they hold."""
        loader, generators = self._loader, self._generators
        dataset = getattr(loader, "dataset", None)
        over = "" if dataset is None else f" over {type(dataset).__qualname__}"
        names = _named(generators.names) if generators is not None else ""
        holds = f"which holds the random generators {names}" if names else "in which no random generator was found"
        return f"{type(loader).__qualname__}{over}, {holds}"

    def numbers(self) -> dict[str, float]:
        first_own = int(
            isinstance(self._loader, torch.utils.data.DataLoader)
        )  # what torch's loader counts is not the user's
        return plain_numbers(parts_of(self._loader)[first_own:])

    def another(self, assignment: records_pb2.WorkerAssignment) -> Self:
        return type(self)(assignment, load=self._load_fn)

    # ---- what it is told

    def learn_resume(self, resume: dict[str, Any] | None) -> None:
        """Record the state from which the launch resumed; if it is from an epoch's end, also the digest of the next
        batch."""
        self.resume, a = resume, self.assignment
        part = part_of(a, resume)
        known = part is not None and part.get("next_epoch") and part["next_digest"] and not self.by_own_methods
        if part is not None and known and self.trusts_history(part):
            self.awaited[a.start.epoch + 1, a.start.slots[a.slot].total] = part["next_digest"]

    def learn_firsts(self, firsts: Iterable[Sequence[int]]) -> None:
        """Record first batches of earlier runners: (epoch, the slot's batches before it, digest)."""
        self.awaited.update({(epoch, began): digest for epoch, began, digest in firsts})

    def learn_labels(self, labels: dict[int, int]) -> None:
        """Record labels that the loop has given. First batches awaited under others are forgotten: the loop wants
        another epoch."""
        later = self.labels | labels
        for epoch, total in list(self.awaited):
            if label_of(later, epoch) != label_of(self.labels, epoch):
                del self.awaited[epoch, total]
        self.labels = later

    def learn_skips(self, point: RestartPoint) -> None:
        for epoch, total, count in point.skips:
            self._skips[epoch, total] = max(count, self._skips.get((epoch, total), 0))

    def trusts_history(self, part: dict[str, Any]) -> bool:
        """Return whether a saved part's history can be used: not one of an older release, edited, loaded with
        strict=False, or of other settings. Then only the loader's state is used, and its batches are not compared."""
        strict = self.resume is None or self.resume["strict"]
        return bool("history" in part["restart"] and strict and not part.get("changed")) and self._repeats()

    def _repeats(self) -> bool:
        """Return False if the loader says that it makes other batches on purpose than the saved run."""
        asked = getattr(self._loader, "repeats", None) if self.is_vouched else None
        if asked is None or self.resume is None or self.capabilities.state_methods != 4:
            return True
        with self._user("repeats()", activity="load_state_dict"):
            return asked(self.resume["aggregated"]) is not False

    # ---- making it

    def build(self) -> None:
        """Set seeds and assignment, call input_fn, check the result, and set `capabilities`."""
        self._seed()
        self._introduce(self.assignment.start.step + 1)
        self._doing("input_fn")  # the import of its module runs user code too
        with self._user("the import of its module"):
            self._fn = self._load_fn(self.assignment.loader)
        self._call()
        with self._user("reading the loader's methods"):
            self._examine(self._loader)
        if self.assignment.loader.options.synthetic:
            self.capabilities.not_restartable = NOT_SAVED
        if self.by_own_methods and self.history.launch.worker is None:
            self.history = self.history.of(replace(self.history.launch, worker=self.assignment.slot))

    def _examine(self, loader: Any) -> None:
        refuse_separate_barriers(loader, self.name)
        capabilities = self.capabilities
        capabilities.state_methods = state_methods(loader)
        capabilities.takes_strict = takes_strict(loader)
        capabilities.is_iterator = hasattr(type(loader), "__next__")
        capabilities.loads_own_state = getattr(loader, "loads_own_state", False) is True
        capabilities.exact_states = capabilities.state_methods > 0 and _vouches(loader)
        name = f"{type(loader).__module__}:{type(loader).__qualname__}"
        if callable(getattr(loader, "advance_state", None)) and len(name) <= MAX_NAME:
            capabilities.advances_state = name
        capabilities.keeps_place = self.is_pure and self.is_iterable and _keeps_place(loader)
        capabilities.own_workers = int(getattr(loader, "num_workers", 0) or 0)
        self.name_generators()
        try:
            capabilities.length = len(loader)
        except Exception as error:
            capabilities.length = -1
            if hasattr(type(loader), "__len__"):
                capabilities.no_length = plain(describe(error), MOST_SHOWN)

    def name_generators(self) -> None:
        """Record the generators that draw for samples. Their states must not be those of all workers where they can
        only augment: an iterable's own may decide an order that all workers share."""
        loader, capabilities = self._loader, self.capabilities
        assert self._generators is not None
        dataset, collate = getattr(loader, "dataset", None), getattr(loader, "collate_fn", None)
        torchs = isinstance(loader, torch.utils.data.DataLoader)  # whose own one, and its samplers', are of the order
        names, later, _ = self._generators.drawn_by([dataset, collate, None if torchs else loader])
        if self._draws_nothing:
            names, later = names + later, []
        treated = _OF_EPOCH if self.is_pure else _SET if self._draws_nothing else _LEFT
        told = [f"{_named(some)}: {how}" for some, how in ((names, treated), (later, _LATER)) if some]
        capabilities.generators = "; ".join(told)
        if self.is_pure and torchs:
            augmenting = [collate] if self.is_iterable else [dataset, collate]
            capabilities.generators_state = self._generators.drawn_by(augmenting)[2]

    def _introduce(self, step: int) -> None:
        a, worker = self.assignment, self.worker
        self._taken_for = worker
        offer_worker_info(a)
        assignments.set_assignment(
            assignments.Assignment(a.box, a.num_boxes, worker, a.num_workers_per_box, a.seed, step)
        )

    def _seed(self) -> None:
        """Seed alike in all launches and runners, so that input_fn makes the same loader, for example the same
        random_split."""
        a = self.assignment
        seed_rng(derive_seed(a.seed, "slot", a.box, a.slot))

    @property
    def _moved(self) -> bool:
        """True after a resume on another topology. What is drawn in its epoch must not be drawn again as the saved run
        did."""
        a = self.assignment
        return bool(a.resume.blob) and not (a.resume.same_topology or a.resume.anew) and a.start.step > 0

    def _call(self) -> None:
        assert self._fn is not None
        a = self.assignment
        with self._user("unpacking its arguments"):
            fn, args, kwargs = unpacked(self._fn, a.loader)
        self._rng_before_call = process_generators()
        # the old loader may hold an exclusive resource, such as an open database
        self._loader = self._generators = None
        with self._user("input_fn", activity="input_fn"):
            loader = fn(*args, **kwargs)
        if loader is None or not (hasattr(type(loader), "__iter__") or hasattr(type(loader), "__getitem__")):
            what = "None" if loader is None else f"a {type(loader).__qualname__}, which is not iterable"
            raise InputFnError(f"{self.name} returned {what}. It must return an iterable of batches")
        if self._moved:
            seed_rng(derive_seed(a.seed, "slot", a.box, a.slot, a.start.step))
        with self._user("change_mixture()"):
            apply_changes(loader, a)
        self._counts = isinstance(getattr(loader, "tally", None), Tally)
        self._loader = FirstBatch(loader) if a.loader.options.synthetic else loader
        self._unused, self._loaded = True, False
        self._generators = LoaderGenerators(loader, self._fn)

    def _make_again(self, step: int) -> None:
        self._introduce(step)
        self._seed()
        self._call()

    def begin(self) -> None:
        """Call input_fn again for the beginning of the stream, without loading a state or opening an epoch."""
        self.abort()
        launch = Launch(worker=self.assignment.slot if self.by_own_methods else None)
        self.history = replace(self.history.of(launch), abandoned=())
        self._make_again(1)
        self.position, self.digest, self._start = StreamPosition(0, 0, 0, 0), 0, None

    def make_as(self, worker: int) -> None:
        """Let user code see `worker` as its number. Call input_fn again, unless an unused loader was made with this
        number."""
        self.abort()
        self.history = self.history.of(replace(self.history.launch, worker=worker))
        self._start = None
        if self._taken_for != worker or not self._unused or self._loader is None:
            self._make_again(self.history.launch.step + 1)

    def drop(self) -> None:
        """Release the loader, which may hold an exclusive resource, such as a lock."""
        self.abort()
        self._loader = None

    # ---- epochs

    def open_epoch(self, *, step: int = 0) -> RestartPoint:
        """Open epoch `position.epoch`. Return the epoch start, with a state unless the loader is pure. step: what
        `get_worker_state()` reports."""
        if self._held is not None:
            return self._open_held(step)
        return self._open_pure(step) if self.is_pure else self.open(step=step)

    def _open_pure(self, step: int) -> RestartPoint:
        self._begin_epoch(self.position.epoch)
        self._iterate()
        self.compare_first()
        if self._loaded:  # a state on another topology: without it nothing leads to this position
            return self.snapshot(step)
        self.spent_s, self.chain = 0.0, 0
        return self.marked(RestartPoint(self.position.copy(), None, b"", b"", self.digest))

    def _begin_epoch(self, epoch: int) -> None:
        """Set all that a pure loader's epoch depends on before `iter()`: a fresh loader, generators, and the epoch's
        label."""
        if not self._unused:
            self._make_again(self.history.launch.step + 1)
        a = self.assignment
        assert self._generators is not None
        label = label_of(self.labels, epoch)
        assignments.set_epoch(label)
        moved = self._moved and epoch == a.start.epoch
        self._generators.begin(a.seed, a.box, a.slot, label, *([a.start.step] if moved else []))
        with self._user("set_epoch()"):
            set_epoch(self._loader, label)

    def open(self, *, step: int = 0, rng_after: bytes | None = None) -> RestartPoint:
        """Open the next epoch with the present loader in whatever state, and return its start. rng_after: generators'
        states to set once it is open, on a resume."""
        before = self._begin()
        if rng_after is not None:
            self._restore_rng(rng_after)
        epoch_start = self._epoch_start(step, before)
        if self.by_own_methods and self._start is None:
            self._start = replace(epoch_start, state=None)
        self.compare_first()
        return self._reached_from_start(epoch_start)

    def _begin(self) -> bytes:
        """Call iter() (of a new loader, if this is its own iterator and has begun), and return the generators' states
        before it."""
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

    def _epoch_start(self, step: int, before: bytes) -> RestartPoint:
        state, asked = None, False
        if self.saves_state:
            try:
                state, asked = self.state(step)
            except PenstockError as error:
                self.unsaved = error  # the stream continues; the next save reports the error
        return self._point_here(state, step if asked else 0, before)

    def end_previous_epoch_first(
        self, position: StreamPosition, epoch: int, epoch_start: RestartPoint | None = None
    ) -> None:
        """Let `next` return END for the previous epoch, where `position` still is, although epoch `epoch` is open
        already; then this one's batches. epoch_start: None if none of these was made yet."""
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
        """Record that the loader, resumed at an epoch's end, yielded batches of `epoch` without a StopIteration
        first."""
        self.history = self.history.of(replace(self.history.launch, enters=epoch))
        assert self._start is not None
        self._start = replace(self._start, history=self._start.history.of(self.history.launch))

    def abort(self) -> None:
        self._iterator, self._ahead, self._held = None, [], None

    def leave_epoch(self) -> None:
        self._iterator, self._ahead, self.chain = None, [], 0
        self.position.epoch += 1
        self.position.delivered = 0

    def abandon_epoch(self, total: int) -> None:
        if self._ahead and not self.is_pure:
            self._restore_rng(self._rng_at_peek)
        self.history = self.history.leaving(self.position.epoch, total)
        self.leave_epoch()

    def reach_end(self) -> None:
        if self.is_open and self.next() is not END:
            raise ReplayMismatchError(
                f"{self.name}: epoch {self.position.epoch} has more batches than before. {CHANGED}"
            )

    # ---- batches

    def next(self) -> Any:
        """Return the next batch, or END, and advance. The caller must add the batch's samples to `position.samples`."""
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
        position = self.position
        count = self._skips.get((position.epoch, position.total), 0)
        try:
            for _ in range(count):
                skip_batch(self._loader, self._iterator)
        except CannotSkipError as why:
            raise InputFnError(
                f"{self.name}: batch {position.total + 1} killed its runner, and cannot be skipped: {why}"
            ) from None
        self._skipped(position.epoch, count)

    def peek(self) -> Any:
        """Return the batch or END that `next` returns then, without advancing the position, only to compare digests:
        the loader itself is one batch ahead meanwhile."""
        position, iterator, self._rng_at_peek = self.position.copy(), self._iterator, self.rng()
        self._ahead = [self.next()]
        self.position, self._iterator = position, iterator
        return self._ahead[0]

    def peek_link(self) -> int | None:
        """Return what the epoch's chain links for the next batch; None at the epoch's end."""
        batch = self._ahead[0] if self._ahead else self.peek()
        return None if batch is END else ReplayDigest(cover=cover_of(self.assignment.loader.options)).link_of(batch)

    def compare_first(self) -> None:
        """Raise ReplayMismatchError if an epoch whose first batch is known begins with another one."""
        position = self.position
        expected = None if position.delivered else self.awaited.get((position.epoch, position.total))
        if expected is not None and self.peek_link() != expected:
            raise ReplayMismatchError(
                f"{self.name}: epoch {self.position.epoch} does not begin with the batch with which it began before: a "
                f"{self.suspects}. {CHANGED}"
            )

    def count_replayed(self, batch: Any, replay_digest: ReplayDigest) -> None:
        self.digest, samples = replay_digest.take(batch)
        self.chain = linked(self.chain, replay_digest.link)
        self.position.samples += samples

    def seek(
        self, total: int, epoch: int, seen: Callable[[Any], None], open_epoch: Callable[[], object] | None = None
    ) -> bool:
        """Replay until the slot has made `total` batches; False if epoch `epoch` ends before. seen: called with each
        batch. open_epoch: opens epochs on the way; None: `self.open_epoch`."""
        self._doing("replay")
        while self.position.total < total:
            if not self.is_open:
                (open_epoch or self.open_epoch)()
            present_epoch = self.position.epoch
            batch = self.next()
            if batch is not END:
                seen(batch)
            elif present_epoch >= epoch:
                return False
        return True

    def _note_first(self) -> None:
        """Record the digest of the run's first batch, unless the second is the same: a launch that begins with it is
        lost."""
        if self.by_own_methods and self.position.total == 1:
            self.history = replace(self.history, first=self.digest)
        elif self.position.total == 2 and self.history.first == self.digest:
            self.history = replace(self.history, first=0)

    def changed_counts(self) -> bytes:
        """Return the sample counts changed since the last call, encoded as in a BATCH frame; b"" without counts."""
        tally = self._tally
        return b"" if tally is None else tally.take()

    def last_batch(self) -> tuple[list[range] | None, Mapping[Group, Sequence[int]] | None]:
        """Return of the last batch the sample numbers of the global batch, as `skip` accepts them, and its samples'
        counts; None where the loader does not know."""
        numbers, tally = getattr(self._loader, "last_samples", None), self._tally
        with self._user("last_samples()"):
            return (numbers() if callable(numbers) else None), (None if tally is None else tally.last)

    @property
    def _tally(self) -> Tally | None:
        if not self._counts:
            return None
        tally = self._loader.tally
        return tally if isinstance(tally, Tally) else None

    # ---- states

    def state(self, step: int) -> tuple[Any, bool]:
        """Return state_dict(), and True if it called get_worker_state(), which reports `step`."""
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
            with worker_state(checkpoint) as unread:
                return self._loader.state_dict(), not unread

        with self._user("state_dict()", activity="state_dict"):
            return as_main_process(save)

    def snapshot(self, step: int) -> RestartPoint:
        """Return a snapshot, to be encoded before the next `next`: the state may share objects with the loader."""
        state, asked = self.state(step)
        return self._reached_from_start(self._point_here(state, step if asked else 0, None))

    def _point_here(self, state: Any, step: int, rng_before: bytes | None) -> RestartPoint:
        return self.marked(
            RestartPoint(
                self.position.copy(), state, self.rng(), rng_before, self.digest, self.spent_s, self.chain, step
            )
        )

    def marked(self, point: RestartPoint, *, whole_history: bool = False) -> RestartPoint:
        """Return a copy of the point with the present history and list of quarantined batches. whole_history: False
        keeps only epochs abandoned before the point's own."""
        if self._has_first and self.position.total in (1, 2):
            self._note_first()
        skips = tuple((epoch, total, count) for (epoch, total), count in self._skips.items())
        history = self.history if whole_history else self.history.before(point.position.epoch)
        seeds = self.seeds if self.is_pure else ()
        return replace(point, skips=skips, history=history, seeds=seeds)

    def _reached_from_start(self, point: RestartPoint) -> RestartPoint:
        """Return `point`; if the loader can be restored only at its launch's start, a copy that says so
        (`replayed_from`)."""
        start = self._start
        return point if start is None or point.position == start.position else replace(point, replayed_from=start)

    def require_state(self) -> None:
        if self.capabilities.not_restartable:
            raise NotRestartableError(f"{self.name} cannot be saved: {self.capabilities.not_restartable}")

    def aggregate(self, states: list[Any]) -> Any:
        with self._user("aggregate_state_dict()"), uncounted():
            return self._loader.aggregate_state_dict(states)

    def deaggregate(self, aggregated: Any, strict: bool) -> Any:
        with self._user("deaggregate_state_dict()", activity="load_state_dict"), uncounted():
            return self._loader.deaggregate_state_dict(aggregated, **(self._layers() or self._if_taken(strict)))

    def resume_by_own_methods(self, aggregated: Any, strict: bool) -> None:
        self._load(self.deaggregate(aggregated, strict), strict)

    def _load(self, state: Any, strict: bool) -> None:
        with self._user("load_state_dict()", activity="load_state_dict"):
            as_main_process(lambda: self._loader.load_state_dict(state, **self._if_taken(strict)))
        self._loaded = True

    def _layers(self) -> dict[str, str]:
        layers = (self.resume or {}).get("layers")
        if layers is not None and not takes(self._loader.deaggregate_state_dict, "layers"):
            raise InvalidArgumentError(
                f"{self.name}: load_state_dict(layers={layers!r}) needs a ShardLoader, got "
                f"{type(self._loader).__name__}, whose deaggregate_state_dict has no `layers`. Leave it out"
            )
        return {} if layers is None else {"layers": layers}

    def _if_taken(self, strict: bool) -> dict[str, bool]:
        return {"strict": strict} if self.capabilities.takes_strict else {}

    def plan_change(self, trial: coordinator_pb2.MixtureTrial, resume: Mapping[str, Any] | None) -> bytes:
        """Try a change of the mixture (changed_mixture.py). The loader must not be used afterwards."""
        with self._user("plan_change()"):
            return plan_change(self._loader, trial, resume)

    # ---- restoring it

    def restore(self, point: RestartPoint) -> None:
        """Bring the loader to a restart point, at any time. One with four methods is made anew, and loads its launch's
        state."""
        self.abort()
        self.learn_skips(point)
        if self.is_pure:
            self._restore_pure(point)
            return
        self.history = point.history.before(point.position.epoch)
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
        self._begin_epoch(point.epoch)
        self._load_restart_point(point)
        self._iterate()
        self._restore_rng(point.rng)

    def _load_restart_point(self, point: RestartPoint) -> None:
        if self.by_own_methods:
            if self.resume is not None:
                self.resume_by_own_methods(self.resume["aggregated"], self.resume["strict"])
            elif self.history.launch.step:
                raise StateMismatchError(
                    f"{self.name}: the loader has four state methods now: resume from DataLoader.state_dict()"
                )
        elif point.state is not None:
            if self.capabilities.state_methods == 0:
                raise StateMismatchError(f"{self.name}: this state needs state_dict and load_state_dict, as when saved")
            self._load(point.state, True)

    def log_unfit(self, error: Exception) -> None:
        _log.warning("%s; an earlier state of the loader is tried instead", getattr(error, "message", error))

    # ---- randomness

    @property
    def seeds(self) -> tuple[int, ...]:
        return () if self._generators is None else self._generators.seeds

    def require_seeds(self, seeds: tuple[int, ...]) -> None:
        """Raise ReplayMismatchError if input_fn has left the generators in other states than these; none = any."""
        others = self._generators.others_than(seeds) if seeds and self._generators is not None else []
        if others:
            raise ReplayMismatchError(
                f"{self.name}: input_fn has left {', '.join(others[:MOST_NAMED])} in another state than when it was "
                "called before. Seed each random generator, as by np.random.default_rng(torch.initial_seed()); one "
                "that draws for no batch may be a random.SystemRandom()"
            )

    @property
    def _draws_nothing(self) -> bool:
        return getattr_static(self._loader, "draws_nothing", False) is True

    def rng(self) -> bytes:
        """Return all generators' states; b"" for a loader of penstock.data whose batches depend on none of them."""
        assert self._generators is not None
        # an attribute that a wrapper only forwards does not count, because the wrapper may draw
        return b"" if self._draws_nothing else self._generators.capture()

    def _restore_rng(self, data: bytes) -> None:
        """Set the generators to `data`; without, seed them by the position: restores there then draw the same."""
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
        """Return the error for an exception of user code: PenstockError unchanged, others as InputFnError. what: the
        call."""
        if isinstance(error, PenstockError):
            return error
        return InputFnError(f"{self.name}: {what} raised {describe(error)}", remote_traceback=format_remote(error))
