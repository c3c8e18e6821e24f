"""Command `penstock status`."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.deploy.console.coordinator_options import Peer
from penstock.deploy.console.options import AsJson, Debug

__all__ = ["status"]


def status(
    peer: Peer,
    show_all: Annotated[bool, typer.Option("--all", help="Also show each run that has ended.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show runs, boxes, slots and workers: rates, and which box waits for which worker.

    Runs with a live training job come first. Runs that have ended are counted in one line.

    \b
    Examples:
      penstock status
      penstock status --coordinator head:7070 --token-file ~/penstock/token
      penstock status --json | jq '.workers[] | select(.live | not) | .worker'
    """
    from penstock.deploy.operations.show_status import show_status

    show_status(peer, show_all=show_all, as_json=as_json)
