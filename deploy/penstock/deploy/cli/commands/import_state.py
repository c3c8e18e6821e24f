"""Command `penstock import-state`, which makes a state of Penstock from a position that another library saved."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from penstock.deploy.console.options import LARGEST, LARGEST_SEED, AsJson, Debug

__all__ = ["Library", "import_state"]


class Library(StrEnum):
    """Libraries whose positions can be imported."""

    STATEFUL = "stateful"
    TRAINER = "trainer"
    STREAMING = "streaming"
    GRAIN = "grain"
    ENERGON = "energon"


def import_state(
    states: Annotated[
        list[Path],
        typer.Argument(
            metavar="STATE...",
            help="Files with the states of all ranks (stateful, grain, energon), a file with the state of any rank "
            "(streaming), or the folder of the checkpoint (trainer).",
        ),
    ],
    library: Annotated[Library, typer.Option("--from", help="Library that saved the state.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="State to write, by torch.save.")],
    input_fn: Annotated[str, typer.Option("--input-fn", metavar="MODULE:NAME", help="input_fn of the resumed job.")],
    order_file: Annotated[
        Path | None,
        typer.Option("--order-file", metavar="FILE", help="Order of the epoch to write. Default: OUT with .order."),
    ] = None,
    rows: Annotated[
        int | None,
        typer.Option("--rows", metavar="N", min=1, help="Rows of the dataset; required for stateful and trainer."),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            "--batch-size",
            metavar="N",
            min=1,
            help="Global batch size: rows of a step, over all ranks; required for streaming, grain and energon.",
        ),
    ] = None,
    shuffle: Annotated[
        bool, typer.Option("--shuffle", help="The StreamingDataset or DistributedSampler shuffles.")
    ] = False,
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed",
            metavar="N",
            min=0,
            max=LARGEST_SEED,
            help="Seed of the Trainer (data_seed, else seed; default 42), or of a DistributedSampler (default 0).",
        ),
    ] = None,
    epoch: Annotated[
        int, typer.Option("--epoch", metavar="N", min=0, max=LARGEST, help="Epoch of a StatefulDataLoader, from 0.")
    ] = 0,
    ranks: Annotated[int, typer.Option("--ranks", metavar="N", min=1, help="Processes of the Trainer.")] = 1,
    accumulation: Annotated[
        int, typer.Option("--accumulation", metavar="N", min=1, help="gradient_accumulation_steps of the Trainer.")
    ] = 1,
    drop_last: Annotated[bool, typer.Option("--drop-last", help="The Trainer has dataloader_drop_last.")] = False,
    index: Annotated[
        list[Path] | None,
        typer.Option("--index", metavar="PATH", help="index.json of a stream, or its folder; once for each stream."),
    ] = None,
    shuffle_algo: Annotated[
        str, typer.Option("--shuffle-algo", metavar="NAME", help="shuffle_algo of the StreamingDataset.")
    ] = "py1e",
    shuffle_block_size: Annotated[
        int | None,
        typer.Option("--shuffle-block-size", metavar="N", min=1, help="shuffle_block_size of the StreamingDataset."),
    ] = None,
    loader: Annotated[
        str | None,
        typer.Option(
            "--loader",
            metavar="MODULE:NAME",
            help="Function (state's path, rank, ranks) -> Energon's loader, restored; found in this folder.",
        ),
    ] = None,
    python: Annotated[
        str, typer.Option("--python", metavar="PATH", help="Interpreter that has the library. Default: this one.")
    ] = sys.executable,
    run_seed: Annotated[
        int | None,
        typer.Option(
            "--run-seed",
            metavar="N",
            min=0,
            max=LARGEST_SEED,
            help="Seed of the resumed job, as in Appliance(seed=). Default: random.",
        ),
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Import a position of another library, so that Penstock continues the run in the middle of its epoch.

    Writes a state, and a file with the order of the epoch; pass the file to the loader as order_file=. In this epoch,
    rows that the other library delivered are not repeated, and every other row is delivered once.

    \b
    Examples:
      penstock import-state rank*.pt --from stateful --rows 50000 --input-fn train:input_fn --out new.pt
      penstock import-state run/checkpoint-500 --from trainer --rows 50000 --input-fn train:input_fn --out new.pt
      penstock import-state state.json --from streaming --index /data/train --shuffle --batch-size 256 \\
          --input-fn train:input_fn --out new.pt --python /envs/old/bin/python
    """
    from penstock.deploy.import_state.write_imported import Request, import_state

    request = Request(
        library=str(library),
        states=states,
        out=out,
        order_file=order_file or out.with_name(f"{out.name}.order"),
        input_fn=input_fn,
        rows=rows,
        batch=batch_size,
        epoch=epoch,
        shuffle=shuffle,
        seed=seed,
        ranks=ranks,
        accumulation=accumulation,
        drop_last=drop_last,
        index=index or [],
        algorithm=shuffle_algo,
        block=shuffle_block_size,
        loader=loader,
        python=python,
        run_seed=run_seed,
    )
    import_state(request, as_json)
