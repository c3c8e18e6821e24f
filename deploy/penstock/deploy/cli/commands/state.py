"""Command `penstock state`, and `penstock state convert`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.deploy.cli.completion import run_names
from penstock.deploy.console.common_options import Group, subcommands
from penstock.deploy.console.coordinator_options import Peer
from penstock.deploy.console.exit_codes import guarded
from penstock.deploy.console.options import LARGEST, AsJson, Debug
from penstock.proto.errors import InvalidArgumentError

__all__ = ["state"]


class _ShowsByDefault(Group):
    """Group of commands in which `penstock state RUN` means `penstock state show RUN`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["show", *args]
        return super().parse_args(ctx, args)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Return the words that complete the text `incomplete`: subcommands (`show`, `convert`) and names of runs."""
        completed = super().shell_complete(ctx, incomplete)
        if incomplete.startswith("-"):
            return completed
        show = self.commands["show"]
        context = show.make_context("show", [], parent=ctx, resilient_parsing=True)
        run = next(parameter for parameter in show.params if parameter.name == "run")
        return [*completed, *run.shell_complete(context, incomplete)]


state = subcommands(_ShowsByDefault, no_args_is_help=True)


@state.callback()
def _state() -> None:
    """Show the state of a run at a step (`penstock state RUN`) or in a file (`penstock state FILE`), or convert a saved
    state to another topology (numbers of boxes and workers).

    \b
    Examples:
      penstock state myjob                                        where the run is, and each worker's state
      penstock state ckpt.pt                                      what a saved state says: step, topology, counts
      penstock state convert ckpt.pt new.pt --boxes 2 --workers 8
    """


@state.command("show")
@guarded
def state_show(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="JOB/ORDINAL as `penstock status` shows it; JOB is JOB/0. Or a FILE with a saved state.",
            autocompletion=run_names,
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
    debug: Debug = False,
) -> None:
    """Show the state of a run at a step: one DataLoaderCheckpoint for each worker of every box.

    Does not disturb the run. A step whose state is no longer kept is an error that names the available steps
    (exit code 20). A FILE that encode_state or torch.save wrote is read without a coordinator.

    \b
    Examples:
      penstock state myjob                          at the last step that every box has received
      penstock state show myjob/1 --step 1200       the job's second loader, at a step
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


@state.command("convert")
@guarded
def state_convert(
    source: Annotated[Path, typer.Argument(metavar="IN", help="File with what DataLoader.state_dict() returned.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="File to write, of the same kind.")],
    boxes: Annotated[int, typer.Option("--boxes", metavar="R", min=1, help="Boxes of the resumed job.")],
    workers: Annotated[int, typer.Option("--workers", metavar="W", min=1, help="Workers of each box.")],
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Convert a saved state to another number of boxes and workers, and report the consequences.

    IN is written by encode_state or torch.save. The state may be part of a larger checkpoint, whose rest is copied. A
    loader without the four state methods cannot change its topology (exit code 22).

    \b
    Examples:
      penstock state convert ckpt.pt new.pt --boxes 2 --workers 8
      penstock state convert ckpt.pt /dev/null --boxes 2 --workers 8 --json       can it be done?
    """
    from penstock.deploy.operations.convert_state import show_convert

    show_convert(source, target, boxes, workers, as_json)
