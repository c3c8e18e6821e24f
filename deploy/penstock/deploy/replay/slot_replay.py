"""Child process of `penstock replay`, which runs a worker's loader. It reports the digest of each batch. Its tasks:

    start      build the loader; go to the start of an attempt, a saved state or a snapshot, and on to a position
    go         advance to batch `total` of epoch `epoch`, or to the end of that epoch
    leave      abandon the epoch, as the training loop did
    show       show the newest batch: its content, also as a file

A worker's batches are counted from 1 over the whole run; `total` is the number of the last one.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy.random  # noqa: F401  # needed by every child, loaded once

from penstock.deploy.console.count_tables import counts_as_dict
from penstock.deploy.loader_processes import take_task
from penstock.deploy.operations import batch_tables
from penstock.proto.batch.digest import cover_of
from penstock.proto.batch.replay_digest import ReplayDigest
from penstock.proto.errors import LaneLostError, ReplayMismatchError
from penstock.proto.state.codec import decode_state
from penstock.proto.state.counts import merged_rows
from penstock.proto.v1 import records_pb2
from penstock.worker.loader.restart_plan import Leg, Target
from penstock.worker.loader.restart_points import RestartPoint
from penstock.worker.loader.slot_loader import SlotLoader
from penstock.worker.loader.start import start
from penstock.worker.loader.travel import catch_up, leave, travel
from penstock.worker.processes.control_channel import ControlChannel, plain_detail

PROGRESS_S = 0.5
"""Seconds between two progress reports."""


def run_child(channel: ControlChannel) -> None:
    worker: _SlotReplay | None = None
    while True:
        task = take_task(channel)
        try:
            if task.kind == "start":
                worker = _SlotReplay(channel, records_pb2.WorkerAssignment.FromString(task.payload))
                worker.start(task.parts, task.fields)
            else:
                assert worker is not None
                getattr(worker, task.kind)(**task.fields)
        except LaneLostError:
            raise
        except Exception as error:
            channel.send("failed", error=plain_detail(error))


class _SlotReplay:
    def __init__(self, channel: ControlChannel, assignment: records_pb2.WorkerAssignment) -> None:
        self._channel = channel
        self._source = SlotLoader(assignment)
        self._replay_digest = ReplayDigest(cover=cover_of(assignment.loader.options))
        self._batch: Any = None
        self._digests: list[int] = []
        self._point: RestartPoint | None = None
        self._left: dict[int, int] = {}
        self._reported_at = 0.0

    def start(self, parts: Sequence[bytes], fields: Mapping[str, Any]) -> None:
        """Build the loader, restore it, and advance to batch `total` of `epoch`; if not `live`, to the next epoch.
        `parts`: a snapshot (field `snapshot`) or saved state; empty: from the beginning."""
        source, total, epoch = self._source, fields["total"], fields["epoch"]
        source.build()
        if fields["snapshot"]:
            self._point = RestartPoint.decode(parts[0])
            source.restore(self._point)
        else:
            resume = cast(dict[str, Any], decode_state(parts[0])) if parts else None
            start(source, resume, self._keep, self._seek)
        self._seek(Leg(epoch, total))
        catch_up(source, epoch if fields["live"] else epoch + 1)
        self._done(capabilities=source.capabilities.state_methods)

    def _keep(self, point: RestartPoint, _: bool) -> None:
        self._point = point

    def _seek(self, leg: Leg) -> None:
        """Advance to the end of a leg, which the run is known to have reached."""
        source, total, epoch, digest = self._source, leg.total, leg.epoch, leg.digest
        replayed = source.position.total < total
        if not source.seek(total, epoch, self._seen):
            raise ReplayMismatchError(
                f"{source.name}: epoch {epoch} ended after batch {source.position.total} of the worker, but batch "
                f"{total} had been delivered. The data or the code of the loader has changed: replay with "
                "those of the run"
            )
        if replayed and digest and source.digest != digest:
            raise ReplayMismatchError(
                f"{source.name}: replayed batch {total} of the worker differs from the delivered batch. The data or "
                "the code has changed, or the loader is not deterministic: run `penstock doctor`"
            )

    def _seen(self, batch: Any) -> None:
        source = self._source
        source.digest, samples = self._replay_digest.take(batch)
        source.position.samples += samples
        self._batch = batch
        self._digests.append(source.digest)
        if time.monotonic() - self._reported_at > PROGRESS_S:
            self._reported_at = time.monotonic()
            self._channel.send("at", total=source.position.total)

    def go(self, epoch: int, total: int) -> None:
        reached = self._source.seek(total, epoch, self._seen)
        self._done(ended=not reached)

    def leave(self, epoch: int, total: int) -> None:
        """Abandon `epoch` after batch `total`; if the loader has reached its end, restore and replay first."""
        source = self._source
        if source.position.epoch > epoch:
            assert self._point is not None
            source.restore(self._point)
            travel(source, Target(epoch, total, self._left), self._seek)
            self._digests.clear()
        leave(source, epoch, total)
        self._left[epoch] = total
        self._done()

    def show(self, out: str | None) -> None:
        if out is not None:
            batch_tables.write(self._batch, Path(out))
        place = self._source.position
        numbers, counted = self._source.last_batch()
        found = {
            "leaves": batch_tables.describe(self._batch),
            "samples": None if numbers is None else [[each.start, each.stop] for each in numbers],
            "counts": None if counted is None else counts_as_dict(merged_rows([counted])),
            "samples_streamed": place.samples,
        }
        self._channel.send("done", json.dumps(found).encode(), digest=self._source.digest)

    def _done(self, **fields: Any) -> None:
        """Answer with the digests of the batches since the last answer, up to batch `total`."""
        digests, self._digests = self._digests, []
        data = struct.pack(f"<{len(digests)}Q", *digests)
        self._channel.send("done", data, total=self._source.position.total, **fields)
