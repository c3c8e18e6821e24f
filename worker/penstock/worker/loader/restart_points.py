"""Restart points: data from which a loader is rebuilt at an earlier position, and their encoding.

the beginning    call input_fn() again, seeded as when the slot's counts began. For a loader with four state
                 methods also the start of a launch, by the state from which that resumed.
an epoch start   the random generators before `iter()`, the loader's state, if any, the generators after `iter()`
a snapshot       `state_dict()` after batch n, and the random generators at that moment
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from itertools import chain
from typing import Any, cast

from penstock.proto.batch.digest import MASK
from penstock.proto.errors import InputFnError, ReplayMismatchError, StateCorruptError
from penstock.proto.state.codec import decode_state, encode_state

UNFIT = (ReplayMismatchError, InputFnError)
"""Errors that show that a restart point does not lead to the delivered batches. If all fail, the user gets the last
one."""
MOST_ABANDONED = 1024


class _End: ...


END = _End()
"""Returned by `SlotLoader.next` at the end of an epoch."""


@dataclass
class StreamPosition:
    """Position in a slot's stream. Counts begin at the run's first batch or at the last resume on another topology,
    where only the epoch's number continues. delivered: batches in this epoch; total, samples: in all."""

    epoch: int
    delivered: int
    total: int
    samples: int

    @property
    def began(self) -> int:
        """Batches before the present epoch."""
        return self.total - self.delivered

    def copy(self) -> StreamPosition:
        return replace(self)

    def as_list(self) -> list[int]:
        return [*astuple(self)]


@dataclass(frozen=True)
class Launch:
    """Position at which a launch began. A loader that resumed there counts steps, batches and samples from there."""

    step: int = 0
    """Training steps of the box before the launch."""
    batches: int = 0
    samples: int = 0
    worker: int | None = None
    """Worker number given to input_fn, for a loader that resumes by its own methods; None for others. Some yield the
    box's next batch from worker 0 after a resume, so the slot whose turn it is becomes worker 0."""
    enters: int | None = None
    """Epoch of which a loader, resumed at the end of the one before, yielded batches at once without a StopIteration:
    Penstock then ends the earlier ones itself. None for others."""

    def encode(self) -> list[Any]:
        return [self.step, self.batches, self.samples, self.worker, self.enters]


@dataclass(frozen=True)
class StreamHistory:
    """What a replay from the launch's start must repeat."""

    launch: Launch = Launch()
    abandoned: tuple[tuple[int, int], ...] = ()
    """Epochs that the loop abandoned, oldest first: (number, the slot's last delivered batch over all epochs)."""
    first: int = 0
    """Digest of the run's first batch (box 0, slot 0, four methods); 0 = not known, or the second is the same."""

    def leaving(self, epoch: int, total: int) -> StreamHistory:
        abandoned = (*(known for known in self.abandoned if known[0] < epoch), (epoch, total))
        return replace(self, abandoned=abandoned[-MOST_ABANDONED:])

    def of(self, launch: Launch) -> StreamHistory:
        return replace(self, launch=launch)

    def before(self, epoch: int) -> StreamHistory:
        return replace(self, abandoned=tuple(known for known in self.abandoned if known[0] < epoch))

    def encode(self) -> dict[str, Any]:
        abandoned = [list(known) for known in self.abandoned]
        first = {"first": self.first} if self.first else {}
        return {"launch": self.launch.encode(), "abandoned": abandoned, **first}

    @classmethod
    def decode(cls, value: dict[str, Any]) -> StreamHistory:
        abandoned = tuple((int(epoch), int(total)) for epoch, total in value["abandoned"])
        step, batches, samples, *known = value.get("launch", (0, 0, 0, None, None))
        worker, enters = (None if each is None else int(each) for each in known)
        launch = Launch(int(step), int(batches), int(samples), worker, enters)
        return cls(launch, abandoned, int(value.get("first", 0)))


@dataclass(frozen=True)
class RestartPoint:
    """Data from which a loader is rebuilt: a snapshot, or an epoch's start (`rng_before` is set)."""

    position: StreamPosition
    state: Any
    rng: bytes
    rng_before: bytes | None = None
    """Generators' states before iter(); None for a snapshot."""
    digest: int = 0
    spent_s: float = 0.0
    """Seconds that the loader has spent on this epoch's batches so far."""
    chain: int = 0
    step: int = 0
    """Box's training step that `get_worker_state()` reported to state_dict(); 0 if it did not ask."""
    skips: tuple[tuple[int, int, int], ...] = ()
    """Known quarantined batches: (epoch, total, count): `count` are skipped after the slot's batch `total`."""
    history: StreamHistory = StreamHistory()
    seeds: tuple[int, ...] = ()
    """Of a pure loader: hashes of the states in which input_fn left its generators."""
    replayed_from: RestartPoint | None = None
    """Earlier point from which a replay leads here; None if the loader can be restored here."""

    @property
    def epoch(self) -> int:
        return self.position.epoch

    @property
    def total(self) -> int:
        return self.position.total

    @property
    def began(self) -> int:
        return self.position.began

    @property
    def is_epoch_start(self) -> bool:
        return self.rng_before is not None

    def encode(self) -> bytes:
        """Encode in the format of docs/restarts.md."""
        epoch_start: dict[str, Any] | None
        if self.replayed_from is not None:
            epoch_start = self.replayed_from._as_start()
        else:
            epoch_start = None if self.rng_before is None else {"rng_before": self.rng_before}
        restart: dict[str, Any] = {
            "at": self.position.as_list(),
            "digest": self.digest,
            "epoch_start": epoch_start,
            "history": self.history.encode(),
        }
        skips = [list(skip) for skip in self.skips]
        optional = {name: getattr(self, name) for name in ("rng", "spent_s", "chain")}
        optional |= {"seeds": list(self.seeds), "skips": skips}
        restart |= {name: value for name, value in optional.items() if value}
        value = {"user": self.state, "restart": restart}
        launch = self.history.launch
        if launch.worker is not None:
            value["launch"] = {"step": launch.step, "worker": launch.worker}
        return encode_state(value)

    @classmethod
    def decode(cls, data: bytes) -> RestartPoint:
        return cls.of(cast(dict[str, Any], decode_state(data)))

    def _as_start(self) -> dict[str, Any]:
        start: dict[str, Any] = {"at": self.position.as_list(), "state": self.state}
        known = {name: getattr(self, name) for name in ("rng", "digest", "spent_s", "chain")}
        if self.rng_before is not None:
            start["rng_before"] = self.rng_before
        return start | {name: value for name, value in known.items() if value}

    @classmethod
    def taken(cls, data: bytes) -> RestartPoint:
        """Return the encoded position with its state, even if only a replay leads there."""
        value = cast(dict[str, Any], decode_state(data))
        restart = value["restart"]
        return cls(StreamPosition(*restart["at"]), value["user"], restart.get("rng", b""), digest=restart["digest"])

    @classmethod
    def of(cls, value: dict[str, Any]) -> RestartPoint:
        """Decode a value of `encode`; for a position that only a replay reaches, the point where that starts.
        StateCorruptError for another value."""
        try:
            return cls._of(value)
        except (LookupError, ArithmeticError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise StateCorruptError(f"a saved state is corrupt: {error!r}. Resume from an earlier state") from error

    @classmethod
    def _of(cls, value: dict[str, Any]) -> RestartPoint:
        restart = value["restart"]
        epoch_start = restart["epoch_start"]
        skips = tuple((epoch, total, count) for epoch, total, count in restart.get("skips", ()))
        history = StreamHistory.decode(restart["history"]) if "history" in restart else StreamHistory()
        before = None if epoch_start is None else epoch_start.get("rng_before")
        nested = epoch_start is not None and "state" in epoch_start
        taken, state = (epoch_start, epoch_start["state"]) if nested else (restart, value["user"])
        position, rng, digest = taken["at"], taken.get("rng", b""), taken.get("digest", 0)
        if not isinstance(rng, bytes) or not isinstance(before, bytes | None):
            raise TypeError("rng and rng_before must be bytes")
        if any(type(count) is not int or not 0 <= count <= MASK for count in (*position, digest, *chain(*skips))):
            raise ValueError(f"position, digest and skips must be integers from 0 to {MASK}, got {position!r:.80}")
        spent_s, hashed = float(taken.get("spent_s", 0.0)), int(taken.get("chain", 0))
        seeds = tuple(int(seed) for seed in restart.get("seeds", ()))
        place = StreamPosition(*position)
        return cls(place, state, rng, before, digest, spent_s, hashed, skips=skips, history=history, seeds=seeds)
