"""Shell completion of the names of runs and workers, which the coordinator reports.

A person waits for the completion, so the coordinator has one second to answer. After any failure no names are offered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import typer

from penstock.proto.errors import PenstockError

__all__ = ["run_names", "worker_names"]

DEADLINE_S = 1.0


def run_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the names of runs (JOB/N) that complete the text `incomplete`."""
    return _names(ctx, incomplete, lambda reply: [run.run for run in reply.runs])


def worker_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the names of registered workers that complete the text `incomplete`."""
    return _names(ctx, incomplete, lambda reply: [worker.worker for worker in reply.workers])


def _names(ctx: typer.Context, incomplete: str, of: Callable[[Any], list[str]]) -> list[str]:
    from penstock.deploy.console.common_options import quiet_grpc

    quiet_grpc()
    from penstock.deploy.console.coordinator_options import Peer

    try:
        with Peer(**{each.name: ctx.params.get(each.name) for each in fields(Peer)}).client() as client:
            return [name for name in of(client.status(deadline_s=DEADLINE_S)) if name.startswith(incomplete)]
    except PenstockError:
        return []
