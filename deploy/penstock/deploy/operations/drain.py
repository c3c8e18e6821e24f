"""`penstock worker drain`: a worker migrates its slots, so that its machine can be removed. The order is sent until it
is answered, then only polled: so it does not override an --undo given elsewhere, and survives a restart of the
coordinator, before it and after."""

from __future__ import annotations

import json
import sys
import time

from penstock.deploy.console.peer import Peer
from penstock.proto.errors import CoordinatorUnavailableError, DeadlineError, SupersededError, UnknownWorkerError
from penstock.proto.rpc.calls import CoordinatorClient
from penstock.proto.v1 import coordinator_pb2 as pb

POLL_S = 0.3
GONE_S = 10.0
"""Seconds after which a coordinator counts as gone, and an unknown worker as ended; a restart takes a few seconds, and
heartbeats then come within about one."""


def drain(worker: str, undo: bool, timeout_s: float, peer: Peer, as_json: bool) -> None:
    """Order a worker to give up its slots and wait until it has none, or, by `undo`, to take slots again. Raises
    DeadlineError, or SupersededError if the order was withdrawn or the worker restarted."""
    with peer.client() as client:
        left = _order(client, worker, undo)
        if not undo and timeout_s:
            left = _wait(client, worker, left, time.monotonic() + timeout_s, quiet=as_json)
            if left.slots:
                raise DeadlineError(f"{_still(worker, left)} after {timeout_s:g} s. It keeps draining until --undo")
    if as_json:
        found = {"worker": worker, "draining": not undo}
        print(json.dumps({**found, "slots": left.slots, "stuck": left.stuck, "failed": left.failed}))
    elif undo:
        print(f"worker {worker} takes slots again; it has {left.slots}")
    elif left.slots:
        print(f"{_still(worker, left)}. It keeps draining until --undo")
    else:
        print(f"worker {worker} is drained: it has no slots and gets none; stop it, or withdraw the drain with --undo")


def _order(client: CoordinatorClient, worker: str, undo: bool) -> pb.DrainWorkerReply:
    """Send the order. Try again for GONE_S seconds if the coordinator is away, which may just restart."""
    give_up, was_away = time.monotonic() + GONE_S, False
    while True:
        try:
            return client.drain(worker, undo=undo)
        except (CoordinatorUnavailableError, DeadlineError):
            if time.monotonic() > give_up:
                raise
            was_away = True
        except UnknownWorkerError:  # the worker may not have found the coordinator again
            if not was_away or time.monotonic() > give_up:
                raise
        time.sleep(POLL_S)


def _wait(
    client: CoordinatorClient, worker: str, left: pb.DrainWorkerReply, until: float, *, quiet: bool
) -> pb.DrainWorkerReply:
    """Wait until the worker has no slots, or is unknown for GONE_S seconds, or until `until` (monotonic), and return
    the last report. `quiet`: do not print the number of slots."""
    session, printed, seen = left.session, -1, time.monotonic()
    while left.slots and time.monotonic() < until:
        if left.slots != printed and not quiet:
            printed = left.slots
            print(f"worker {worker}: {printed} slots to move", file=sys.stderr)
        time.sleep(POLL_S)
        try:
            left = client.drain(worker, look=True)
        except (CoordinatorUnavailableError, DeadlineError):
            seen = time.monotonic()
            continue
        except UnknownWorkerError:
            if time.monotonic() - seen > GONE_S:
                return pb.DrainWorkerReply(draining=True)
            continue
        seen = time.monotonic()
        if left.session != session:
            raise SupersededError(
                f"worker {worker} was restarted meanwhile, and its new process is not draining. Run the command again"
            )
        if not left.draining:
            raise SupersededError(
                f"worker {worker} takes slots again, because another command ended the drain (--undo). Run "
                "the command again to drain it"
            )
    return left


def _still(worker: str, left: pb.DrainWorkerReply) -> str:
    remedy = left.stuck_because or "start workers"
    why = f"; no other worker has free capacity for {left.stuck} of these slots: {remedy}" if left.stuck else ""
    if left.failed:
        why += f"; {left.failed} of these slots have failed, and stay until their training job ends"
    return f"worker {worker} still runs {left.slots} slots{why}"
