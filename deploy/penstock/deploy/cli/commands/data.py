"""Commands `penstock data index`, `penstock data inspect` and `penstock data verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.deploy.console.common_options import Group, subcommands
from penstock.deploy.console.exit_codes import guarded
from penstock.deploy.console.options import AsJson, Debug

__all__ = ["data"]

Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="Local folder of a dataset.")]

data = subcommands(Group, no_args_is_help=True)


@data.callback()
def _data() -> None:
    """Index files of other libraries, and look at a dataset.

    \b
    Examples:
      penstock data index /data/web            JSON lines, CSV, tars, Parquet, Arrow, TFRecords, token files
      penstock data inspect /data/web          what is in it
      penstock data verify /data/web           read all of it
    """


@data.command("index")
@guarded
def data_index(
    folder: Folder,
    format: Annotated[
        str | None,
        typer.Option("--format", metavar="NAME", help="Format of the files. Default: the one whose files are there."),
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Write the index of files that other libraries wrote, so that StreamingDataset reads them where they lie.

    Hidden files, and those whose names begin with `_`, are left out. A call continues one that was killed.

    \b
    Examples:
      penstock data index /data/web
      penstock data index /data/records --format tfrecord-bytes
    """
    from penstock.deploy.datasets.dataset_folders import show_index

    show_index(folder, format, as_json)


@data.command("inspect")
@guarded
def data_inspect(
    folder: Folder,
    samples: Annotated[
        int, typer.Option("--samples", metavar="N", min=0, max=1000, help="Number of samples to show.")
    ] = 3,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show a dataset's format, its shards, samples and bytes, and the columns of its first samples.

    \b
    Examples:
      penstock data inspect /data/web
      penstock data inspect /data/web --samples 1 --json
    """
    from penstock.deploy.datasets.dataset_folders import show_inspection

    show_inspection(folder, samples, as_json)


@data.command("verify")
@guarded
def data_verify(folder: Folder, as_json: AsJson = False, debug: Debug = False) -> int:
    """Read every sample of a dataset, and compare files with the hashes that its index has.

    Names each file that is damaged or missing. Exit code 28 if there is one.

    \b
    Examples:
      penstock data verify /data/web
    """
    from penstock.deploy.datasets.dataset_folders import show_verification

    return show_verification(folder, as_json)
