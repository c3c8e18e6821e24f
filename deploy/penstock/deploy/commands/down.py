"""`penstock down`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.deploy.options import AsJson, Debug

__all__ = ["down"]


def down(
    name: Annotated[
        str,
        typer.Option("--name", metavar="NAME", envvar="PENSTOCK_UP_NAME", help="Of the fleet, as for `penstock up`."),
    ] = "penstock",
    dir: Annotated[
        Path | None,
        typer.Option(
            "--dir", metavar="DIR", envvar="PENSTOCK_UP_DIR", help="Its folder, if `penstock up` was given one."
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=1, help="For an orderly end; then it is killed.")
    ] = 60.0,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """End what `penstock up` started, whichever engine it was: workers first, then the coordinator.

    Its journal, token and logs stay, so that `penstock up` goes on where it was. Ends with 0 if nothing is up, too.

    \b
    Examples:
      penstock down
      penstock down --name eval
    """
    from penstock.deploy.engines.command import run_down

    run_down(name, dir, timeout, as_json)
