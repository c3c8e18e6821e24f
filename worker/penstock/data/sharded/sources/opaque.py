"""Sequential reading of any iterable (a loader with `state_dict`, a graph of torchdata.nodes, a generator), with
positions that can be saved: the newest snapshot (state) before it, the number of samples up to it, and a digest of
these.

To resume, the iterable is made again, the snapshot is loaded, and the samples from there (or from the beginning) to the
position are read and dropped. Three rules make this reliable:

- **The snapshot lies strictly before the position.** So at least one sample is read again, and compared: some iterables
  count after their `yield`, or read ahead. After a difference the iterable is read from its beginning, with a warning;
  only another one is an error. Two snapshots are kept, because the newest may lie at the position itself.
- **A state is encoded at once**, because it may change while its loader advances (torchdata's do).
- **Random generators are set in a fixed order**: seed them, make the iterable, load its state, set the generators back
  to their state after making it, call `iter`, and set them to the state at the snapshot. With any other order a
  shuffled loader yields other batches.

None is taken after the last sample, because there the state of some loaders already belongs to their next epoch.
"""

from __future__ import annotations

import inspect
import struct
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, Any, TypedDict

import msgspec
from xxhash import xxh3_64_intdigest

from penstock.data.ordering.order_states import Number
from penstock.data.sharded.protocol import SavedPosition
from penstock.data.sharded.sources.isolation import OwnGenerators, SoleWorker
from penstock.data.stop_iteration import forbid_stop_iteration
from penstock.proto.batch.digest import DigestCover
from penstock.proto.batch.replay_digest import ReplayDigest
from penstock.proto.errors import (
    DatasetError,
    InvalidArgumentError,
    ReplayMismatchError,
    UnsupportedLeafError,
    UnsupportedStateError,
)
from penstock.proto.state.codec import decode_state, encode_state
from penstock.proto.state.envelope import damaged_state
from penstock.proto.state.generators import capture_rng, restore_rng, seed_rng
from penstock.proto.state.snapshot_cadence import SnapshotCadence

SNAPSHOT_EVERY = 1000
"""Default number of samples between snapshots, and about the most that a resume reads again."""
SNAPSHOT_S = 60.0
"""Default seconds between snapshots, so that slow samples take about a minute at most to be read again."""
NUMBER_LIMIT = 1 << 62


BEGINNING = 0


class _Snapshot(TypedDict):
    """State at an earlier position: "passed" and "digest" there; "state", encoded; "rng", None if no number was drawn
    since seeding, or if the generators are left alone."""

    passed: Annotated[int, msgspec.Meta(gt=0)]
    digest: int | None
    state: bytes
    rng: bytes | None


class StreamMark(msgspec.Struct, frozen=True):
    """Position in a stream, with what is necessary to return to it. As a dict it is the saved position."""

    passed: Number
    """Number of samples before the position."""
    digest: int | None
    """Chained digest of the samples before the position; None if it is unknown."""
    snapshot: _Snapshot | None

    def saved_position(self) -> SavedPosition:
        return {"passed": self.passed, "digest": self.digest, "snapshot": self.snapshot}

    @staticmethod
    def of(saved: SavedPosition, name: str) -> StreamMark:
        try:
            mark = msgspec.convert(saved, StreamMark)
            if mark.snapshot is not None and mark.snapshot["passed"] >= mark.passed:
                raise ValueError(f"its snapshot must lie before sample {mark.passed}, got {mark.snapshot['passed']}")
        except ValueError as error:
            raise damaged_state(f"the saved position of {name} is damaged", error) from error
        return mark


def without_snapshots(saved: SavedPosition) -> SavedPosition:
    """For restore keys: when a snapshot was taken differs from one attempt to the next."""
    if isinstance(saved, Mapping):
        if saved.keys() >= set(StreamMark.__struct_fields__):
            return {**saved, "snapshot": None}
        return {name: without_snapshots(value) for name, value in saved.items()}
    return [without_snapshots(value) for value in saved] if isinstance(saved, list) else saved


class _OtherSamplesError(Exception):
    """Samples that were read again differ from the delivered ones, or a saved state cannot be loaded to read them."""


class _EndsEarlyError(Exception):
    """Reading a stream again ended before the saved position."""


class OpaqueStream(Iterator[Any]):
    def __init__(
        self,
        make: Callable[[], Any],
        name: str,
        *,
        digests: SampleDigests,
        seed: int | None = None,
        mark: StreamMark | None = None,
        keeps_made: bool = False,
        snapshot_every: int = SNAPSHOT_EVERY,
        snapshot_s: float = SNAPSHOT_S,
    ) -> None:
        """seed=None leaves the generators alone; `keeps_made`: `make` returns the user's object, not to be closed."""
        self._make, self._name, self._digests, self._keeps_made = make, name, digests, keeps_made
        self._every, self._seconds = snapshot_every, snapshot_s
        self._seed = seed
        self._inside: AbstractContextManager[None] = SoleWorker(nullcontext())
        self._fresh = b""
        """State of the random generators just after they were seeded."""
        mark = mark or StreamMark(0, BEGINNING, None)
        self.passed = mark.passed
        self._chain = mark.digest
        self._snapshots = [mark.snapshot] if mark.snapshot is not None else []
        """The two newest, the older one first. If the newest lies at the present position, the older one is saved."""
        self._cadence = SnapshotCadence()
        self._next_at, self._next_s = 1, float("inf")
        self._made: Any = None
        self._iterator: Iterator[Any] | None = None
        self._ended = False

    @property
    def is_open(self) -> bool:
        return self._iterator is not None

    @property
    def reads_again(self) -> bool:
        return self.passed > 0 and not self._snapshots

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        if self._iterator is None:
            self._reopen()
        # The snapshot is taken before a sample, so that an error in taking it cannot lose the sample.
        if self.passed >= self._next_at or time.monotonic() >= self._next_s:
            self._consider_snapshot()
        return self._advance()

    def skip(self, count: int) -> int:
        """Skip up to `count` samples by making and dropping them. Return how many."""
        return sum(1 for _ in zip(range(count), self, strict=False))

    def saved_position(self) -> SavedPosition:
        return self._mark().saved_position()

    def park(self) -> None:
        """Take a snapshot, and close the iterable for now, so that another stream can be opened."""
        holder = None if self._iterator is None or self._ended else self._stateful()
        if holder is not None and self.passed > max((own["passed"] for own in self._snapshots), default=0):
            self._take(holder)
        self.close()

    def close(self) -> None:
        """Close the iterable and keep the position. The next sample makes the iterable again."""
        iterator, made = self._iterator, self._made
        self._iterator = self._made = None
        if iterator is None and made is None:
            return
        with self._inside:
            if iterator is not made:
                close_quietly(iterator)
            if not self._keeps_made:
                close_quietly(made)

    # ---- one sample

    def _advance(self) -> Any:
        assert self._iterator is not None
        try:
            with self._inside:
                sample = next(self._iterator)
        except StopIteration:
            self._ended = True
            raise
        except BaseException as error:
            error.add_note(f"raised by {self._name} for its sample {self.passed}")
            # A generator that failed can only end. Closing the stream makes it anew, so the failed position is retried.
            self.close()
            raise
        self.passed += 1
        if self._chain is not None:
            self._chain = self._digests.after(self._chain, sample)
        return sample

    # ---- snapshots

    def _mark(self) -> StreamMark:
        before = [own for own in self._snapshots if own["passed"] < self.passed]
        return StreamMark(self.passed, self._chain, before[-1] if before else None)

    def _consider_snapshot(self) -> None:
        holder = self._stateful()
        if holder is None:
            self._next_at, self._next_s = NUMBER_LIMIT, float("inf")
        elif self._cadence.due(time.monotonic()):
            with self._cadence.timed():
                self._take(holder)
            self._next_at, self._next_s = self.passed + self._every, time.monotonic() + self._seconds

    def _take(self, holder: Any) -> None:
        with self._inside, forbid_stop_iteration(f"state_dict() of {self._name}"):
            rng = None if self._seed is None else capture_rng()
            state = holder.state_dict()
            if rng is not None:
                restore_rng(rng)  # taking a state must not change later random numbers
        try:
            encoded = encode_state(state)
        except UnsupportedStateError as error:
            raise UnsupportedStateError(
                f"{self._name}: state_dict() must return a value that can be saved: {error}"
            ) from None
        own: _Snapshot = {
            "passed": self.passed,
            "digest": self._chain,
            "state": encoded,
            "rng": None if rng == self._fresh else rng,
        }
        self._snapshots = [*self._snapshots[-1:], own]

    def _stateful(self) -> Any:
        """Return the iterable or its iterator, whichever has a state; None if neither."""
        for holder in (self._made, self._iterator):
            if holder is self._made and self._keeps_made:
                continue
            # torchdata.nodes load the state of a graph's root by `reset()`
            is_node = hasattr(holder, "get_state") and hasattr(holder, "reset")
            if hasattr(holder, "state_dict") and (hasattr(holder, "load_state_dict") or is_node):
                return holder
        return None

    # ---- start and resume

    def _reopen(self) -> None:
        mark = self._mark()
        try:
            if mark.snapshot is None:
                self._replay(mark, None)
            elif not self._resumes_from(mark, mark.snapshot):
                self._replay(mark, None)
                self._snapshots = []
                # the states of this iterable are unusable, so take no further ones
                self._next_at, self._next_s = NUMBER_LIMIT, float("inf")
        except BaseException as error:
            self.close()
            self._reset_to(mark)
            if isinstance(error, _OtherSamplesError):
                raise ReplayMismatchError(
                    f"{self._name} must yield the same samples again, but {error}. Use the same data and seeds"
                ) from None
            if isinstance(error, _EndsEarlyError):
                raise DatasetError(
                    f"{self._name} must have the {mark.passed} samples before its saved position, but {error}"
                ) from None
            raise

    def _resumes_from(self, mark: StreamMark, snapshot: _Snapshot) -> bool:
        try:
            self._replay(mark, snapshot)
        except (_OtherSamplesError, _EndsEarlyError) as why:
            self.close()
            self._reset_to(mark)
            warnings.warn(
                f"{self._name}: its state_dict after {snapshot['passed']} samples does not restore that position "
                f"({why}), so {mark.passed} samples are read again. Check whether it counts after its yield",
                stacklevel=5,
            )
            return False
        return True

    def _reset_to(self, mark: StreamMark) -> None:
        self.passed, self._chain, self._ended = mark.passed, mark.digest, False

    def _replay(self, mark: StreamMark, snapshot: _Snapshot | None) -> None:
        self._begin(snapshot)
        self.passed, self._chain = (snapshot["passed"], snapshot["digest"]) if snapshot else (0, BEGINNING)
        while self.passed < mark.passed:
            try:
                self._advance()
            except StopIteration:
                raise _EndsEarlyError(f"the stream ends after {self.passed} samples") from None
        if mark.digest is not None and self._chain != mark.digest:
            raise _OtherSamplesError(f"the samples differ from the {mark.passed} delivered ones")

    def _begin(self, snapshot: _Snapshot | None) -> None:
        if self._seed is not None:
            self._inside = SoleWorker(OwnGenerators(self._seed))
        with self._inside, forbid_stop_iteration(f"{self._name} when it was made"):
            if self._seed is not None:
                self._fresh = capture_rng()
            made = self._make()
            if inspect.isgenerator(made) and inspect.getgeneratorstate(made) != inspect.GEN_CREATED:
                raise DatasetError(
                    f"{self._name} must be a new iterable at each call, got a generator that was read before"
                )
            if not hasattr(type(made), "__iter__"):
                raise InvalidArgumentError(f"{self._name} must be iterable, got {type(made).__qualname__}")
            self._made = made
            if snapshot is None:
                self._iterator = iter(made)
            else:
                self._restore(made, snapshot)

    def _restore(self, made: Any, snapshot: _Snapshot) -> None:
        after_making = None if self._seed is None else capture_rng()
        holder = self._stateful()
        if holder is not None:
            _load(holder, decode_state(snapshot["state"]))
        if after_making is not None:
            restore_rng(after_making)
        self._iterator = iter(made)
        if holder is None:
            holder = self._stateful()
            if holder is None:
                raise _OtherSamplesError("the iterator no longer has a state_dict")
            _load(holder, decode_state(snapshot["state"]))
        if self._seed is not None:
            rng = snapshot["rng"]
            if rng is None:
                seed_rng(self._seed)
            else:
                restore_rng(rng)


def _load(holder: Any, state: Any) -> None:
    if hasattr(holder, "load_state_dict"):
        holder.load_state_dict(state)
    else:
        holder.reset(state)


def close_quietly(owner: Any) -> None:
    close = getattr(owner, "close", None)
    if callable(close):
        close()


_WORD = struct.Struct("<Q")
_UNKNOWN = bytes(8)


class SampleDigests:
    """Chained digests of samples, by which reading a stream again is compared. Each thread needs an instance.

    A sample's digest is the checksum of its encoding as a state (22 us for 1,000 Python integers; a batch's digest
    takes 480 us). What only a batch can contain, such as a named tuple, has the batch's digest; of any other sample,
    such as an image object, only its existence counts.
    """

    def __init__(self) -> None:
        self._replay_digest: ReplayDigest | None = None

    def __reduce__(self) -> tuple[type[SampleDigests], tuple[()]]:
        return SampleDigests, ()  # instances contain only scratch memory

    def after(self, chain: int, sample: Any) -> int:
        """Return the chained digest after one more sample, an unsigned 64-bit integer."""
        return xxh3_64_intdigest(self._digest(sample), chain)

    def _digest(self, sample: Any) -> bytes:
        try:
            return encode_state(sample)[-8:]
        except UnsupportedStateError:
            pass
        if self._replay_digest is None:
            self._replay_digest = ReplayDigest(cover=DigestCover.FULL)
        try:
            return _WORD.pack(self._replay_digest.take(sample)[0])
        except UnsupportedLeafError:
            return _UNKNOWN
