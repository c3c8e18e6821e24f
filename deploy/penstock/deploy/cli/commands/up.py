"""Commands `penstock up` and `penstock down`."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.deploy.console.app import quiet_grpc
from penstock.deploy.console.options import AsJson, Debug, Flags, TokenFile, option
from penstock.deploy.console.settings import UpSettings


def up(
    flags: Annotated[Flags, UpSettings],
    detach: Annotated[
        bool,
        typer.Option("--detach", help="Local: return once the fleet is ready, and leave it running, as Ray does."),
    ] = False,
    token_file: TokenFile = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Start and supervise a coordinator and workers. They run here, or on Ray.

    Once all are ready, prints the variables by which a training job finds the fleet. In the foreground Ctrl-C ends the
    fleet; otherwise `penstock down` does. Called again with another --workers, it changes the number of workers of the
    fleet that runs: those that drain, have left or have failed end first.

    \b
    Examples:
      penstock up --allow mypackage                             here, until Ctrl-C
      eval "$(penstock up --detach --allow mypackage)"          here, in the background
      penstock up --detach --allow mypackage --workers 4        and now with four workers
      penstock up --engine ray --workers 8 --allow mypackage --insecure
    """
    quiet_grpc()
    from penstock.deploy.engines.up_down import run_up

    run_up(flags, token_file, detach=detach, as_json=as_json, debug=debug)


def down(
    name: Annotated[str | None, option(UpSettings, "name")] = None,
    dir: Annotated[str | None, option(UpSettings, "dir")] = None,
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout", metavar="SECONDS", min=1, help="Time for an orderly end, before processes are killed."
        ),
    ] = 60.0,
    as_json: AsJson = False,
) -> None:
    """End what `penstock up` started. Workers end first, then the coordinator.

    Journal, token and logs stay, so that `penstock up` continues from there. Exit code 0 also if nothing runs.

    \b
    Examples:
      penstock down
      penstock down --name eval
    """
    from penstock.deploy.engines.up_down import run_down

    run_down({"name": name, "dir": dir}, timeout, as_json)
