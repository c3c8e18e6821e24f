"""Commands `penstock checkpoint ls`, `show`, `verify` and `export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.deploy.console.app import subcommands
from penstock.deploy.console.options import AsJson

Checkpoint = Annotated[
    str,
    typer.Argument(metavar="CHECKPOINT", help="Folder of a checkpoint; or a folder of checkpoints, for its newest."),
]

checkpoint = subcommands(no_args_is_help=True)


@checkpoint.callback()
def _checkpoint() -> None:
    """List, show, verify and export checkpoints.

    Checkpoints are those of AsyncCheckpointer, or of torch's dcp.save, which has no checksums to verify. A folder may
    be in a bucket, s3://BUCKET/RUN. The environment then says which server and key, as for other programs.

    \b
    Examples:
      penstock checkpoint ls run1/checkpoints
      penstock checkpoint show run1/checkpoints/step-1000
      penstock checkpoint verify run1/checkpoints               read all of them
      penstock checkpoint export run1/checkpoints --key model --to model.safetensors
    """


@checkpoint.command("ls")
def checkpoint_ls(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="Folder of checkpoints.")], as_json: AsJson = False
) -> None:
    """List checkpoints: step, size, time, found.

    The newest is the first; those of dcp.save are at the end. Found is "whole" if every file has its size.

    \b
    Examples:
      penstock checkpoint ls run1/checkpoints
      penstock checkpoint ls run1/checkpoints --json | jq '.checkpoints[].step'
    """
    from penstock.deploy.operations.checkpoint_folders import show_list

    show_list(folder, as_json)


@checkpoint.command("show")
def checkpoint_show(path: Checkpoint, as_json: AsJson = False) -> None:
    """Show names, dtypes, shapes and bytes of all values.

    \b
    Examples:
      penstock checkpoint show run1/checkpoints/step-1000
    """
    from penstock.deploy.operations.checkpoint_folders import show_content

    show_content(path, as_json)


@checkpoint.command("verify")
def checkpoint_verify(
    path: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="Folder of a checkpoint; or a folder of checkpoints, for all.")
    ],
    as_json: AsJson = False,
) -> None:
    """Read checkpoints, and compare every file with its checksum.

    Names each file that is damaged or missing; the exit code is then 24.

    \b
    Examples:
      penstock checkpoint verify run1/checkpoints
      penstock checkpoint verify run1/checkpoints/step-1000 --json
    """
    from penstock.deploy.operations.checkpoint_folders import show_verification

    show_verification(path, as_json)


@checkpoint.command("export")
def checkpoint_export(
    path: Checkpoint,
    to: Annotated[Path, typer.Option("--to", metavar="FILE", help="File to write: FILE.safetensors or FILE.pt.")],
    key: Annotated[
        str | None,
        typer.Option("--key", metavar="NAME", help="Only what was saved under this name; others begin with it."),
    ] = None,
    leave_out: Annotated[
        bool, typer.Option("--leave-out", help="Leave out, and name, what FILE cannot hold. Default: an error.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint's values to one file, for other programs.

    FILE.safetensors holds tensors alone, by their names (pip install safetensors). FILE.pt holds the nested state as it
    was saved, and torch.load reads it with weights_only=True. Needs memory for all values. The checksums of what is
    read are compared.

    \b
    Examples:
      penstock checkpoint export run1/checkpoints --key model --to model.safetensors
      penstock checkpoint export run1/checkpoints/step-1000 --to state.pt
    """
    from penstock.deploy.operations.export_checkpoint import show_export

    show_export(path, to, key, leave_out, as_json)
