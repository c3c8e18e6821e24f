"""Commands `penstock data index`, `inspect`, `verify` and `convert`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.deploy.console.app import subcommands
from penstock.deploy.console.options import AsJson, listed, pairs_of

Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="Local folder of a dataset.")]

data = subcommands(no_args_is_help=True)


@data.callback()
def _data() -> None:
    """Index, inspect, verify and convert datasets.

    \b
    Examples:
      penstock data index /data/web            JSON lines, CSV, tars, Parquet, Arrow, TFRecords, token files
      penstock data inspect /data/web          what is in it
      penstock data verify /data/web           read all of it
      penstock data convert /data/web s3://bucket/web --to mds
    """


@data.command("index")
def data_index(
    folder: Annotated[
        str, typer.Argument(metavar="FOLDER", help="Folder of the files, local or any URL that fsspec opens.")
    ],
    format: Annotated[
        str | None,
        typer.Option("--format", metavar="NAME", help="Format of the files. Default: found from their names."),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(
            "--split", metavar="NAME", help='Index this split alone, a subfolder or by files\' names; "*": all as one.'
        ),
    ] = None,
    hashes: Annotated[
        bool, typer.Option("--hashes", help="Read all files, and write a hash of each into the index.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Local folder for the index. Default: the folder of the files."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write an index for files that other libraries wrote, or for the present snapshot of a table of Delta Lake or
    Iceberg. StreamingDataset then reads them in place.

    If the command is killed, run it again: it continues where it stopped, or begins anew (Parquet, remote folders
    without --out or prepared by Energon).

    \b
    Examples:
      penstock data index /data/web
      penstock data index /data/records --format tfrecord-bytes
      penstock data index s3://bucket/prepared --out /data/cache
    """
    from penstock.deploy.datasets.dataset_folders import show_index

    show_index(folder, format, as_json, split=split, hashes=hashes, out=out)


@data.command("inspect")
def data_inspect(
    folder: Folder,
    samples: Annotated[
        int, typer.Option("--samples", metavar="N", min=0, max=1000, help="Number of samples to show.")
    ] = 3,
    as_json: AsJson = False,
) -> None:
    """Show a dataset's format, size, columns and first samples.

    \b
    Examples:
      penstock data inspect /data/web
      penstock data inspect /data/web --samples 1 --json
    """
    from penstock.deploy.datasets.dataset_folders import show_inspection

    show_inspection(folder, samples, as_json)


@data.command("verify")
def data_verify(folder: Folder, as_json: AsJson = False) -> int:
    """Read every sample of a dataset, to find damage.

    Compares files with the hashes in its index, or with what indexing read of them. Names each damaged or missing
    file; the exit code is then 28.

    \b
    Examples:
      penstock data verify /data/web
    """
    from penstock.deploy.datasets.dataset_folders import show_verification

    return show_verification(folder, as_json)


@data.command("convert")
def data_convert(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Folder or URL of a dataset with an index.")],
    dest: Annotated[
        str, typer.Argument(metavar="DEST", help="Folder or URL for the result; empty, or with finished parts.")
    ],
    to: Annotated[str, typer.Option("--to", metavar="FORMAT", help="Format of the result: mds or parquet.")],
    columns: Annotated[
        str | None, typer.Option("--columns", metavar="A,B", help="Columns to convert. Default: all.")
    ] = None,
    types: Annotated[
        list[str] | None,
        typer.Option("--as", metavar="NAME=TYPE", help="Type of a column: an MDS encoding or Arrow type. Repeatable."),
    ] = None,
    compression: Annotated[
        str, typer.Option("--compression", metavar="NAME", help="none, zstd, ... Default: none for MDS, else zstd.")
    ] = "default",
    hashes: Annotated[
        str | None, typer.Option("--hashes", metavar="A,B", help="Hashes of MDS files, or none. Default: xxh64.")
    ] = None,
    size_limit: Annotated[
        str | None,
        typer.Option("--size-limit", metavar="BYTES", help="Size of an MDS shard (64mb) or a row group (16mb)."),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(
            "--processes",
            metavar="N",
            min=1,
            help="Number of processes. Default: one for each core, at most one for each 128 MiB.",
        ),
    ] = None,
    own_order: Annotated[
        bool, typer.Option("--own-order", help="Give the result an order of its own; saved states cannot resume on it.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Convert a dataset of any readable format to MDS or Parquet. Samples keep their numbers and their order.

    A state that was saved with the source can be resumed with the result. If the command is killed, run it again: it
    skips finished parts.

    \b
    Examples:
      penstock data convert /data/web /data/web-mds --to mds --compression zstd
      penstock data convert s3://bucket/mds /data/parquet --to parquet --columns tokens,label
    """
    from penstock.deploy.datasets.dataset_folders import show_conversion

    show_conversion(
        source,
        dest,
        to,
        as_json,
        columns=None if columns is None else listed("--columns", columns),
        types=pairs_of("--as", types or ()),
        compression=None if compression == "none" else compression,
        hashes=None if hashes is None else [] if hashes == "none" else listed("--hashes", hashes),
        size_limit=size_limit,
        processes=processes,
        keep_order=not own_order,
    )
