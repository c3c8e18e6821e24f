"""Command line `penstock`. No large package is imported before a command needs it: `--help` only prints text, and
`coordinator`, `worker` and `status` never import torch."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Annotated, NoReturn

import typer

from penstock.deploy.cli.commands.checkpoint import checkpoint
from penstock.deploy.cli.commands.config import config
from penstock.deploy.cli.commands.coordinator import coordinator
from penstock.deploy.cli.commands.dashboard import dashboard
from penstock.deploy.cli.commands.data import data
from penstock.deploy.cli.commands.demo import demo
from penstock.deploy.cli.commands.doctor import doctor
from penstock.deploy.cli.commands.replay import replay
from penstock.deploy.cli.commands.run import mix, run
from penstock.deploy.cli.commands.state import state
from penstock.deploy.cli.commands.status import status
from penstock.deploy.cli.commands.up import down, up
from penstock.deploy.cli.commands.worker import worker
from penstock.deploy.console.app import CONTEXT, EPILOG, App
from penstock.deploy.console.exit_codes import EXIT_LINES, INTERRUPTED, UNSAID, USAGE
from penstock.deploy.console.options import ConfigFile
from penstock.runtime.telemetry.logs import printable

UNWRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE)
"""Errors by which standard output cannot be written: full disk, quota, file size, failing disk, closed pipe."""


app = App(
    name="penstock",
    help="Stream batches from worker processes on other machines to a PyTorch training loop, and resume exactly.",
    epilog="\b\nExamples:\n"
    "  penstock doctor                                         is this machine ready?\n"
    "  penstock coordinator --state-dir ~/penstock             once in a cluster\n"
    "  penstock worker --slots 8 --allow mypackage             on each input node\n"
    "  penstock status                                         which box waits for which worker\n\n"
    f"\b\n{EPILOG}",
    no_args_is_help=True,
    rich_markup_mode=None,  # plain text: the same in a terminal, a file and a bug report
    pretty_exceptions_enable=False,  # an expected error is one line (see exit_codes.py), a bug is a plain traceback
    context_settings=CONTEXT,
)


@app.callback(invoke_without_command=True)
def _penstock(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    exit_codes: Annotated[bool, typer.Option("--exit-codes", help="Print the meaning of each exit code.")] = False,
    config: ConfigFile = None,
) -> None:
    if exit_codes:
        typer.echo(EXIT_LINES)
        raise typer.Exit
    if version:
        from importlib.metadata import version as installed

        typer.echo(f"penstock {installed('penstock')}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


app.command()(coordinator)
app.add_typer(worker, name="worker")
app.command()(up)
app.command()(down)
app.command()(demo)
app.command()(status)
app.command()(dashboard)
app.command()(mix)
app.add_typer(run, name="run")
app.command()(state)
app.command()(replay)
app.add_typer(checkpoint, name="checkpoint")
app.add_typer(doctor, name="doctor")
app.command()(config)
app.add_typer(data, name="data")


def main() -> None:
    """Run the command line; __main__ calls this once the imports are done."""
    for given in sys.argv:
        if not given.isascii() and any(
            "\ud800" <= char <= "\udfff" for char in given
        ):  # Python represents bytes that are not UTF-8 as surrogates
            _end(f"an argument must be valid UTF-8, got {printable(given)}. Check the terminal's encoding", USAGE)
    if sys.stdout is None:
        _end("standard output must be open. Use >/dev/null to discard what is printed", UNSAID)
    if isinstance(sys.stdout, io.TextIOWrapper):  # names may have characters that the terminal's encoding lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.errno not in UNWRITTEN or error.filename is not None:  # not raised by a print
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the flush at the very end cannot fail
        if isinstance(error, BrokenPipeError):  # `| head` has read enough
            raise SystemExit(UNSAID) from None
        _end(f"standard output cannot be written: {error.strerror}", UNSAID)
    except SystemExit as end:
        # Typer exits by itself after a failed print that was not buffered
        if isinstance(end.__context__, BrokenPipeError):
            raise SystemExit(UNSAID) from None
        raise
    except KeyboardInterrupt:  # Ctrl-C before a command started
        raise SystemExit(INTERRUPTED) from None


def _end(why: str, code: int) -> NoReturn:
    print(f"penstock: {why}", file=sys.stderr)
    raise SystemExit(code)
