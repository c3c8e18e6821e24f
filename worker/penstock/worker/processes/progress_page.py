"""Progress page of a runner: shared memory in which the runner records each batch, for the daemon to read at any time.

The runner has no Penstock thread, and may be in user code for minutes, or dead. The page still shows which batches it
has produced, and its current or last activity. The page has one writer and any number of readers. The record of a batch
or of an epoch's end is written before the page's head, which counts it.

User code in the runner can write anything into the page, so readers check every number. The memory is sealed at its
size, because a reader of memory that was made smaller dies of SIGBUS.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import time
from dataclasses import dataclass

from penstock.proto.lane.frame_log import LOG_BYTES, FrameLog
from penstock.proto.state.assignment import WorkerInfoAnswer
from penstock.runtime.process.forks import silence, unshare

ENTRIES = 4096
"""Number of newest batches whose digests are kept."""
ENDS = 1024
_HEAD = struct.Struct("<QQQQQQdQd")  # total, epoch, delivered, ends, activity, looked, since, samples, worked_s
_ENTRY = struct.Struct("<QQQQdQ")  # total, epoch, digest, samples, spent_s, chain
_END = struct.Struct("<QQ")  # epoch, total
_HERE = struct.Struct("<QQ")  # present epoch, batches skipped since the last batch
_HERE_AT = 1024
_COUNTS = struct.Struct("<QQQQ")  # total at the first position + 1, at the last position; made in between; replayed
_COUNTS_AT = 2048
_PROCESS = struct.Struct("<Q")  # process that runs user code; 0: the runner itself
_PROCESS_AT = 3072
_ENDS_AT = 4096
_ENTRIES_AT = _ENDS_AT + ENDS * _END.size
_LOG_AT = _ENTRIES_AT + ENTRIES * _ENTRY.size
_SIZE = _LOG_AT + LOG_BYTES

IDLE = ("starting", "waiting", "sending")
"""Activities in which the runner does not work on a batch."""
ACTIVITIES = ("starting", "input_fn", "iter", "next", "state_dict", "load_state_dict", "waiting", "sending", "replay")
"""The page stores an activity as its index in this tuple."""


@dataclass(frozen=True)
class BatchRecord:
    """Record of one batch of a runner.

    total: number of the batch in its slot, counted from 1 over all epochs. digest: hash of its content, 64 bits.
    samples: number of samples in all batches of the slot up to this one, inclusive.
    """

    total: int
    epoch: int
    digest: int
    samples: int
    spent_s: float = 0.0
    chain: int = 0

    def chain_in(self, epoch: int) -> int:
        """Return the hash over the slot's batches of epoch `epoch` up to this one: 0 if this batch is of an earlier
        epoch."""
        return self.chain if self.epoch == epoch else 0


class ProgressPage:
    """Progress page of one runner. The daemon makes it, and the runner opens the inherited descriptor."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map = mmap.mmap(fd, _SIZE)
        self.frame_log = FrameLog(self._map, _LOG_AT)
        self.total = self.epoch = self.delivered = self._ends = self._activity = self._reads = self.samples = 0
        self._since = 0.0
        self.worked_s = 0.0
        """Seconds that the runner has spent in finished activities that are not IDLE."""
        self._first: int | None = None
        self._last = self._made = self._replayed = 0
        self._counted = 0, 0, 0

    @classmethod
    def create(cls) -> ProgressPage:
        fd = os.memfd_create("penstock-progress", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, _SIZE)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return cls(fd)

    def forked(self) -> None:
        """Detach the page in a process that user code has forked, which must not write into it; see
        runtime/process/forks.py."""
        unshare(self._map, self.fd)
        silence(self.fd)

    def close(self) -> None:
        self.frame_log.close()
        self._map.close()
        os.close(self.fd)

    # ---- the runner writes

    def take_over(self) -> None:
        """Continue to write the page after another process of the slot has written it."""
        self.refresh()
        first, self._last, self._made, self._replayed = _COUNTS.unpack_from(self._map, _COUNTS_AT)
        self._first = first - 1 if first else None

    def made_by(self, pid: int) -> None:
        """Record the process that runs user code from now on; 0: the slot's own process."""
        self._put(_PROCESS_AT, _PROCESS.pack(pid))

    def set_position(self, total: int, epoch: int, samples: int) -> None:
        """Record the position at which the runner starts, or to which it returns after an epoch that the loop
        abandoned. Batches before it may have no record in the page.

        total, samples: numbers of the slot's batches and samples over all epochs.
        """
        if self._first is None:
            self._first = self._last = total
        else:
            self._made += self.total - self._last
            self._last = total
        self._write_counts()
        self.total, self.epoch, self.samples = total, epoch, samples
        self._write_head()

    def replayed(self) -> None:
        self._replayed += 1
        self._write_counts()

    def _write_counts(self) -> None:
        first = 0 if self._first is None else self._first + 1
        self._put(_COUNTS_AT, _COUNTS.pack(first, self._last, self._made, self._replayed))

    def record(
        self, total: int, epoch: int, digest: int, samples: int, delivered: int, spent_s: float = 0.0, chain: int = 0
    ) -> None:
        """Record a batch that is sent to the training loop, and set the runner's position to this batch.

        The arguments are the fields of a BatchRecord; delivered: number of the slot's batches that the loop has taken
        so far.
        """
        self.note(total, epoch, digest, samples, spent_s, chain)
        self.total, self.epoch, self.samples, self.delivered = total, epoch, samples, delivered
        self._write_head()

    def note(self, total: int, epoch: int, digest: int, samples: int, spent_s: float = 0.0, chain: int = 0) -> None:
        """Record the digest of one batch, which is about to be sent or which a replay has made."""
        entry = _ENTRY.pack(total, epoch, digest, samples, spent_s, chain)
        self._put(_ENTRIES_AT + total % ENTRIES * _ENTRY.size, entry)

    def end(self, epoch: int, total: int) -> None:
        """Record that epoch `epoch` ended after the slot's batch number `total`, counted over all epochs."""
        self._put(_ENDS_AT + self._ends % ENDS * _END.size, _END.pack(epoch, total))
        self._ends += 1
        self._write_head()

    def cut(self, epoch: int, total: int, samples: int) -> None:
        """Return to the slot's batch `total`, after which the training loop abandoned epoch `epoch`. Drop the recorded
        ends of later epochs."""
        self.here(epoch, 0)
        self.set_position(total, epoch, samples)  # first: where the ends say so, no batch after them may still count
        kept = [(e, t) for e, t in self.ends().items() if e < epoch]
        self._ends = 0
        for end in [*kept, (epoch, total)]:
            self._put(_ENDS_AT + self._ends % ENDS * _END.size, _END.pack(*end))
            self._ends += 1
        self._write_head()

    def doing(self, activity: str, delivered: int) -> None:
        """Record the activity that the runner begins now, and the number of batches delivered so far."""
        now = time.monotonic()
        if ACTIVITIES[self._activity] not in IDLE:
            self.worked_s += now - self._since
        self._activity, self._since, self.delivered = ACTIVITIES.index(activity), now, delivered
        self._write_head()

    def here(self, epoch: int, skipped: int) -> None:
        """Record the epoch of the next batch, and the number of quarantined batches skipped right before it."""
        self._put(_HERE_AT, _HERE.pack(epoch, skipped))

    def note_reads(self, *, looked: bool, answer: WorkerInfoAnswer) -> None:
        self._reads = looked | answer << 1
        self._write_head()

    def _write_head(self) -> None:
        head = _HEAD.pack(
            self.total,
            self.epoch,
            self.delivered,
            self._ends,
            self._activity,
            self._reads,
            self._since,
            self.samples,
            self.worked_s,
        )
        self._put(0, head)

    def _put(self, at: int, data: bytes) -> None:
        """Write bytes at an offset. `Struct.pack_into` must not be used: it fills the place with zeros first, and the
        daemon would see them in 2 of 5 reads if the runner writes without a pause."""
        self._map[at : at + len(data)] = data

    # ---- the daemon reads

    def counts(self) -> tuple[int, int, int]:
        """Return three numbers of batches as of the last `refresh`: made by this runner, delivered, and replayed. None
        of them falls when the runner returns to an earlier position."""
        first, last, made, replayed = _COUNTS.unpack_from(self._map, _COUNTS_AT)
        # Until the runner has set its position, `delivered` counts batches of the slot's previous runner.
        latest = (made + self.total - last, self.delivered - (first - 1), replayed) if first else (0, 0, replayed)
        produced, delivered, replayed = map(max, latest, self._counted)
        self._counted = produced, delivered, replayed
        return self._counted

    def refresh(self) -> None:
        (
            self.total,
            self.epoch,
            self.delivered,
            self._ends,
            self._activity,
            self._reads,
            self._since,
            self.samples,
            self.worked_s,
        ) = _HEAD.unpack_from(self._map)

    @property
    def process(self) -> int:
        """Process id of the child of the runner that runs user code now; 0: the runner itself. Check that it is a
        descendant of the runner before it is used."""
        return int(_PROCESS.unpack_from(self._map, _PROCESS_AT)[0])

    @property
    def looked(self) -> bool:
        return bool(self._reads & 1)

    @property
    def worker_info(self) -> WorkerInfoAnswer:
        """Answer of torch's get_worker_info() to user code. Known after the first batch."""
        return WorkerInfoAnswer(self._reads >> 1 & 3)

    @property
    def activity(self) -> tuple[str, float]:
        """Name of the runner's activity, and the seconds since it began."""
        return ACTIVITIES[self._activity % len(ACTIVITIES)], max(0.0, time.monotonic() - self._since)

    @property
    def working_s(self) -> float:
        """`worked_s` with the present activity."""
        activity, for_s = self.activity
        return self.worked_s + (0.0 if activity in IDLE else for_s)

    @property
    def making(self) -> tuple[int, int] | None:
        """Epoch of the batch that the runner is making, and the number of quarantined batches skipped right before it;
        None while it makes no batch."""
        if ACTIVITIES[self._activity % len(ACTIVITIES)] != "next":
            return None
        epoch, skipped = _HERE.unpack_from(self._map, _HERE_AT)
        return epoch, skipped

    @property
    def begun(self) -> int:
        return int(_HERE.unpack_from(self._map, _HERE_AT)[0])

    def entry(self, total: int) -> BatchRecord | None:
        """Return the record of the slot's batch number `total`; None if the page does not hold it, because the batch is
        not made yet, too old, or was made before this runner's start."""
        entry = BatchRecord(*_ENTRY.unpack_from(self._map, _ENTRIES_AT + total % ENTRIES * _ENTRY.size))
        return entry if entry.total == total and total else None

    def firsts(self) -> list[tuple[int, int, int]]:
        """Return the first batches of epochs that the page holds, from the first batch on that is not known to be
        delivered: the epoch's number, the slot's batches before it, the epoch's chain after the batch; oldest first.
        The runner's own first batch is among them, also if it began within an epoch."""
        first_batches: list[tuple[int, int, int]] = []
        oldest = max(self.delivered, self.total - ENTRIES + 1, 0)
        before = self.entry(oldest)
        for total in range(oldest + 1, self.total + 1):
            entry = self.entry(total)
            if entry is not None and (before is None or before.epoch != entry.epoch):
                first_batches.append((entry.epoch, total - 1, entry.chain))
            before = entry
        return first_batches

    def ends(self) -> dict[int, int]:
        """Return the newest epoch ends: number of the epoch -> number of the slot's last batch in it, over all
        epochs."""
        count = self._ends
        newest_ends = [
            _END.unpack_from(self._map, _ENDS_AT + index % ENDS * _END.size)
            for index in range(max(0, count - ENDS), count)
        ]
        return dict(newest_ends)
