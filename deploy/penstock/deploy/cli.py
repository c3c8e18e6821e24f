"""The command `penstock`. Each command is here with its options, and does its work elsewhere.

Nothing heavy is imported before a command needs it: `--help` is text, and `coordinator`, `worker` and `status` never
see torch.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from penstock.deploy.exits import EXIT_LINES, guarded
from penstock.deploy.options import (
    Allow,
    AsJson,
    ClientLease,
    Coordinator,
    CoordinatorInsecure,
    CoordinatorListen,
    Debug,
    Lease,
    Name,
    ReadyFile,
    RunnerMemory,
    Slots,
    StateDir,
    TlsCa,
    TlsCert,
    TlsKey,
    TlsName,
    TokenFile,
    WorkerInsecure,
    WorkerListen,
)

__all__ = ["app", "main"]

_EPILOG = f"\b\nExit codes:\n{EXIT_LINES}\n\n\b\nMore: docs/cli.md"

app = typer.Typer(
    name="penstock",
    help="Penstock feeds accelerators: input workers elsewhere, an ordinary iterator here, exact resume.",
    epilog=_EPILOG,
    no_args_is_help=True,
    rich_markup_mode=None,  # help is text: the same in a terminal, a file and a bug report
    pretty_exceptions_enable=False,  # an expected error is one line (see exits.py), a bug is a plain traceback
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)


def _quiet_grpc() -> None:
    """gRPC reports on standard error what our errors say better. Not in a worker: its runners would inherit this."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def _tls(ca: str | None, cert: str | None, key: str | None, name: str | None = None) -> dict[str, str | None]:
    return {"tls_ca": ca, "tls_cert": cert, "tls_key": key, "tls_name": name}


@app.callback(invoke_without_command=True)
def _penstock(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        from importlib.metadata import version as installed

        typer.echo(f"penstock {installed('penstock')}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


@app.command(epilog=_EPILOG)
@guarded
def coordinator(
    listen: CoordinatorListen = None,
    state_dir: StateDir = None,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    insecure: CoordinatorInsecure = None,
    lease: Lease = None,
    client_lease: ClientLease = None,
    ready_file: ReadyFile = None,
    debug: Debug = False,
) -> None:
    """Run the coordinator: it hands out the work and keeps the books.

    Prints the address that it listens on as one line once it is ready. Without a token it makes one, in
    STATE_DIR/token. Ends on SIGTERM or Ctrl-C; started again on the same directory it goes on where it was.
    """
    _quiet_grpc()
    from penstock.deploy.daemons import run_coordinator

    flags = {
        "listen": listen,
        "state_dir": state_dir,
        "insecure": insecure,
        "lease": lease,
        "client_lease": client_lease,
    }
    run_coordinator(flags, _tls(tls_ca, tls_cert, tls_key), token_file, ready_file, debug)


@app.command(epilog=_EPILOG)
@guarded
def worker(
    coordinator: Coordinator = None,
    slots: Slots = None,
    allow: Allow = None,
    listen: WorkerListen = None,
    runner_memory: RunnerMemory = None,
    name: Name = None,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_name: TlsName = None,
    insecure: WorkerInsecure = None,
    ready_file: ReadyFile = None,
    debug: Debug = False,
) -> None:
    """Run a worker daemon: it runs your input_fn in child processes and streams their batches.

    Prints its name as one line once the coordinator knows it. Waits for a coordinator that is not there yet. On
    SIGTERM or Ctrl-C it hands its slots on and ends.
    """
    from penstock.deploy.daemons import run_worker

    flags = {
        "slots": slots,
        "allow": ",".join(allow) if allow else None,
        "listen": listen,
        "runner_memory": runner_memory,
        "name": name,
        "insecure": insecure,
    }
    run_worker(coordinator, flags, _tls(tls_ca, tls_cert, tls_key, tls_name), token_file, ready_file, debug)


@app.command(epilog=_EPILOG)
@guarded
def status(
    coordinator: Coordinator = None,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_name: TlsName = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show runs, boxes, slots and workers: rates, and who waits for whom."""
    _quiet_grpc()
    from penstock.deploy.status import show_status

    show_status(coordinator, _tls(tls_ca, tls_cert, tls_key, tls_name), token_file, as_json)


class _ShowsByDefault(TyperGroup):
    """`penstock state RUN` is short for `penstock state show RUN`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["show", *args]
        return super().parse_args(ctx, args)


state = typer.Typer(
    cls=_ShowsByDefault,
    epilog=_EPILOG,
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
app.add_typer(state, name="state")


@state.callback()
def _state() -> None:
    """Show the state of a run at a step (`penstock state RUN`), or convert a saved one to another shape."""


@state.command("show", epilog=_EPILOG)
@guarded
def state_show(
    run: Annotated[str, typer.Argument(metavar="RUN", help="JOB/ORDINAL as `penstock status` shows it; JOB is JOB/0.")],
    step: Annotated[
        int | None,
        typer.Option("--step", metavar="S", min=0, help="Step of the boxes. Default: the last that every box has had."),
    ] = None,
    deadline: Annotated[
        float,
        typer.Option("--deadline", metavar="SECONDS", min=0.1, max=3600, help="Wait so long for the workers."),
    ] = 60.0,
    coordinator: Coordinator = None,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_name: TlsName = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show the state of a run at a step: one DataLoaderCheckpoint for each worker of every box."""
    _quiet_grpc()
    from penstock.deploy.state import show_state

    show_state(run, step, deadline, coordinator, _tls(tls_ca, tls_cert, tls_key, tls_name), token_file, as_json)


@state.command("convert", epilog=_EPILOG)
@guarded
def state_convert(
    source: Annotated[Path, typer.Argument(metavar="IN", help="File with what DataLoader.state_dict() returned.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="File to write, of the same kind.")],
    boxes: Annotated[int, typer.Option("--boxes", metavar="R", min=1, help="Boxes of the job that goes on.")],
    workers: Annotated[int, typer.Option("--workers", metavar="W", min=1, help="Workers of each of them.")],
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Turn a saved state for one number of boxes and workers into one for another, and say what that means.

    IN was written by encode_state or torch.save; the state may be a part of a larger checkpoint, the rest of which is
    copied. A loader without the four state methods cannot change its shape: 22.
    """
    from penstock.deploy.convert import show_convert

    show_convert(source, target, boxes, workers, as_json)


@app.command(epilog=_EPILOG)
@guarded
def replay(
    run: Annotated[
        str | None,
        typer.Argument(metavar="RUN", help="JOB/ORDINAL; JOB is JOB/0. None: from a --checkpoint alone."),
    ] = None,
    step: Annotated[int, typer.Option("--step", metavar="S", min=1, help="Step of the box that got the batch.")] = ...,  # type: ignore[assignment]
    box: Annotated[int, typer.Option("--box", metavar="B", min=0, help="The box.")] = 0,
    row: Annotated[int | None, typer.Option("--row", metavar="I", min=0, help="Show one row of the batch too.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write the batch, to FILE.pst, FILE.npz or FILE.pt.")
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option("--allow", metavar="PREFIX", help="Prefix of modules whose input_fn may run here; repeatable."),
    ] = None,
    state_dir: Annotated[
        Path | None,
        typer.Option("--state-dir", metavar="DIR", help="Read the journal of a coordinator that is stopped."),
    ] = None,
    checkpoint: Annotated[
        list[Path] | None,
        typer.Option("--checkpoint", metavar="FILE", help="File with a saved state to start from; repeatable."),
    ] = None,
    attempt: Annotated[
        int | None,
        typer.Option("--attempt", metavar="N", min=1, help="Of the run. Default: the last that had the step."),
    ] = None,
    args: Annotated[
        str | None, typer.Option("--args", metavar="JSON", help="Positional arguments of input_fn, if not the run's.")
    ] = None,
    kwargs: Annotated[str | None, typer.Option("--kwargs", metavar="JSON", help="Named ones, a JSON object.")] = None,
    script: Annotated[
        Path | None, typer.Option("--script", metavar="FILE", help="The training script, if input_fn is in it.")
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=1, help="Give up after so long.")
    ] = 3600.0,
    coordinator: Coordinator = None,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_name: TlsName = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Make a batch again that a box was handed, bit by bit, and show what is in it.

    Runs the loader here, in processes of its own, from the newest place that is kept: a snapshot, a checkpoint, or the
    beginning. What it made is compared with the flight record, where that is known. Needs your data, and --allow.
    """
    _quiet_grpc()
    from penstock.deploy.replay import Request
    from penstock.deploy.replayed import show_replay

    request = Request(
        run, step, box, row, out, attempt, state_dir, checkpoint or (), args, kwargs, allow or (), script, timeout
    )
    show_replay(request, coordinator, _tls(tls_ca, tls_cert, tls_key, tls_name), token_file, as_json)


@app.command(epilog=_EPILOG)
@guarded
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


def main() -> None:
    """Entry point of `penstock`."""
    try:
        app()
    except KeyboardInterrupt:  # before a command began
        raise SystemExit(130) from None
