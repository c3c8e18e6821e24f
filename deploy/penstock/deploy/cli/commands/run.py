"""Command `penstock run`, with `penstock run close`."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.deploy.cli.completion import run_names
from penstock.deploy.console.common_options import subcommands
from penstock.deploy.console.coordinator_options import Peer
from penstock.deploy.console.exit_codes import guarded
from penstock.deploy.console.options import AsJson, Debug

__all__ = ["run"]

run = subcommands(no_args_is_help=True)


@run.callback()
def _run() -> None:
    """End a run whose training job is gone or hangs (`penstock run close JOB`).

    \b
    Examples:
      penstock run close myjob
    """


@run.command("close")
@guarded
def run_close(
    name: Annotated[
        str,
        typer.Argument(
            metavar="JOB[/ORDINAL]",
            help="The run, as `penstock status` shows it; JOB: all runs of the job.",
            autocompletion=run_names,
        ),
    ],
    *,
    peer: Peer,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """End a run, or all runs of a job: its workers are free immediately, without a wait for the end of its lease.

    A training job that still reads gets an error (SupersededError) that names this command. The next launch opens the
    run again. For a run that is closed already, nothing happens, and the exit code is 0.

    \b
    Examples:
      penstock run close myjob                 all loaders of the job
      penstock run close myjob/1               its second loader alone
    """
    from penstock.deploy.operations.close_runs import close_runs

    close_runs(name, peer, as_json)
