"""Restart points: data from which a slot's loader is rebuilt in a fresh process at an earlier position, and their
encoding.

There are three kinds. Only the first needs no verification (see verification.py):

    the beginning    call input_fn() again, seeded as when the slot's counts began. For a loader with four state
                     methods also the start of a launch: call input_fn(), and load the state from which the launch
                     resumed by the loader's own methods.
    an epoch start   the random generators before `iter()`, the loader's state, if any, the generators after `iter()`
    a snapshot       `state_dict()` after batch n, and the random generators at that moment
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, cast

from penstock.proto.batch.digest import MASK
from penstock.proto.errors import InputFnError, ReplayMismatchError, StateCorruptError
from penstock.proto.state.codec import decode_state, encode_state
from penstock.worker.loader.crossing_kinds import WAYS, more_careful

__all__ = ["END", "UNFIT", "Launch", "RestartPoint", "StreamHistory", "StreamPosition"]

UNFIT = (ReplayMismatchError, InputFnError)
"""Errors that show that a restart point does not lead to the delivered batches: the restored loader made another batch,
or raised. The next way to the position is then tried. If all ways fail, the user gets the error of the last one."""
MOST_ABANDONED = 1024
"""Largest number of abandoned epochs that a restart point records. A stream with more abandoned epochs cannot be
replayed from the beginning."""


class _End:
    """Type of END, the object that stands for the end of an epoch."""


END = _End()
"""Object that `PositionedLoader.next` returns at the end of an epoch, instead of a batch."""


@dataclass
class StreamPosition:
    """Position in a slot's stream of batches. The counts begin at the run's first batch, or at the last resume on other
    numbers of boxes or workers; only the epoch's number continues there.

    epoch: number of the epoch, from 0. delivered: number of batches that the slot has made in this epoch. total: number
    of batches that the slot has made in all epochs. samples: number of samples in all these batches.
    """

    epoch: int
    delivered: int
    total: int
    samples: int

    @property
    def began(self) -> int:
        """Number of batches that the slot had made, over all epochs, when the present epoch began."""
        return self.total - self.delivered

    def copy(self) -> StreamPosition:
        return StreamPosition(self.epoch, self.delivered, self.total, self.samples)

    def as_list(self) -> list[int]:
        return [self.epoch, self.delivered, self.total, self.samples]


@dataclass(frozen=True)
class Launch:
    """Position at which a launch (one start of the training job) began. A loader that resumed there counts its own
    steps, batches and samples from there. A loader that is replayed from the beginning of the run counts from the
    beginning."""

    step: int = 0
    """Number of training steps of the box (data-parallel rank) before the launch."""
    batches: int = 0
    """Number of the slot's batches in all earlier launches, counted as in StreamPosition."""
    samples: int = 0
    worker: int | None = None
    """Worker number in the box that input_fn was given, for a loader that resumes by its own methods
    (deaggregate_state_dict, then load_state_dict); None for any other loader. The number may differ from the slot's.
    Some loaders yield the next batch of the whole box from worker 0 after a resume, so the slot whose turn it is
    becomes worker 0."""
    enters: int | None = None
    """Number of an epoch, for a loader that was resumed at the end of the epoch before and then yielded batches of this
    epoch at once, without a StopIteration. Penstock then ends the epochs before it by itself. None for a loader that
    raised StopIteration first."""

    def encode(self) -> list[Any]:
        return [self.step, self.batches, self.samples, self.worker, self.enters]


@dataclass(frozen=True)
class StreamHistory:
    """History of a slot's stream that a replay from the beginning must repeat, up to a position."""

    launch: Launch = Launch()
    abandoned: tuple[tuple[int, int], ...] = ()
    """Epochs that the loop abandoned by `break`, oldest first, as (number of the epoch, number of the slot's last
    delivered batch in it, counted over all epochs)."""
    complete: bool = False
    """True if the stream can be replayed from the beginning: the run began without a state and with the present numbers
    of boxes and workers, has resumed from no edited state, and `abandoned` lists all abandoned epochs."""
    crossing: str = ""
    """Way in which the loader enters the next epoch after a restore within an epoch: KEPT, FRESH or REPLAY; "" = not
    known yet. See epoch_crossing.py."""

    def leaving(self, epoch: int, total: int) -> StreamHistory:
        """Return the history with one more abandoned epoch: the training loop abandoned `epoch` after the slot's batch
        `total`."""
        abandoned = (*(known for known in self.abandoned if known[0] < epoch), (epoch, total))
        return replace(
            self, abandoned=abandoned[-MOST_ABANDONED:], complete=self.complete and len(abandoned) <= MOST_ABANDONED
        )

    def of(self, launch: Launch) -> StreamHistory:
        """Return the same history with another launch. The loader counts its steps, batches and samples from the
        launch's beginning."""
        return replace(self, launch=launch)

    def before(self, epoch: int) -> StreamHistory:
        """Return the history as it was at the beginning of epoch `epoch`: this epoch and later ones are removed from
        `abandoned`."""
        return replace(self, abandoned=tuple(known for known in self.abandoned if known[0] < epoch))

    def knowing(self, crossing: str) -> StreamHistory:
        """Return the history with the later in WAYS of two crossings (ways into the next epoch): its own, and
        `crossing`, which was found at another position. A crossing that has proved wrong at one position must not be
        used at any other."""
        return replace(self, crossing=more_careful(self.crossing, crossing))

    def encode(self) -> dict[str, Any]:
        abandoned = [list(known) for known in self.abandoned]
        return {
            "launch": self.launch.encode(),
            "abandoned": abandoned,
            "complete": self.complete,
            "crossing": self.crossing,
        }

    @classmethod
    def decode(cls, value: dict[str, Any]) -> StreamHistory:
        abandoned = tuple((int(epoch), int(total)) for epoch, total in value["abandoned"])
        if value["crossing"] not in WAYS:
            raise ValueError(f"crossing must be one of {', '.join(map(repr, WAYS))}, got {value['crossing']!r:.40}")
        step, batches, samples, *known = value.get("launch", (0, 0, 0, None, None))
        worker, enters = (None if each is None else int(each) for each in known)
        launch = Launch(int(step), int(batches), int(samples), worker, enters)
        return cls(launch, abandoned, value["complete"] is True, value["crossing"])


@dataclass(frozen=True)
class RestartPoint:
    """Data from which a slot's loader is rebuilt at a position: a snapshot after a batch, or the start of an epoch
    (`rng_before` is set)."""

    position: StreamPosition
    state: Any
    """Result of the loader's state_dict(); None if no state was taken."""
    rng: bytes
    """States of the random generators at the position."""
    rng_before: bytes | None = None
    """States of the random generators before the epoch began, that is before iter(); None for a snapshot."""
    digest: int = 0
    """Digest of the last batch before this position; 0 = not known."""
    step: int = 0
    """Training step of the box (data-parallel rank) that `get_worker_state()` reported to the loader's state_dict(); 0
    if state_dict() did not ask for it."""
    skips: tuple[tuple[int, int, int], ...] = ()
    """Quarantined batches known when the restart point was taken, as (epoch, total, count): `count` batches are skipped
    after the slot's batch `total` in this epoch."""
    history: StreamHistory = StreamHistory()
    replayed_from: RestartPoint | None = None
    """Earlier restart point from which this position is reached by a replay; None if the loader can be restored at this
    position without a replay."""

    @property
    def epoch(self) -> int:
        return self.position.epoch

    @property
    def total(self) -> int:
        return self.position.total

    @property
    def began(self) -> int:
        """Number of batches that the slot had made, over all epochs, when the restart point's epoch began."""
        return self.position.began

    @property
    def is_epoch_start(self) -> bool:
        """True if the restart point was taken at the beginning of an epoch, False if it was taken after a batch."""
        return self.rng_before is not None

    @property
    def is_beginning(self) -> bool:
        """True if this restart point is at the beginning of the slot's stream, before its first batch. If
        `history.complete` is True, calling input_fn is enough to restore it."""
        return self.is_epoch_start and self.position.total == self.position.epoch == 0

    def encode(self) -> bytes:
        """Return the restart point as bytes, in the format that docs/restarts.md describes."""
        if self.replayed_from is not None:
            epoch_start: dict[str, Any] | None = {
                "at": self.replayed_from.position.as_list(),
                "state": self.replayed_from.state,
                "rng_before": self.replayed_from.rng_before,
                "rng": self.replayed_from.rng,
                "digest": self.replayed_from.digest,
            }
        else:
            epoch_start = None if self.rng_before is None else {"rng_before": self.rng_before}
        restart: dict[str, Any] = {
            "at": self.position.as_list(),
            "rng": self.rng,
            "digest": self.digest,
            "epoch_start": epoch_start,
            "history": self.history.encode(),
        }
        if self.skips:
            restart["skips"] = [list(skip) for skip in self.skips]
        value = {"user": self.state, "restart": restart}
        launch = self.history.launch
        if launch.worker is not None:
            value["launch"] = {"step": launch.step, "worker": launch.worker}
        return encode_state(value)

    @classmethod
    def decode(cls, data: bytes) -> RestartPoint:
        return cls.of(cast(dict[str, Any], decode_state(data)))

    @classmethod
    def taken(cls, data: bytes) -> RestartPoint:
        """Return the position that was encoded, with its state, even if the loader can get there only by a replay.
        (`of` returns the restart point from which that replay starts.)"""
        value = cast(dict[str, Any], decode_state(data))
        restart = value["restart"]
        return cls(StreamPosition(*restart["at"]), value["user"], restart["rng"], digest=restart["digest"])

    @classmethod
    def of(cls, value: dict[str, Any]) -> RestartPoint:
        """Return the restart point that a decoded value describes. If its position can be reached only by a replay,
        return the restart point from which the replay starts.

        Raises StateCorruptError if `encode` did not write the value.
        """
        try:
            return cls._of(value)
        except (LookupError, ArithmeticError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise StateCorruptError(
                f"a saved state is corrupt: {type(error).__name__}: {error}. Resume from an earlier state"
            ) from error

    @classmethod
    def _of(cls, value: dict[str, Any]) -> RestartPoint:
        restart = value["restart"]
        epoch_start = restart["epoch_start"]
        skips = tuple((epoch, total, count) for epoch, total, count in restart.get("skips", ()))
        history = StreamHistory.decode(restart["history"]) if "history" in restart else StreamHistory()
        before = None if epoch_start is None else epoch_start["rng_before"]
        if epoch_start is not None and "state" in epoch_start:
            at, state, rng, digest = epoch_start["at"], epoch_start["state"], epoch_start["rng"], epoch_start["digest"]
        else:
            at, state, rng, digest = restart["at"], value["user"], restart["rng"], restart["digest"]
        if not isinstance(rng, bytes) or not isinstance(before, bytes | None):
            raise TypeError(
                f"rng must be bytes and rng_before bytes or None, got {type(rng).__name__} and {type(before).__name__}"
            )
        if any(type(count) is not int or not 0 <= count <= MASK for count in (*at, digest, *chain(*skips))):
            raise ValueError(
                f"position, digest and skipped batches of a restart point must be integers from 0 to {MASK}, got "
                f"{at!r:.80}, {digest!r:.80} and {skips!r:.80}"
            )
        return cls(StreamPosition(*at), state, rng, before, digest, skips=skips, history=history)
