"""Shell completion of names that the coordinator knows: runs and workers.

A person waits for it with a finger on the key: the coordinator has a second, and whatever goes wrong, no names come.
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
    """Runs, as JOB/ORDINAL."""
    return _names(ctx, incomplete, lambda reply: [run.run for run in reply.runs])


def worker_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Workers that have registered."""
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
