"""Command `penstock status`."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.deploy.console.options import AsJson
from penstock.deploy.console.peer import Peer
from penstock.proto.errors import InvalidArgumentError


def status(
    run: Annotated[
        str | None,
        typer.Argument(metavar="RUN", help="Only JOB/ORDINAL, or all runs of a JOB; also ended ones."),
    ] = None,
    *,
    peer: Peer,
    show_all: Annotated[bool, typer.Option("--all", help="Also show each run that has ended.")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="On a terminal: a screen, refreshed each second, until Ctrl-C.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show runs, boxes, slots, workers and their rates. Names the worker that each box waits for.

    \b
    Examples:
      penstock status
      penstock status --watch
      penstock status myjob --watch
      penstock status --coordinator head:7070 --token-file ~/penstock/token
      penstock status --json | jq '.workers[] | select(.live | not) | .worker'
    """
    if watch:
        from penstock.deploy.operations.watch_status import watch_status

        if show_all or as_json:
            raise InvalidArgumentError(
                f"--watch must be given alone, got {'--all' if show_all else '--json'} too. Leave one out"
            )
        watch_status(run, peer)
        return
    from penstock.deploy.operations.show_status import show_status

    show_status(run, peer, show_all=show_all, as_json=as_json)
