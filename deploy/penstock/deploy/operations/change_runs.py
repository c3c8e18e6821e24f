"""`penstock run close` and `penstock mix`. Each order of `mix` has a random key: if the coordinator restarts before it
answers, the order is sent again, and the key says whether the change was already made."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence

from penstock.deploy.console.options import listed, pairs_of
from penstock.deploy.console.peer import Peer
from penstock.deploy.console.tables import Table, show
from penstock.proto.errors import CoordinatorUnavailableError, InvalidArgumentError
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import records_pb2
from penstock.runtime.telemetry.logs import printable

RETRY_S = 0.3
"""Seconds between two calls while the coordinator is unreachable."""


def close_runs(name: str, peer: Peer, as_json: bool) -> None:
    with peer.client() as client:
        runs = client.end_run(name).runs
    if as_json:
        print(json.dumps([{"run": run.run, "attempt": run.attempt, "was_open": run.was_open} for run in runs]))
        return
    for run in runs:
        if run.was_open:
            print(printable(f"run {run.run} is closed: attempt {run.attempt} was ended"))
        else:
            print(printable(f"run {run.run} had been closed before"))


def mixture_order(
    run: str, from_step: int, weights: str | None, added: Sequence[str], retired: Sequence[str], *, dry_run: bool
) -> pb.ChangeMixtureRequest:
    """Return the order that the command's options describe, with a new key. Raises InvalidArgumentError."""
    given = [] if weights is None else listed("--weights", weights)
    if not given and not retired:
        raise InvalidArgumentError("--weights or --retire must be given, got neither. Give the new weights")
    return pb.ChangeMixtureRequest(
        run=run,
        key=secrets.token_hex(8),
        from_step=from_step,
        weights=[pb.AskedWeight(source=name, weight=weight) for name, weight in pairs_of("--weights", given).items()],
        added=[records_pb2.AddedSource(source=name, function=fn) for name, fn in pairs_of("--add", added).items()],
        retired=retired,
        dry_run=dry_run,
    )


def change_mixture(order: pb.ChangeMixtureRequest, deadline_s: float, peer: Peer, *, as_json: bool) -> None:
    """Change the weights of a run's mixture, or only try that, and print the change."""
    until = time.monotonic() + deadline_s
    with peer.client() as client:
        while True:
            order.deadline_s = max(1.0, until - time.monotonic())
            try:
                reply = client.change_mixture(order)
                break
            except CoordinatorUnavailableError:
                if time.monotonic() + RETRY_S > until:
                    raise
                time.sleep(RETRY_S)
    (_print_json if as_json else _print)(reply, dry_run=order.dry_run)


def _print_json(reply: pb.ChangeMixtureReply, *, dry_run: bool) -> None:
    shares = [{"source": share.source, "was": share.was, "now": share.now} for share in reply.shares]
    found = {
        "run": reply.run,
        "from_step": reply.change.step,
        "from_sample": reply.change.position,
        "sources": shares,
        "slots": reply.slots,
        "batches_again": reply.batches,
        "changed": not dry_run,
    }
    print(json.dumps(found))


def _print(reply: pb.ChangeMixtureReply, *, dry_run: bool) -> None:
    change = reply.change
    verb = "would change" if dry_run else "changes"
    title = printable(f"The mixture of run {reply.run} {verb} from step {change.step} on (sample {change.position})")
    again = f"{reply.batches} batches that were made ahead {'would be' if dry_run else 'are'} made again"
    note = f"\n{reply.slots} slots {'would restart' if dry_run else 'restart'}; {again}"
    rows: list[Sequence[str]] = [(share.source, f"{share.was:.2%}", f"{share.now:.2%}") for share in reply.shares]
    show([Table(title, ["source", "share before>", "share after>"], rows, empty=title, note=note)])
