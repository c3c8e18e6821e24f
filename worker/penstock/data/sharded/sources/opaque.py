"""Any iterable, read along and gone on with: by its own state, or by reading it again.

What a user's function makes may be a dataset or loader with `state_dict` and `load_state_dict`, a graph of
torchdata.nodes, or a generator that has no state at all. To all of them one rule applies:

    a token = the newest snapshot before the place, if there is one, and how many samples came since

To go on, the iterable is made anew, the snapshot loaded, and what came since is read again and thrown away. Without a
snapshot that is everything. Three things make this sure:

- **Strictly before the place.** So at least one sample is read again, and compared (sample_digest.py). An iterable that
  counts behind its `yield`, or reads ahead, comes back one off; that is seen, and it is read again from its beginning,
  which a warning says. Only if that gives other samples too is it an error. Two snapshots are kept, for the newest may
  lie at the place itself.
- **Encoded at once.** A state that was taken changes with its loader as it moves on (torchdata's do).
- **Random generators in one order**: seed, make the iterable, load, what they were behind making it, `iter`, what they
  were at the snapshot. With any other order a shuffled loader gives other batches.

Snapshots are taken after so many samples or seconds, and never so often that they cost more than their share of the
time (snapshot_cadence.py): a token is as exact with an old snapshot as with a new one. None is taken behind the end,
where some loaders begin again.
"""

from __future__ import annotations

import inspect
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from penstock.data.sharded.protocol import Token
from penstock.data.sharded.sources.randomness import OwnGenerators
from penstock.data.sharded.sources.sample_digest import BEGINNING, SampleDigests
from penstock.data.sharded.sources.undivided import Undivided
from penstock.data.stop_iteration import no_end
from penstock.proto.errors import (
    DatasetError,
    InvalidArgumentError,
    ReplayMismatchError,
    StateCorruptError,
    UnsupportedStateError,
)
from penstock.proto.state.codec import decode_state, encode_state
from penstock.proto.state.generators import capture_rng, restore_rng, seed_rng
from penstock.proto.state.snapshot_cadence import SnapshotCadence

__all__ = ["SNAPSHOT_EVERY", "SNAPSHOT_S", "OpaqueStream", "StreamMark", "let_go", "without_snapshots"]

SNAPSHOT_EVERY = 1000
"""Samples: to read them again takes about as long as it took to read them."""
SNAPSHOT_S = 60.0
"""Seconds: a resume reads again for about a minute at most, however slow the samples are."""
MOST = 1 << 62
"""Of any number in a token."""


@dataclass(frozen=True)
class StreamMark:
    """A place in a stream, and how to get there."""

    passed: int = 0
    """Samples before it."""
    digest: int | None = BEGINNING
    """Of those, in a chain; None if that is not known."""
    snapshot: dict[str, Any] | None = None
    """{"passed", "digest", "state": encoded, "rng": captured, or None where nothing was drawn since the seeding}"""

    def token(self) -> Token:
        return {"passed": self.passed, "digest": self.digest, "snapshot": self.snapshot}

    @staticmethod
    def of(token: Token, name: str) -> StreamMark:
        """Raises StateCorruptError for what `token` did not give."""
        try:
            mark = StreamMark(token["passed"], token["digest"], token["snapshot"])
            numbers = [(mark.passed, mark.digest)]
            if mark.snapshot is not None:
                own = mark.snapshot
                numbers.append((own["passed"], own["digest"]))
                if not isinstance(own["state"], bytes) or not isinstance(own["rng"], bytes | None):
                    raise ValueError("its snapshot is not of bytes")
                if not 0 < own["passed"] < mark.passed:
                    raise ValueError(f"a snapshot after {own['passed']} samples for a place after {mark.passed}")
            for passed, digest in numbers:
                if type(passed) is not int or not 0 <= passed < MOST or not (digest is None or type(digest) is int):
                    raise ValueError(f"{passed!r} samples with the digest {digest!r}")
        except (KeyError, TypeError, ValueError) as error:
            raise StateCorruptError(f"{name}: a place in it that cannot be: {error!r}") from error
        return mark


def without_snapshots(token: Token) -> Token:
    """The same place in any source, without what depends on when a state was taken. To go on from there a stream is
    read from its beginning."""
    if isinstance(token, Mapping):
        if token.keys() >= StreamMark().token().keys():
            return {**token, "snapshot": None}
        return {name: without_snapshots(value) for name, value in token.items()}
    return [without_snapshots(value) for value in token] if isinstance(token, list) else token


class _OtherSamplesError(Exception):
    """A replay came to another place."""


class _EndsEarlyError(Exception):
    """A replay came to an end before the place."""


class OpaqueStream(Iterator[Any]):
    """The samples of what `make` gives. Nothing is made before the first sample is asked for."""

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
        """
        Args:
            make: called for each new reading.
            name: for messages.
            seed: of the random generators that it has for itself; None leaves the process's alone.
            mark: where to begin.
            keeps_made: what `make` gives is someone else's: it is not closed, and its state not touched.
        """
        self._make, self._name, self._digests, self._keeps_made = make, name, digests, keeps_made
        self._every, self._seconds = snapshot_every, snapshot_s
        self._seed = seed
        self._inside: AbstractContextManager[None] = Undivided(nullcontext())
        self._fresh = b""
        """The generators as seeded."""
        mark = mark or StreamMark()
        self.passed = mark.passed
        """Samples so far."""
        self._chain = mark.digest
        self._snapshots = [mark.snapshot] if mark.snapshot is not None else []
        """The newest two, the older one first."""
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
        """To go on from here everything is read again."""
        return self.passed > 0 and not self._snapshots

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        if self._iterator is None:
            self._reopen()
        # Before a sample and not behind it: what goes wrong with a state must not cost the sample.
        if self.passed >= self._next_at or time.monotonic() >= self._next_s:
            self._consider_snapshot()
        return self._advance()

    def skip(self, count: int) -> int:
        """Pass over so many samples, or as many as there are left; says how many that were. They are all made."""
        return sum(1 for _ in zip(range(count), self, strict=False))

    def token(self) -> Token:
        return self._mark().token()

    def park(self) -> None:
        """Close it for a while: with a state of the place, so that from park to park little is read again."""
        holder = None if self._iterator is None or self._ended else self._stateful()
        if holder is not None and self.passed > max((own["passed"] for own in self._snapshots), default=0):
            self._take(holder)
        self.close()

    def close(self) -> None:
        """Let go of what was made. The place stays, and the next sample is asked of a new reading."""
        iterator, made = self._iterator, self._made
        self._iterator = self._made = None
        if iterator is None and made is None:
            return
        with self._inside:
            if iterator is not made:
                let_go(iterator)
            if not self._keeps_made:
                let_go(made)

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
            self.close()  # a generator that failed only ends from then on: the place is to be tried again, not passed
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
            self._next_at, self._next_s = MOST, float("inf")
        elif self._cadence.due(time.monotonic()):
            with self._cadence.timed():
                self._take(holder)
            self._next_at, self._next_s = self.passed + self._every, time.monotonic() + self._seconds

    def _take(self, holder: Any) -> None:
        with self._inside, no_end(f"state_dict() of {self._name}"):
            rng = None if self._seed is None else capture_rng()
            state = holder.state_dict()
            if rng is not None:
                restore_rng(rng)  # taking a state must not change what comes
        try:
            encoded = encode_state(state)
        except UnsupportedStateError as error:
            raise UnsupportedStateError(
                f"{self._name}: what its state_dict() returns cannot be kept: {error}"
            ) from None
        own = {
            "passed": self.passed,
            "digest": self._chain,
            "state": encoded,
            "rng": None if rng == self._fresh else rng,
        }
        self._snapshots = [*self._snapshots[-1:], own]

    def _stateful(self) -> Any:
        """Who has a state: the iterable, or its iterator."""
        for holder in (self._made, self._iterator):
            if holder is self._made and self._keeps_made:
                continue
            if hasattr(holder, "state_dict") and (hasattr(holder, "load_state_dict") or _is_node(holder)):
                return holder
        return None

    # ---- beginning, and going on

    def _reopen(self) -> None:
        """Make it, and go to the place."""
        mark = self._mark()
        try:
            if mark.snapshot is None:
                self._replay(mark, None)
            elif not self._goes_on_from(mark, mark.snapshot):
                self._replay(mark, None)
                self._snapshots = []
                self._next_at, self._next_s = MOST, float("inf")  # its states are of no use
        except BaseException as error:
            self.close()
            self._stand_at(mark)
            if isinstance(error, _OtherSamplesError):
                raise ReplayMismatchError(
                    f"{self._name}: it was read again, and {error}: it is not what it was, or it draws from something "
                    "that has no seed"
                ) from None
            if isinstance(error, _EndsEarlyError):
                raise DatasetError(
                    f"{self._name}: it {error}, and {mark.passed} had been read of it when its place was saved"
                ) from None
            raise

    def _goes_on_from(self, mark: StreamMark, snapshot: dict[str, Any]) -> bool:
        try:
            self._replay(mark, snapshot)
        except (_OtherSamplesError, _EndsEarlyError) as why:
            self.close()
            self._stand_at(mark)
            warnings.warn(
                f"{self._name}: the state that it gave after {snapshot['passed']} samples does not lead back there "
                f"({why}); its {mark.passed} samples are read again from the beginning. Does it count behind its "
                "yield, read ahead, or draw in worker processes?",
                UserWarning,
                stacklevel=5,
            )
            return False
        return True

    def _stand_at(self, mark: StreamMark) -> None:
        self.passed, self._chain, self._ended = mark.passed, mark.digest, False

    def _replay(self, mark: StreamMark, snapshot: dict[str, Any] | None) -> None:
        self._begin(snapshot)
        self.passed, self._chain = (snapshot["passed"], snapshot["digest"]) if snapshot else (0, BEGINNING)
        while self.passed < mark.passed:
            try:
                self._advance()
            except StopIteration:
                raise _EndsEarlyError(f"ends after {self.passed} samples") from None
        if mark.digest is not None and self._chain != mark.digest:
            raise _OtherSamplesError(f"other samples came than the {mark.passed} that were delivered")

    def _begin(self, snapshot: dict[str, Any] | None) -> None:
        if self._seed is not None:
            self._inside = Undivided(OwnGenerators(self._seed))
        with self._inside, no_end(f"{self._name} when it was made"):
            if self._seed is not None:
                self._fresh = capture_rng()
            made = self._make()
            if inspect.isgenerator(made) and inspect.getgeneratorstate(made) != inspect.GEN_CREATED:
                raise DatasetError(
                    f"{self._name} is a generator that was read or closed before: the function must make a new one "
                    "each time that it is called, for each epoch and to go on from a saved place"
                )
            if not hasattr(type(made), "__iter__"):
                raise InvalidArgumentError(f"{self._name} is a {type(made).__qualname__}, which is not iterable")
            self._made = made
            if snapshot is None:
                self._iterator = iter(made)
            else:
                self._restore(made, snapshot)

    def _restore(self, made: Any, snapshot: dict[str, Any]) -> None:
        behind_making = None if self._seed is None else capture_rng()
        holder = self._stateful()
        if holder is not None:
            _load(holder, decode_state(snapshot["state"]))
        if behind_making is not None:
            restore_rng(behind_making)
        self._iterator = iter(made)
        if holder is None:
            holder = self._stateful()
            if holder is None:
                raise _OtherSamplesError("it has no state any more")
            _load(holder, decode_state(snapshot["state"]))
        if self._seed is not None:
            rng = snapshot["rng"]
            if rng is None:
                seed_rng(self._seed)
            else:
                restore_rng(rng)


def _is_node(holder: Any) -> bool:
    """Of a graph of torchdata.nodes, which takes its state in reset()."""
    return hasattr(holder, "get_state") and hasattr(holder, "reset")


def _load(holder: Any, state: Any) -> None:
    if hasattr(holder, "load_state_dict"):
        holder.load_state_dict(state)
    else:
        holder.reset(state)


def let_go(owner: Any) -> None:
    """Close it, if that is something one does with it."""
    close = getattr(owner, "close", None)
    if callable(close):
        close()
