"""Command `penstock replay`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.deploy.console.options import LARGEST, LARGEST_BOX, AsJson
from penstock.deploy.console.peer import Peer


def replay(
    step: Annotated[
        int,
        typer.Option(
            "--step", metavar="S", min=1, max=LARGEST, help="Step of the box at which the batch was delivered."
        ),
    ],
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="JOB/ORDINAL; JOB is JOB/0. Omit it to use a --checkpoint alone.",
        ),
    ] = None,
    box: Annotated[
        int, typer.Option("--box", metavar="B", min=0, max=LARGEST_BOX, help="Box (data-parallel rank).")
    ] = 0,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write the batch, to FILE.pst or FILE.pt.")
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option("--allow", metavar="PREFIX", help="Prefix of modules whose input_fn may run here; repeatable."),
    ] = None,
    checkpoint: Annotated[
        list[Path] | None,
        typer.Option("--checkpoint", metavar="FILE", help="File with a saved state to start from; repeatable."),
    ] = None,
    args: Annotated[
        str | None,
        typer.Option("--args", metavar="JSON", help="Positional arguments, a JSON list. Default: the run's."),
    ] = None,
    kwargs: Annotated[
        str | None,
        typer.Option("--kwargs", metavar="JSON", help="Keyword arguments, a JSON object. Default: the run's."),
    ] = None,
    script: Annotated[
        Path | None, typer.Option("--script", metavar="FILE", help="The training script, if input_fn is in it.")
    ] = None,
    deadline: Annotated[
        float, typer.Option("--deadline", metavar="SECONDS", min=1, help="Time limit of the replay.")
    ] = 3600.0,
    *,
    peer: Peer,
    as_json: AsJson = False,
) -> None:
    """Recreate a delivered batch bit for bit and show its content.

    Runs the loader here, in child processes, from the nearest restart point: a snapshot, a checkpoint, or the start.
    Compares the result with the stream digest, if one was recorded. Needs your data, and --allow. If the coordinator
    has stopped, start one on the same --state-dir first.

    \b
    Examples:
      penstock replay myjob --step 1234 --allow mypackage
      penstock replay myjob --step 1234 --box 3 --out spike.pt --allow mypackage
      penstock replay --checkpoint ckpt.pt --step 1300 --allow mypackage          without a coordinator
    """
    from penstock.deploy.replay.replay_batch import ReplayRequest
    from penstock.deploy.replay.replay_report import show_replay

    request = ReplayRequest(run, step, box, out, checkpoint or (), args, kwargs, allow or (), script, deadline)
    show_replay(request, peer, as_json)
