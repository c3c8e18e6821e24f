"""Child processes of `penstock doctor`, which run the loader by the code of workers (worker/loader/slot_loader.py),
each task in one that has seen no user code:

    stream     build the loader; stream N batches, over several epochs; with a snapshot after each batch
    check      restore a snapshot; compare the next batches with the stream's; if asked for, take a snapshot
    aggregate  call a four-method loader's aggregate_state_dict with the states of all workers
    resume     deaggregate and load what `aggregate` returned, as a resumed run does; then continue like `check`

Events: [epoch, total, digest] for the worker's batch `total`; [epoch, total, null] for the end of an epoch.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import time
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.deploy.loader_processes import take_task
from penstock.proto.batch.digest import DigestCover
from penstock.proto.batch.replay_digest import ReplayDigest
from penstock.proto.errors import (
    EmptyInputError,
    UnsupportedLeafError,
    UnsupportedStateError,
)
from penstock.proto.state import assignment as place_of
from penstock.proto.state.codec import decode_state, encode_state
from penstock.proto.v1 import records_pb2
from penstock.worker.loader.restart_points import END, Launch, RestartPoint
from penstock.worker.loader.slot_loader import SlotLoader
from penstock.worker.processes.control_channel import ControlChannel, plain_detail
from penstock.worker.processes.orphans import own_children
from penstock.worker.processes.user_code import load_input_fn

Event = list[Any]

ROWS = 1 << 16
"""First samples of a worker's stream whose digests are sent."""
SETTLE_S = 0.05
"""Seconds before a snapshot to restore, in which a prefetch runs ahead, as in a training step: else a wrong one might
be right by chance."""


def run_child(channel: ControlChannel) -> None:
    task = take_task(channel)
    source = SlotLoader(_assignment(task.fields))
    try:
        _TASKS[task.kind](source, channel, task.fields, task.parts)
    except Exception as error:
        channel.send("failed", error=plain_detail(error))


def _assignment(fields: Mapping[str, Any]) -> records_pb2.WorkerAssignment:
    workers, launch = fields["workers"], fields.get("launch")
    arguments = {"args": tuple(fields["args"]), "kwargs": fields["kwargs"]}
    return records_pb2.WorkerAssignment(
        run="doctor/0",
        attempt=1,
        slot=fields["slot"],
        generation=1,
        num_boxes=1,
        num_workers_per_box=workers,
        seed=fields["seed"],
        loader=records_pb2.LoaderSpec(input_fn=fields["input_fn"], arguments=encode_state(arguments)),
        start=records_pb2.BoxPosition(
            step=launch["step"] if launch else 0,
            live=range(workers),
            slots=[records_pb2.SlotPosition(total=total) for total in (launch["totals"] if launch else [0] * workers)],
        ),
        resume=records_pb2.Resume(same_topology=launch is not None),
    )


# ---- stream


def _stream(source: SlotLoader, channel: ControlChannel, fields: Mapping[str, Any], _: Sequence[bytes]) -> None:
    source.build()
    _Stream(source, channel, fields).run()


class _Stream:
    def __init__(self, source: SlotLoader, channel: ControlChannel, fields: Mapping[str, Any]) -> None:
        self._source = source
        self._channel = channel
        self._batches: int = fields["batches"]
        self._keep = {1: "early", self._batches // 2: "mid", self._batches - 1: "late"}
        self._slot: int = fields["slot"]
        self._workers: int = fields["workers"]
        self._unsaved = ""
        self._snapshot: tuple[int, bytes] | None = None
        """Snapshot after the newest batch: (batches so far, encoded state)."""
        self._ended = False
        self._shared_files: set[str] = set()
        self._state_bytes = 0
        self._events: list[Event] = []
        self._rows = array("Q")
        """Digests of the first epoch's samples."""

    def run(self) -> None:
        source, place = self._source, self._source.position
        replay_digest = ReplayDigest(cover=DigestCover.FULL)
        self._open("start")
        while place.total < self._batches:
            epoch = place.epoch
            batch = source.next()
            if batch is END:
                self._end(epoch)
                continue
            _take(source, replay_digest, batch)
            self._events.append([epoch, place.total, source.digest])
            self._shared_files |= _shared_files()
            if epoch == 0 and len(self._rows) < ROWS:
                self._rows.extend(replay_digest.rows())
            del batch
            self._save()
        source.name_generators()  # again: some are made at their first use
        self._channel.send("rows", self._rows.tobytes())
        self._channel.send(
            "done",
            events=self._events,
            capabilities={
                field.name: getattr(source.capabilities, field.name) for field in source.capabilities.DESCRIPTOR.fields
            },
            looked_at=place_of.looked_at(),
            worker_info=place_of.reads().answer.name.lower(),
            samples=place.samples,
            unsaved=self._unsaved,
            shared_files=sorted(self._shared_files),
            state_bytes=self._state_bytes,
        )

    def _open(self, name: str) -> None:
        point = self._source.open_epoch(step=self._step())
        try:
            data = point.encode()
        except UnsupportedStateError as error:
            self._unsaved = error.message
            return
        self._channel.send("point", data, name=name, total=point.position.total, epoch_start=True)

    def _end(self, epoch: int) -> None:
        place = self._source.position
        if not self._events or self._events[-1][2] is None:
            raise EmptyInputError(
                f"{self._source.name}: epoch {epoch} ended without a single batch. Check its "
                "paths and sharding, and that input_fn does not return an exhausted iterator"
            )
        self._events.append([epoch, place.total, None])
        if not self._ended:
            self._ended = True
            if self._snapshot is not None:
                total, data = self._snapshot
                self._channel.send("point", data, name="end", total=total, epoch_start=False)
            self._open("second epoch")
        else:
            self._source.open_epoch(step=self._step())

    def _step(self) -> int:
        """Return the step that would deliver the newest batch if no slot's epoch had ended (with 2 workers, batch 3 of
        slot 0 is step 5); 0 before the first."""
        total = self._source.position.total
        return self._slot + 1 + (total - 1) * self._workers if total else 0

    def _save(self) -> None:
        source = self._source
        if not source.saves_state or self._unsaved:
            return
        total = source.position.total
        if total in self._keep:
            time.sleep(SETTLE_S)
        try:
            data = source.snapshot(self._step()).encode()
        except UnsupportedStateError as error:
            self._unsaved = error.message
            return
        self._state_bytes = max(self._state_bytes, len(data))
        self._snapshot = total, data
        if total in self._keep:
            self._channel.send("point", data, name=self._keep[total], total=total, epoch_start=False)


def _shared_files() -> set[str]:
    """Return the files whose offset the loader's processes share, because they were open when these were forked, and
    from which something was read."""
    shared = set()
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # of the listing itself
            if fd > sys.stderr.fileno() and stat.S_ISREG(os.fstat(fd).st_mode) and os.lseek(fd, 0, os.SEEK_CUR):
                path = os.readlink(f"/proc/self/fd/{fd}")
                for child in own_children() if not path.startswith("/dev/shm/") else ():  # those are mapped
                    with contextlib.suppress(OSError):  # it has ended, or has no such file
                        if os.readlink(f"/proc/{child}/fd/{fd}") == path:
                            shared.add(path)
    return shared


def _take(source: SlotLoader, replay_digest: ReplayDigest, batch: Any) -> None:
    try:
        source.digest, samples = replay_digest.take(batch)
    except UnsupportedLeafError as error:
        raise UnsupportedLeafError(f"{source.name}, batch {source.position.total}: {error.message}") from error
    source.position.samples += samples


# ---- check, aggregate, resume


def _check(source: SlotLoader, channel: ControlChannel, fields: Mapping[str, Any], parts: Sequence[bytes]) -> None:
    source.build()
    source.restore(RestartPoint.decode(parts[0]))
    _compare(source, channel, fields)


def _resume(source: SlotLoader, channel: ControlChannel, fields: Mapping[str, Any], parts: Sequence[bytes]) -> None:
    """Resume as a runner does. `parts`: encoded state of this worker, and result of aggregate_state_dict."""
    point = RestartPoint.taken(parts[0])
    source.build()
    launch = Launch(fields["launch"]["step"], point.position.total, point.position.samples, source.worker)
    source.history = RestartPoint.decode(parts[0]).history.of(launch)
    aggregated = decode_state(parts[1])
    source.learn_resume({"aggregated": aggregated, "strict": True, "slots": {}})
    source.resume_by_own_methods(aggregated, True)
    source.position, source.digest = point.position.copy(), point.digest
    source.open(step=fields["launch"]["step"], rng_after=point.rng)
    _compare(source, channel, fields)


def _compare(source: SlotLoader, channel: ControlChannel, fields: Mapping[str, Any]) -> None:
    """Compare the next events with the expected ones, and send the first that differs. If `then` is (batches, step),
    also send a snapshot taken after that many batches, delivered at that step."""
    replay_digest, then = ReplayDigest(cover=DigestCover.FULL), fields.get("then")
    for epoch, total, digest in fields["events"]:
        if not source.is_open:
            source.open_epoch()
        batch = source.next()
        if batch is END:
            if digest is None:
                continue
            what = f"the loader ends before batch {total}"
        else:
            _take(source, replay_digest, batch)
            if digest is None:
                what, total = f"the loader continues after batch {total}, the last of epoch {epoch}", total + 1
            elif source.digest != digest:
                what = f"batch {total} differs"
            else:
                if then is not None and total == then[0]:
                    channel.send(
                        "point", source.snapshot(then[1]).encode(), name="next", total=total, epoch_start=False
                    )
                continue
        channel.send("done", same=False, differs=total, what=what)
        return
    channel.send("done", same=True)


def _aggregate(_: SlotLoader, channel: ControlChannel, fields: Mapping[str, Any], parts: Sequence[bytes]) -> None:
    """Call aggregate_state_dict as a training process does: on a loader that belongs to no worker."""
    input_fn = load_input_fn(records_pb2.LoaderSpec(input_fn=fields["input_fn"]))
    with place_of.assigned(place_of.NEUTRAL):
        loader = input_fn(*fields["args"], **fields["kwargs"])
        states = [RestartPoint.taken(part).state for part in parts]
        channel.send("done", encode_state(loader.aggregate_state_dict(states)))


_TASKS = {"stream": _stream, "check": _check, "resume": _resume, "aggregate": _aggregate}
