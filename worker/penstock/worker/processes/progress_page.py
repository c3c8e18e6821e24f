"""Progress page of a runner: shared memory in which the runner records each batch, for the daemon to read at any time.

The runner has no Penstock thread, and may be in user code for minutes, or dead; the page still shows its batches and
its activity. It has one writer. A record is written before the page's head, which counts it. User code can write
anything into it, so readers check every number. The size is sealed: a reader of shrunk memory dies of SIGBUS.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import time
from dataclasses import dataclass
from operator import attrgetter

from penstock.proto.lane.frame_log import LOG_BYTES, FrameLog
from penstock.proto.state.assignment import WorkerInfoAnswer
from penstock.runtime.process.forks import silence, unshare

ENTRIES = 4096
"""Newest batches whose digests are kept."""
ENDS = 1024
_HEAD = struct.Struct("<QQQQQQQQQQdd")
_HEAD_NAMES = (
    *("total", "epoch", "delivered", "samples", "_ends", "_activity", "_reads", "_first", "_made", "_replayed"),
    *("_since", "worked_s"),
)
"""Attributes in the page's head. `_first`: total at the first position + 1."""
_head_of = attrgetter(*_HEAD_NAMES)
_ENTRY = struct.Struct("<QQQQdQ")  # total, epoch, digest, samples, spent_s, chain
_END = struct.Struct("<QQ")  # epoch, total
_HERE = struct.Struct("<QQ")  # present epoch, batches skipped since the last batch
_HERE_AT = 1024
_PROCESS = struct.Struct("<Q")  # process that runs user code; 0: the runner itself
_PROCESS_AT = 3072
_ENDS_AT = 4096
_ENTRIES_AT = _ENDS_AT + ENDS * _END.size
_LOG_AT = _ENTRIES_AT + ENTRIES * _ENTRY.size
_SIZE = _LOG_AT + LOG_BYTES

IDLE = ("starting", "waiting", "sending")
"""Activities in which the runner does not work on a batch."""
ACTIVITIES = ("starting", "input_fn", "iter", "next", "state_dict", "load_state_dict", "waiting", "sending", "replay")
"""Stored as an index in this tuple."""


@dataclass(frozen=True)
class BatchRecord:
    """total: number of the batch in its slot, from 1 over all epochs. digest: 64 bits. samples: in all the slot's
    batches so far."""

    total: int
    epoch: int
    digest: int
    samples: int
    spent_s: float = 0.0
    chain: int = 0

    def chain_in(self, epoch: int) -> int:
        """Return the hash over the batches of `epoch` up to this one; 0 if this is of an earlier epoch."""
        return self.chain if self.epoch == epoch else 0


class ProgressPage:
    """Progress page of one runner, made by the daemon; the runner opens the inherited descriptor."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map = mmap.mmap(fd, _SIZE)
        self.frame_log = FrameLog(self._map, _LOG_AT)
        self.total = self.epoch = self.delivered = self._ends = self._activity = self._reads = self.samples = 0
        self._since = 0.0
        self.worked_s = 0.0
        """Seconds in finished activities that are not IDLE."""
        self._first = self._made = self._replayed = 0
        self._counted = 0, 0, 0

    @classmethod
    def create(cls) -> ProgressPage:
        fd = os.memfd_create("penstock-progress", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, _SIZE)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return cls(fd)

    def forked(self) -> None:
        """Detach in a process that user code has forked, which must not write (runtime/process/forks.py)."""
        unshare(self._map, self.fd)
        silence(self.fd)

    def close(self) -> None:
        self.frame_log.close()
        self._map.close()
        os.close(self.fd)

    # ---- the runner writes

    def made_by(self, pid: int) -> None:
        """Record the process that runs user code; 0: the slot's own."""
        self._put(_PROCESS_AT, _PROCESS.pack(pid))

    def set_position(self, total: int, epoch: int, samples: int) -> None:
        """Record where the runner starts, or returns after an abandoned epoch. total, samples: over all epochs. Earlier
        batches may have no record."""
        self._first = self._first or total + 1
        self.total, self.epoch, self.samples = total, epoch, samples
        self._write_head()

    def replayed(self) -> None:
        self._replayed += 1
        self._write_head()

    def record(
        self, total: int, epoch: int, digest: int, samples: int, delivered: int, spent_s: float = 0.0, chain: int = 0
    ) -> None:
        """Record a batch that is sent, and set the position to it. delivered: the slot's batches that the loop has
        taken."""
        self.note(total, epoch, digest, samples, spent_s, chain)
        self.total, self.epoch, self.samples, self.delivered = total, epoch, samples, delivered
        self._made += 1
        self._write_head()

    def note(self, total: int, epoch: int, digest: int, samples: int, spent_s: float = 0.0, chain: int = 0) -> None:
        """Record the digest of a batch about to be sent, or made by a replay."""
        entry = _ENTRY.pack(total, epoch, digest, samples, spent_s, chain)
        self._put(_ENTRIES_AT + total % ENTRIES * _ENTRY.size, entry)

    def end(self, epoch: int, total: int) -> None:
        self._put(_ENDS_AT + self._ends % ENDS * _END.size, _END.pack(epoch, total))
        self._ends += 1
        self._write_head()

    def cut(self, epoch: int, total: int, samples: int) -> None:
        """Return to batch `total`, after which the loop abandoned `epoch`, and drop ends of later epochs."""
        self.here(epoch, 0)
        self.set_position(total, epoch, samples)  # first: where the ends say so, no batch after them may still count
        kept = [(e, t) for e, t in self.ends().items() if e < epoch]
        self._ends = 0
        for end in [*kept, (epoch, total)]:
            self._put(_ENDS_AT + self._ends % ENDS * _END.size, _END.pack(*end))
            self._ends += 1
        self._write_head()

    def doing(self, activity: str, delivered: int) -> None:
        now = time.monotonic()
        if ACTIVITIES[self._activity] not in IDLE:
            self.worked_s += now - self._since
        self._activity, self._since, self.delivered = ACTIVITIES.index(activity), now, delivered
        self._write_head()

    def here(self, epoch: int, skipped: int) -> None:
        """Record the next batch's epoch, and the quarantined batches skipped right before it."""
        self._put(_HERE_AT, _HERE.pack(epoch, skipped))

    def note_reads(self, *, looked: bool, answer: WorkerInfoAnswer) -> None:
        self._reads = looked | answer << 1
        self._write_head()

    def _write_head(self) -> None:
        self._put(0, _HEAD.pack(*_head_of(self)))

    def _put(self, at: int, data: bytes) -> None:
        """Write bytes. `Struct.pack_into` would fill the place with zeros first, which 2 of 5 reads see under steady
        writes."""
        self._map[at : at + len(data)] = data

    # ---- the daemon reads

    def counts(self) -> tuple[int, int, int]:
        """Return batches made by this runner, delivered, and replayed, at the last `refresh`. None falls on a
        return."""
        # Until the runner has set its position, `delivered` counts batches of the slot's previous runner.
        delivered = self.delivered - (self._first - 1) if self._first else 0
        made, replayed = self._made, self._replayed
        self._counted = max(made, self._counted[0]), max(delivered, self._counted[1]), max(replayed, self._counted[2])
        return self._counted

    def refresh(self) -> None:
        vars(self).update(zip(_HEAD_NAMES, _HEAD.unpack_from(self._map), strict=True))

    @property
    def process(self) -> int:
        """Child that runs user code now; 0: the runner. Check that it is a descendant before use."""
        return int(_PROCESS.unpack_from(self._map, _PROCESS_AT)[0])

    @property
    def looked(self) -> bool:
        return bool(self._reads & 1)

    @property
    def worker_info(self) -> WorkerInfoAnswer:
        """Answer of get_worker_info() to user code, known after the first batch."""
        return WorkerInfoAnswer(self._reads >> 1 & 3)

    @property
    def activity(self) -> tuple[str, float]:
        return ACTIVITIES[self._activity % len(ACTIVITIES)], max(0.0, time.monotonic() - self._since)

    @property
    def working_s(self) -> float:
        activity, for_s = self.activity
        return self.worked_s + (0.0 if activity in IDLE else for_s)

    @property
    def making(self) -> tuple[int, int] | None:
        """Epoch of the batch under way and the quarantined ones right before it; None while none is made."""
        if ACTIVITIES[self._activity % len(ACTIVITIES)] != "next":
            return None
        epoch, skipped = _HERE.unpack_from(self._map, _HERE_AT)
        return epoch, skipped

    @property
    def begun(self) -> int:
        return int(_HERE.unpack_from(self._map, _HERE_AT)[0])

    def entry(self, total: int) -> BatchRecord | None:
        """Return batch `total`'s record; None if it is not made yet, too old, or from before this runner's start."""
        entry = BatchRecord(*_ENTRY.unpack_from(self._map, _ENTRIES_AT + total % ENTRIES * _ENTRY.size))
        return entry if entry.total == total and total else None

    def firsts(self) -> list[tuple[int, int, int]]:
        """Return epochs' first batches from the first on that may be undelivered, oldest first: (epoch, the slot's
        batches before, chain after it); also the runner's own first one, if within an epoch."""
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
        """Return the newest ends: epoch -> the slot's last batch in it."""
        count = self._ends
        newest_ends = [
            _END.unpack_from(self._map, _ENDS_AT + index % ENDS * _END.size)
            for index in range(max(0, count - ENDS), count)
        ]
        return dict(newest_ends)
