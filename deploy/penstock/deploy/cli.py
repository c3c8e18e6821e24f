"""The command `penstock`, put together from penstock.deploy.commands.

Nothing heavy is imported before a command needs it: `--help` is text, and `coordinator`, `worker` and `status` never
see torch.
"""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.deploy.commands.base import CONTEXT, EPILOG
from penstock.deploy.commands.coordinator import coordinator
from penstock.deploy.commands.demo import demo
from penstock.deploy.commands.doctor import doctor
from penstock.deploy.commands.down import down
from penstock.deploy.commands.replay import replay
from penstock.deploy.commands.state import state
from penstock.deploy.commands.status import status
from penstock.deploy.commands.up import up
from penstock.deploy.commands.worker import worker
from penstock.deploy.exits import guarded

__all__ = ["app", "main"]

app = typer.Typer(
    name="penstock",
    help="Penstock feeds accelerators: input workers elsewhere, an ordinary iterator here, exact resume.",
    epilog=EPILOG,
    no_args_is_help=True,
    rich_markup_mode=None,  # help is text: the same in a terminal, a file and a bug report
    pretty_exceptions_enable=False,  # an expected error is one line (see exits.py), a bug is a plain traceback
    context_settings=CONTEXT,
)


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


# Daemons, then what looks at them, then what works on a loader.
app.command(epilog=EPILOG)(guarded(coordinator))
app.add_typer(worker, name="worker")
app.command(epilog=EPILOG)(guarded(up))
app.command(epilog=EPILOG)(guarded(down))
app.command(epilog=EPILOG)(guarded(demo))
app.command(epilog=EPILOG)(guarded(status))
app.add_typer(state, name="state")
app.command(epilog=EPILOG)(guarded(replay))
app.command(epilog=EPILOG)(guarded(doctor))


def main() -> None:
    """Entry point of `penstock`."""
    try:
        app()
    except KeyboardInterrupt:  # before a command began
        raise SystemExit(130) from None
