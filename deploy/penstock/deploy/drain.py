"""`penstock worker drain`: a worker hands its slots over, so that its machine can be taken away."""

from __future__ import annotations

import json
import sys
import time

from penstock.deploy.peer import Peer
from penstock.proto.errors import DeadlineError

__all__ = ["drain"]

LOOK_S = 0.3
"""Between two questions how far it is."""


def drain(
    worker: str,
    undo: bool,
    timeout_s: float,
    peer: Peer,
    as_json: bool,
) -> None:
    """Give the order, and wait until the worker has nothing left. Raises DeadlineError if it still has slots then."""
    with peer.client() as client:
        until, told = time.monotonic() + timeout_s, -1
        while True:
            left = client.drain(worker, undo=undo)
            if undo or not left.slots or time.monotonic() > until:
                break
            if left.slots != told and not as_json:
                told = left.slots
                print(f"worker {worker}: {told} slots to hand over", file=sys.stderr)
            time.sleep(LOOK_S)
    if as_json:
        print(json.dumps({"worker": worker, "draining": not undo, "slots": left.slots, "stuck": left.stuck}))
    elif undo:
        print(f"worker {worker} takes slots again; it has {left.slots}")
    elif not left.slots:
        print(f"worker {worker} is drained: it has no slots and gets none; stop it, or take it back with --undo")
    if left.slots and not undo and timeout_s:
        why = f"; for {left.stuck} of them there is no place elsewhere: start workers" if left.stuck else ""
        raise DeadlineError(
            f"worker {worker} still has {left.slots} slots after {timeout_s:g} s, which go on{why}. It drains on, "
            "until --undo says otherwise"
        )
