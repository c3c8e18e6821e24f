"""`penstock doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.deploy.options import (
    AsJson,
    Debug,
)

__all__ = ["doctor"]


def doctor(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:NAME|CHECKPOINT",
            help="An input_fn, importable from here; or the folder of a checkpoint, or one with checkpoints in it.",
        ),
    ],
    args: Annotated[str, typer.Option("--args", metavar="JSON", help="Its positional arguments, a JSON list.")] = "[]",
    kwargs: Annotated[str, typer.Option("--kwargs", metavar="JSON", help="Its named ones, a JSON object.")] = "{}",
    batches: Annotated[
        int, typer.Option("--batches", metavar="N", min=2, max=5000, help="Batches to stream from each worker.")
    ] = 32,
    workers: Annotated[int, typer.Option("--workers", metavar="W", min=1, max=64, help="Workers of the one box.")] = 1,
    replay: Annotated[
        bool,
        typer.Option("--replay", help="A loader without state methods may be saved by replay: Appliance(replay=True)."),
    ] = False,
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Of the run.")] = 0,
    deadline: Annotated[
        float, typer.Option("--deadline", metavar="SECONDS", min=1, help="For each child process that runs the loader.")
    ] = 300.0,
    as_json: AsJson = False,
    debug: Debug = False,
) -> int:
    """Check beforehand whether a loader can be saved and resumed exactly; or whether checkpoints are whole.

    Of a loader: streams N batches with a snapshot after each, restores some of them in fresh processes, and compares
    what comes next: the check that every run makes, and more of it. Exit code 0: it can. 30: a restored loader yields
    other batches. 31: it streams well, but cannot be saved as it is.

    Of checkpoints: reads all files and compares them with what was written. 24: one is damaged, which is named.
    """
    from penstock.deploy.checkpoints import is_path, show_checkpoints

    if is_path(target):
        return show_checkpoints(Path(target), as_json)
    from penstock.deploy.doctor import Question
    from penstock.deploy.report import show_doctor

    return show_doctor(Question(target, args, kwargs, batches, workers, replay, seed, deadline), as_json)
