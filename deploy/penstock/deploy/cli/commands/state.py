"""Command `penstock state`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.deploy.console.options import LARGEST, AsJson
from penstock.deploy.console.peer import Peer
from penstock.proto.errors import InvalidArgumentError


def state(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="JOB/ORDINAL as `penstock status` shows it; JOB is JOB/0. Or a FILE with a saved state.",
        ),
    ],
    step: Annotated[
        int | None,
        typer.Option(
            "--step",
            metavar="S",
            min=0,
            max=LARGEST,
            help="Step of the boxes. Default: the last one that every box has received.",
        ),
    ] = None,
    deadline: Annotated[
        float,
        typer.Option("--deadline", metavar="SECONDS", min=0.1, max=3600, help="Time to wait for the workers."),
    ] = 60.0,
    *,
    peer: Peer,
    as_json: AsJson = False,
) -> None:
    """Show the state of a run at a step. It has one DataLoaderCheckpoint for each worker of every box.

    Does not disturb the run. A step whose state is no longer kept is an error that names the available steps. A FILE
    that encode_state or torch.save wrote is read without a coordinator.

    \b
    Examples:
      penstock state myjob                          at the last step that every box has received
      penstock state myjob/1 --step 1200            the job's second loader, at a step
      penstock state myjob --json | jq '.workers[].samples_streamed'
      penstock state ckpt.pt                        what a saved state says, with counts by source
    """
    path = Path(run)
    if path.is_file():
        from penstock.deploy.operations.show_state import show_state_file

        if step is not None:
            raise InvalidArgumentError(
                f"--step must be given only with a RUN, got the file {run}, whose state has one step. Omit --step"
            )
        show_state_file(path, as_json)
        return
    from penstock.deploy.operations.show_state import show_state

    show_state(run, step, deadline, peer, as_json)
