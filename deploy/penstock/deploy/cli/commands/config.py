"""Command `penstock config`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from penstock.deploy.console.options import AsJson


class WhoseSettings(StrEnum):
    """Command or daemon whose settings are shown."""

    coordinator = "coordinator"
    worker = "worker"
    client = "client"
    up = "up"


def config(
    of: Annotated[
        WhoseSettings | None,
        typer.Argument(
            metavar="[coordinator|worker|client|up]",
            help="Command whose settings to show; client: a training job. Default: all.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Show the effective settings, and the source of each.

    The values are those of a daemon or a training job that is started here without flags. Secrets are never shown. If a
    setting is invalid, the exit code is 2.

    \b
    Examples:
      penstock config                                   everything
      penstock config worker --config node.toml         what a worker would take from that file
      penstock config client --json | jq .settings      for a script
    """
    from penstock.deploy.operations.list_settings import show_config

    return show_config(of.value if of else None, as_json)
