"""Command `penstock down`."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.deploy.console.fleet_settings import UpSettings
from penstock.deploy.console.options import AsJson, Debug, option

__all__ = ["down"]


def down(
    name: Annotated[str | None, option(UpSettings, "name")] = None,
    dir: Annotated[str | None, option(UpSettings, "dir")] = None,
    timeout: Annotated[
        float,
        typer.Option("--timeout", metavar="SECONDS", min=1, help="Time for an orderly end before it is killed."),
    ] = 60.0,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """End what `penstock up` started, on any engine: workers first, then the coordinator.

    Journal, token and logs stay, so that `penstock up` continues from there. Exit code 0 also if nothing runs.

    \b
    Examples:
      penstock down
      penstock down --name eval
    """
    from penstock.deploy.engines.up_down import run_down

    run_down({"name": name, "dir": dir}, timeout, as_json)
