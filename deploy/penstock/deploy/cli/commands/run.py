"""Commands that change a run: `penstock run close` ends it, `penstock mix` changes the weights of its mixture."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.deploy.console.app import subcommands
from penstock.deploy.console.options import LARGEST, AsJson
from penstock.deploy.console.peer import Peer

run = subcommands(no_args_is_help=True)


@run.callback()
def _run() -> None:
    """End a run whose training job is gone or hangs.

    \b
    Examples:
      penstock run close myjob
    """


@run.command("close")
def run_close(
    name: Annotated[
        str,
        typer.Argument(
            metavar="JOB[/ORDINAL]",
            help="The run, as `penstock status` shows it; JOB: all runs of the job.",
        ),
    ],
    *,
    peer: Peer,
    as_json: AsJson = False,
) -> None:
    """End a run, or all runs of a job. Frees the slots of its workers at once.

    A training job that still reads gets a SupersededError. The next launch opens the run again.

    \b
    Examples:
      penstock run close myjob                 all loaders of the job
      penstock run close myjob/1               its second loader alone
    """
    from penstock.deploy.operations.change_runs import close_runs

    close_runs(name, peer, as_json)


def mix(
    run: Annotated[
        str,
        typer.Argument(
            metavar="JOB[/ORDINAL]",
            help="The run, as `penstock status` shows it; JOB if the job has one loader.",
        ),
    ],
    *,
    from_step: Annotated[
        int,
        typer.Option("--from-step", metavar="S", min=1, max=LARGEST, help="First step with the new weights."),
    ],
    weights: Annotated[
        str | None,
        typer.Option("--weights", metavar="NAME=W,...", help="Weight of each source of the mixture, in any unit."),
    ] = None,
    add: Annotated[
        list[str] | None,
        typer.Option("--add", metavar="NAME=MODULE:FN", help="Add the source that this function returns; repeatable."),
    ] = None,
    retire: Annotated[
        list[str] | None,
        typer.Option("--retire", metavar="NAME", help="Give this source weight 0; repeatable."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Change nothing; only show what would change.")] = False,
    deadline: Annotated[
        float, typer.Option("--deadline", metavar="SECONDS", min=1.0, max=3600.0, help="Time limit of the command.")
    ] = 60.0,
    peer: Peer,
    as_json: AsJson = False,
) -> None:
    """Change the weights of a running job's mixture.

    They change from a step on, on all boxes, without a restart of the job. A worker tries the change first. If that
    fails, or if a box has taken step S, nothing changes, and the error names the lowest possible step. Later states,
    resumes and replays of the run include the change.

    \b
    Examples:
      penstock mix myjob --from-step 50000 --weights web=0.4,code=0.6
      penstock mix myjob --from-step 50000 --weights web=0.4,code=0.4,math=0.2 --add math=mypackage.data:math
      penstock mix myjob --from-step 50000 --retire web          the others keep their weights
      penstock mix myjob --from-step 50000 --retire web --dry-run
    """
    from penstock.deploy.operations.change_runs import change_mixture, mixture_order

    order = mixture_order(run, from_step, weights, add or [], retire or [], dry_run=dry_run)
    change_mixture(order, deadline, peer, as_json=as_json)
