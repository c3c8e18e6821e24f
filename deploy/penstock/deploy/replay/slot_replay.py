"""The children of `penstock replay`: one for each worker of the box, in which the user's loader runs as it ran there.

One fresh interpreter imports torch and forks them, as a worker's fork server does. A child is told where to start, and
then how far to go; it tells the digest of each batch on the way, and shows the one that it has made last. What it is
asked:

    start   build the loader; go to where an attempt, a saved state or a snapshot begins, and on to a place
    go      on to batch `total` of epoch `epoch`, or to the end of that epoch
    leave   the epoch, as the training loop did
    show    the batch that was made last: what is in it, and as a file
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import time
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy.random  # noqa: F401  # what every child needs, loaded once
import torch

from penstock.deploy.forking_interpreter import begin, fork
from penstock.deploy.operations import batch_tables
from penstock.proto.batch.digest import cover_of
from penstock.proto.batch.replay_digest import ReplayDigest
from penstock.proto.errors import LaneLostError, ReplayMismatchError
from penstock.proto.state.codec import decode_state
from penstock.proto.v1 import records_pb2
from penstock.runtime.process import forks
from penstock.worker.loader.epoch_crossing import catch_up, leave
from penstock.worker.loader.restart_points import RestartPoint
from penstock.worker.loader.restorable_loader import RestorableLoader
from penstock.worker.loader.start import start
from penstock.worker.processes.control_channel import ControlChannel, ControlMessage, plain_detail

__all__ = ["main"]

TELL_S = 0.5
"""How often a child tells how far it is."""


def main() -> None:
    """Fork children, each for a socket that comes with the order, until the inherited one closes."""
    torch.set_num_threads(1)
    control = begin()
    with contextlib.suppress(LaneLostError):
        while True:
            order = cast(ControlMessage, control.receive())
            if order.kind == "reap":
                _, status = os.waitpid(order.fields["pid"], 0)
                control.send("reaped", status=os.waitstatus_to_exitcode(status))
                continue
            (fd,) = order.fds
            pid = fork(partial(_child, control, fd))
            os.close(fd)
            control.send("forked", pid=pid)


def _child(control: ControlChannel, fd: int) -> None:
    control.close()
    with contextlib.suppress(LaneLostError):
        _serve(ControlChannel(socket.socket(fileno=fd)))


def _serve(channel: ControlChannel) -> None:
    worker: _SlotReplay | None = None
    forks.keep(channel)
    while True:
        task = cast(ControlMessage, channel.receive())
        parts = [cast(ControlMessage, channel.receive()).payload for _ in range(task.fields["parts"])]
        try:
            if task.kind == "start":
                worker = _SlotReplay(channel, records_pb2.WorkerAssignment.FromString(task.payload))
                worker.start(parts, task.fields)
            else:
                assert worker is not None
                getattr(worker, task.kind)(**{name: v for name, v in task.fields.items() if name != "parts"})
        except LaneLostError:
            raise
        except Exception as error:
            channel.send("failed", error=plain_detail(error))


class _SlotReplay:
    """One worker's loader."""

    def __init__(self, channel: ControlChannel, assignment: records_pb2.WorkerAssignment) -> None:
        self._channel = channel
        self._source = RestorableLoader(assignment)
        self._replay_digest = ReplayDigest(cover=cover_of(assignment.loader.options))
        self._batch: Any = None
        self._digests: list[int] = []
        self._point: RestartPoint | None = None
        self._left: dict[int, int] = {}
        self._told = 0.0

    def start(self, parts: list[bytes], fields: dict[str, Any]) -> None:
        """From a snapshot, a saved state, or nothing, to `total` in epoch `epoch`."""
        source, total, epoch = self._source, fields["total"], fields["epoch"]
        source.build()
        if fields["snapshot"]:
            self._point = RestartPoint.decode(parts[0])
            source.restore(self._point)
        else:
            resume = cast(dict[str, Any], decode_state(parts[0])) if parts else None
            start(source, resume, self._keep, self._seek)
        self._seek(total, epoch, 0)
        catch_up(source, epoch if fields["live"] else epoch + 1)
        self._done(capabilities=source.capabilities.state_methods)

    def _keep(self, point: RestartPoint, _: bool) -> None:
        self._point = point

    def _seek(self, total: int, epoch: int, digest: int) -> None:
        """To a place that is known to have been reached. `digest`: of its last batch, if known."""
        source = self._source
        replayed = source.position.total < total
        if not source.seek(total, epoch, self._seen):
            raise ReplayMismatchError(
                f"{source.name}: pass {epoch} ended after batch {source.position.total} of the worker, but batch {total} "
                "had been delivered: its data or its code are not what they were"
            )
        if replayed and digest and source.digest != digest:
            raise ReplayMismatchError(
                f"{source.name}: replayed, batch {total} of the worker is not the one that was delivered: its data or "
                "its code are not what they were, or it does not reproduce its batches (see penstock doctor)"
            )

    def _seen(self, batch: Any) -> None:
        source = self._source
        source.digest, samples = self._replay_digest.take(batch)
        source.position.samples += samples
        self._batch = batch
        self._digests.append(source.digest)
        if time.monotonic() - self._told > TELL_S:
            self._told = time.monotonic()
            self._channel.send("at", total=source.position.total)

    def go(self, epoch: int, total: int) -> None:
        reached = self._source.seek(total, epoch, self._seen)
        self._done(ended=not reached)

    def leave(self, epoch: int, total: int) -> None:
        """What was asked for beyond the end of its input is not what the loop did: then once more, up to there."""
        source = self._source
        if source.position.epoch > epoch:
            assert self._point is not None
            source.restore(self._point)
            for earlier in sorted(left for left in self._left if left >= self._point.position.epoch):
                self._seek(self._left[earlier], earlier, 0)
                leave(source, earlier, self._left[earlier])
            self._seek(total, epoch, 0)
            self._digests.clear()
        leave(source, epoch, total)
        self._left[epoch] = total
        self._done()

    def show(self, row: int | None, out: str | None) -> None:
        found = batch_tables.describe(self._batch, row)
        if out is not None:
            batch_tables.write(self._batch, Path(out))
        place = self._source.position
        text = json.dumps({**found, "samples_streamed": place.samples}).encode()
        self._channel.send("done", text, digest=self._source.digest)

    def _done(self, **fields: Any) -> None:
        """Tells the digests of the batches since the last answer, which end with batch `total`."""
        digests, self._digests = self._digests, []
        data = struct.pack(f"<{len(digests)}Q", *digests)
        self._channel.send("done", data, total=self._source.position.total, **fields)
