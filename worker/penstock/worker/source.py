"""A user's loader, and how it is brought to any place in its stream.

Everything that opens, saves, restores or replays a loader is here, and the same code runs in the runner that streams
and in the scratch children that check and materialise states. The order of the moments matters, and was found by
trying them all on shuffled torch DataLoaders and StatefulDataLoaders with and without worker processes:

    open a pass    take RNG R0, `iter(loader)`, take `state_dict()`, take RNG R1                      -> an origin
    from an origin load its state, set R0, `iter`, set R1, then replay n batches
    a snapshot     `state_dict()` after batch n and the RNG of that moment, encoded before the next `next()`
    from a snapshot load it, `iter`, then set its RNG

RNG restored at any other moment gives other batches. No state is taken after StopIteration: a finished pass is
(snapshot or origin, all of its batches). A loader that is its own iterator (a generator) is made anew by input_fn for
each pass.
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.utils.data

from penstock.proto import assignment as place_of
from penstock.proto.errors import (
    InputFnError,
    NotRestartableError,
    PenstockError,
    ReplayMismatchError,
    StateCorruptError,
    StateMismatchError,
    format_remote,
)
from penstock.proto.restartable import DataLoaderCheckpoint, state_methods, takes_strict, worker_state
from penstock.proto.rng import capture_rng, derive_seed, restore_rng, seed_rng
from penstock.proto.state import decode_state, encode_state
from penstock.proto.v1 import records_pb2
from penstock.worker.control import describe
from penstock.worker.skipping import CannotSkipError, skip_batch
from penstock.worker.usercode import load_input_fn

__all__ = ["END", "Base", "Place", "Source"]


_COUNT = struct.Struct("<I")
_TORCH_COLLATE = "torch.utils.data._utils.collate"


class _End:
    """The type of END."""


END = _End()
"""What `Source.next` returns when the pass is over."""


@dataclass
class Place:
    """Where a slot stands: batches in this pass, in all, and the samples in all of those."""

    epoch: int
    delivered: int
    total: int
    samples: int

    @property
    def began(self) -> int:
        """Batches in all when the pass was opened."""
        return self.total - self.delivered

    def copy(self) -> Place:
        return Place(self.epoch, self.delivered, self.total, self.samples)

    def as_list(self) -> list[int]:
        return [self.epoch, self.delivered, self.total, self.samples]


@dataclass(frozen=True)
class Base:
    """What a loader can be restored from: a snapshot, or the origin of a pass (then `rng_before` is set)."""

    place: Place
    state: Any
    """What state_dict() returned; None for a loader without methods."""
    rng: bytes
    rng_before: bytes | None = None
    digest: int = 0
    """Of the batch that `place.total` counts; 0 if unknown."""
    step: int = 0
    """The box's step that the state speaks of, if state_dict() asked for it; 0 if it did not."""
    skips: tuple[tuple[int, int, int], ...] = ()
    """(epoch, total, count): batches that are left out, see records.proto; those known when it was taken."""

    @property
    def is_origin(self) -> bool:
        """Taken where a pass begins, and not after a batch."""
        return self.rng_before is not None

    @property
    def is_sure(self) -> bool:
        """See Kept.is_sure in snapshots.py."""
        return not self.is_origin or self.place.epoch == 0

    def encode(self) -> bytes:
        """As a slot's restart (docs/ARCHITECTURE.md)."""
        origin = None if self.rng_before is None else {"rng_before": self.rng_before}
        return self._encode(self.state, self.place, self.rng, self.digest, origin, self.skips)

    def encode_at(self, user: Any, place: Place, rng: bytes, digest: int) -> bytes:
        """This origin as the restart of a later place, beside the user's state there."""
        origin = {
            "at": self.place.as_list(),
            "state": self.state,
            "rng_before": self.rng_before,
            "rng": self.rng,
            "digest": self.digest,
        }
        return self._encode(user, place, rng, digest, origin, self.skips)

    @staticmethod
    def _encode(
        user: Any,
        at: Place,
        rng: bytes,
        digest: int,
        origin: dict[str, Any] | None,
        skips: tuple[tuple[int, int, int], ...],
    ) -> bytes:
        restart: dict[str, Any] = {"at": at.as_list(), "rng": rng, "digest": digest, "origin": origin}
        if skips:
            restart["skips"] = [list(skip) for skip in skips]
        return encode_state({"user": user, "restart": restart})

    @classmethod
    def decode(cls, data: bytes) -> Base:
        return cls.of(cast(dict[str, Any], decode_state(data)))

    @classmethod
    def of(cls, value: dict[str, Any]) -> Base:
        """From the decoded form; an origin is preferred to the snapshot that it comes with.

        Raises StateCorruptError for what `encode` did not write.
        """
        try:
            return cls._of(value)
        except (KeyError, TypeError, ValueError) as error:
            raise StateCorruptError(f"a saved state that cannot be: {type(error).__name__}: {error}") from error

    @classmethod
    def _of(cls, value: dict[str, Any]) -> Base:
        restart = value["restart"]
        origin = restart["origin"]
        skips = tuple((epoch, total, count) for epoch, total, count in restart.get("skips", ()))
        if origin is None:
            return cls(Place(*restart["at"]), value["user"], restart["rng"], None, restart["digest"], skips=skips)
        if "state" in origin:
            at, state, rng, digest = origin["at"], origin["state"], origin["rng"], origin["digest"]
        else:
            at, state, rng, digest = restart["at"], value["user"], restart["rng"], restart["digest"]
        return cls(Place(*at), state, rng, origin["rng_before"], digest, skips=skips)


class Source:
    """The loader of one slot. Every exception of user code leaves as InputFnError with its traceback."""

    def __init__(
        self,
        assignment: records_pb2.WorkerAssignment,
        doing: Callable[[str], None] = lambda activity: None,
        left_out: Callable[[int, int], None] = lambda epoch, count: None,
    ) -> None:
        """`doing`: told what user code is called for. `left_out`: told the pass of the next batch, and how many were
        left out before it."""
        self.assignment = assignment
        self.place = Place(0, 0, 0, 0)
        self.traits = records_pb2.LoaderTraits(length=-1)
        self.digest = 0
        """Of the last batch, told by whoever flattens it."""
        self.unsaved: Exception | None = None
        """Why the state of the pass's origin could not be taken."""
        self._doing = doing
        self._left_out = left_out
        self._skips = {(skip.epoch, skip.total): skip.count for skip in assignment.skips}
        self._loader: Any = None
        self._iterator: Iterator[Any] | None = None
        self._unused = False
        self._rng_before_call = b""
        self._strict = False
        self._fn: Callable[..., Any] | None = None

    @property
    def name(self) -> str:
        """For messages."""
        a = self.assignment
        return f"{a.loader.input_fn} (box {a.box}, slot {a.slot})"

    @property
    def is_open(self) -> bool:
        """A pass is under way."""
        return self._iterator is not None

    @property
    def saves_state(self) -> bool:
        return self.traits.state_methods > 0 and not self.traits.not_restartable

    # ---- building

    def build(self) -> None:
        """Seed, tell the user's code who it is, call input_fn, and find out what came back."""
        a = self.assignment
        self._seed()
        place_of.set_assignment(
            place_of.Assignment(a.box, a.num_boxes, a.slot, a.num_workers_per_box, a.seed, a.base.step + 1)
        )
        _offer_worker_info(a)
        self._doing("input_fn")  # its module is the user's too
        self._fn = load_input_fn(a.loader)
        self._call()
        loader, traits = self._loader, self.traits
        with self._user("its loader's methods"):
            traits.state_methods = state_methods(loader)
            traits.takes_strict = self._strict = takes_strict(loader)
            traits.is_iterator = hasattr(type(loader), "__next__")
            traits.own_workers = int(getattr(loader, "num_workers", 0) or 0)
            if traits.own_workers and getattr(loader, "persistent_workers", False):
                traits.not_restartable = (
                    "persistent_workers=True keeps worker processes, and what they hold, over the end of a pass, where "
                    "no state reaches; use persistent_workers=False to save this loader"
                )
            try:
                traits.length = len(loader)
            except (TypeError, NotImplementedError):
                traits.length = -1

    def _seed(self) -> None:
        """As before input_fn is called: the same whenever the slot starts over; after a change of shape another way, or
        randomness would repeat."""
        a = self.assignment
        reshaped = a.base.step > 0 and not a.resume.same_shape
        seed_rng(derive_seed(a.seed, "slot", a.box, a.slot, *([a.base.step] if reshaped else [])))

    def _call(self) -> None:
        assert self._fn is not None
        a = self.assignment
        arguments = cast(dict[str, Any], decode_state(a.loader.arguments)) if a.loader.arguments else {}
        self._rng_before_call = self.rng()
        with self._user("input_fn", activity="input_fn"):
            loader = self._fn(*arguments.get("args", ()), **arguments.get("kwargs", {}))
        if loader is None or not (hasattr(type(loader), "__iter__") or hasattr(type(loader), "__getitem__")):
            what = "None" if loader is None else f"a {type(loader).__qualname__}, which is not iterable"
            raise InputFnError(
                f"{self.name} returned {what}; it must return a torch DataLoader or an iterable of batches"
            )
        self._loader, self._unused = loader, True

    # ---- passes

    def open_pass(self, *, step: int = 0, rng_after: bytes | None = None) -> Base:
        """Open the pass `place.epoch` and take its origin, as of the box's `step`.

        `rng_after`: RNG states to go on with, on a resume.
        """
        before = self._begin()
        if rng_after is not None:
            self._restore_rng(rng_after)
        state, asked = None, False
        if self.saves_state:
            try:
                state, asked = self.state(step)
            except PenstockError as error:
                self.unsaved = error  # the stream goes on; the save will say so
        return self.marked(Base(self.place.copy(), state, self.rng(), before, self.digest, step if asked else 0))

    def _begin(self) -> bytes:
        """Start iterating; returns the RNG that a replay must set before it does the same."""
        if not self.traits.is_iterator:
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
        """The next batch, or END; the place moves on with it, but for samples, which the caller counts."""
        assert self._iterator is not None
        try:
            if self._skips:
                self._leave_out()
            batch = next(self._iterator)
        except StopIteration:
            self.leave_pass()
            return END
        except BaseException as error:  # sys.exit() too is the user's code, and must not look like our death
            raise self._failed(f"batch {self.place.total + 1}", error) from error
        self.place.delivered += 1
        self.place.total += 1
        return batch

    def _leave_out(self) -> None:
        """Pass over the batches that are quarantined at this place."""
        place = self.place
        count = self._skips.get((place.epoch, place.total), 0)
        try:
            for _ in range(count):
                skip_batch(self._loader, self._iterator)
        except CannotSkipError as why:
            raise InputFnError(
                f"{self.name}: batch {place.total + 1} is quarantined, for it killed its runner each time, and cannot "
                f'be left out as poison="skip" asks: {why}'
            ) from None
        self._left_out(place.epoch, count)

    def learn_skips(self, base: Base) -> None:
        """Leave out what was left out when this base was taken, too."""
        for epoch, total, count in base.skips:
            self._skips[epoch, total] = max(count, self._skips.get((epoch, total), 0))

    def marked(self, base: Base) -> Base:
        """The same base with all that is left out by now."""
        return replace(base, skips=tuple((epoch, total, count) for (epoch, total), count in self._skips.items()))

    def leave_pass(self) -> None:
        """The pass is over or is given up: the next one is to be opened."""
        self._iterator = None
        self.place.epoch += 1
        self.place.delivered = 0

    # ---- states

    def state(self, step: int) -> tuple[Any, bool]:
        """The loader's state_dict() now, as of the box's `step`; and whether it asked get_worker_state()."""
        a, place = self.assignment, self.place
        checkpoint = DataLoaderCheckpoint(
            a.slot, a.num_workers_per_box, a.num_boxes, a.box, step, place.total, place.samples
        )
        with self._user("state_dict()", activity="state_dict"), worker_state(checkpoint) as context:
            state = self._loader.state_dict()
        return state, context.was_read

    def snapshot(self, step: int) -> Base:
        """A base of this place, as of the box's `step`. Encode it before the next `next()`."""
        state, asked = self.state(step)
        return self.marked(Base(self.place.copy(), state, self.rng(), None, self.digest, step if asked else 0))

    def restore(self, base: Base) -> None:
        """Go to the place of a base, also in the middle of a life.

        Where the attempt began with a new loader it is made anew, and the state not loaded: a loader that begins a pass
        in its first next() could not say in it that it had been asked to.
        """
        self.learn_skips(base)
        self._iterator = None
        as_made = base.rng_before is not None and self._began_at(base.place)
        if as_made and not self._unused and not self.traits.is_iterator:
            self._seed()
            self._call()
        if base.rng_before is not None:
            self._restore_rng(base.rng_before)
        if self.traits.is_iterator:
            self._call()
        if base.state is not None and not as_made:
            if self.traits.state_methods == 0:
                raise StateMismatchError(f"{self.name} has no load_state_dict, but its state was saved by one that has")
            self._load(base.state, True)
        # A snapshot has no RNG from before its pass; any will do, but the same one whenever it is restored, for worker
        # processes of the loader are seeded from it.
        if base.rng_before is None or not self.traits.is_iterator:
            self._restore_rng(base.rng if base.rng_before is None else base.rng_before)
        self._iterate()
        self._restore_rng(base.rng)
        self.place, self.digest = base.place.copy(), base.digest

    def _began_at(self, place: Place) -> bool:
        """The attempt began here, with a loader as input_fn made it."""
        start = self.assignment.base
        total = start.slots[self.assignment.slot].total if len(start.slots) > self.assignment.slot else 0
        return not self.assignment.resume.blob and (place.epoch, place.total) == (start.epoch, total)

    def resume_by_own_methods(self, aggregated: Any, strict: bool) -> None:
        """A four-method loader takes its part of an aggregated state; the pass is opened after."""
        arguments = {"strict": strict} if self._strict else {}
        with self._user("deaggregate_state_dict()", activity="load_state_dict"):
            own = self._loader.deaggregate_state_dict(aggregated, **arguments)
        self._load(own, strict)

    def aggregate(self, states: list[Any]) -> Any:
        """One state of all workers' states, in order of global_worker_id."""
        with self._user("aggregate_state_dict()"):
            return self._loader.aggregate_state_dict(states)

    def _load(self, state: Any, strict: bool) -> None:
        arguments = {"strict": strict} if self._strict else {}
        with self._user("load_state_dict()", activity="load_state_dict"):
            self._loader.load_state_dict(state, **arguments)

    def seek(
        self, total: int, epoch: int, seen: Callable[[Any], None], open_pass: Callable[[], object] | None = None
    ) -> bool:
        """Replay until `total` batches, in the pass `epoch` if that is not beyond; `seen` gets each batch.
        `open_pass` is called to open the passes on the way.

        Returns False if pass `epoch` ended before; `place` then says after how many batches.
        """
        self._doing("replay")
        while self.place.total < total:
            if not self.is_open:
                (open_pass or self.open_pass)()
            at_epoch = self.place.epoch
            batch = self.next()
            if batch is not END:
                seen(batch)
            elif at_epoch >= epoch:
                return False
        return True

    def reach_end(self) -> None:
        """The pass is known to be over here: step over its end. ReplayMismatchError if it goes on."""
        if self.is_open and self.next() is not END:
            raise ReplayMismatchError(f"{self.name}: pass {self.place.epoch} goes on after the batch that was its last")

    # ---- randomness

    def rng(self) -> bytes:
        """The states of the process's generators, and of those that the loader was given (`generator=`)."""
        states = [generator.get_state().numpy().tobytes() for generator in self._generators()]
        return b"".join([_COUNT.pack(len(states)), *(_COUNT.pack(len(s)) + s for s in states), capture_rng()])

    def _restore_rng(self, data: bytes) -> None:
        (count,) = _COUNT.unpack_from(data)
        at = _COUNT.size
        states = []
        for _ in range(count):
            (size,) = _COUNT.unpack_from(data, at)
            states.append(data[at + _COUNT.size : at + _COUNT.size + size])
            at += _COUNT.size + size
        for generator, state in zip(self._generators(), states, strict=False):
            generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
        restore_rng(data[at:])

    def reseed(self, *path: int | str) -> None:
        """Seed all generators by the run's seed, the slot and `path`."""
        a = self.assignment
        seed_rng(derive_seed(a.seed, "slot", a.box, a.slot, *path))
        for number, generator in enumerate(self._generators()):
            generator.manual_seed(derive_seed(a.seed, "generator", number, a.box, a.slot, *path))

    def _generators(self) -> list[torch.Generator]:
        """Where torch's loaders and samplers keep a generator, each once."""
        holders = [self._loader, getattr(self._loader, "sampler", None), getattr(self._loader, "batch_sampler", None)]
        holders.append(getattr(holders[-1], "sampler", None))
        found = {id(g): g for h in holders if isinstance(g := getattr(h, "generator", None), torch.Generator)}
        return list(found.values())

    # ---- errors

    @contextmanager
    def _user(self, what: str, activity: str | None = None) -> Iterator[None]:
        if activity:
            self._doing(activity)
        try:
            yield
        except PenstockError:
            raise
        except BaseException as error:
            raise self._failed(what, error) from error

    def _failed(self, what: str, error: BaseException) -> PenstockError:
        if isinstance(error, PenstockError):
            return error
        return InputFnError(f"{self.name}: {what} raised {describe(error)}", remote_traceback=format_remote(error))

    def require_state(self) -> None:
        """Raises NotRestartableError, with the reason, unless state_dict() can be called."""
        if self.traits.not_restartable:
            raise NotRestartableError(f"{self.name} cannot be saved: {self.traits.not_restartable}")


def _offer_worker_info(a: records_pb2.WorkerAssignment) -> None:
    """Answer torch's get_worker_info() in this process with the worker's place among all of the run's.

    Datasets that shard by it do the right thing unchanged. In the worker processes of a torch DataLoader its own answer
    stands, and does not count as a look at ours. Nor does torch's own default_collate: it asks whether to build batches
    in shared memory that it makes for each, which costs more than the batch and is of no use here.
    """
    from torch.utils.data._utils import worker as torch_worker

    own = os.getpid()
    info = torch_worker.WorkerInfo(
        id=a.box * a.num_workers_per_box + a.slot,
        num_workers=a.num_boxes * a.num_workers_per_box,
        seed=derive_seed(a.seed, "torch", a.box, a.slot),
        dataset=None,  # type: ignore[arg-type]  # the dataset is made after this, by the user
    )
    theirs = torch_worker.get_worker_info

    def get_worker_info() -> Any:
        if os.getpid() != own or place_of.stands_aside():
            return theirs()
        if sys._getframe(1).f_globals.get("__name__") == _TORCH_COLLATE:
            return None
        place_of.mark_looked_at()
        return info

    torch_worker.get_worker_info = get_worker_info
    torch.utils.data.get_worker_info = get_worker_info
    torch.utils.data._utils.worker.get_worker_info = get_worker_info
