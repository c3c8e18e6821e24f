"""Shell completion of names. A person waits: the coordinator has one second, and a failure means no names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer

from penstock.proto.errors import PenstockError

DEADLINE_S = 1.0


def run_names(ctx: typer.Context, incomplete: str) -> list[str]:
    return _names(ctx, incomplete, lambda reply: [run.run for run in reply.runs])


def worker_names(ctx: typer.Context, incomplete: str) -> list[str]:
    return _names(ctx, incomplete, lambda reply: [worker.worker for worker in reply.workers])


def _names(ctx: typer.Context, incomplete: str, of: Callable[[Any], list[str]]) -> list[str]:
    from penstock.deploy.console.app import quiet_grpc
    from penstock.deploy.console.peer import Peer
    from penstock.deploy.console.settings import PeerSettings

    quiet_grpc()
    try:
        named = ("job", "token_file", *PeerSettings.model_fields)
        with Peer(**{name: ctx.params.get(name) for name in named}).client() as client:
            return [name for name in of(client.status(deadline_s=DEADLINE_S)) if name.startswith(incomplete)]
    except PenstockError:
        return []
