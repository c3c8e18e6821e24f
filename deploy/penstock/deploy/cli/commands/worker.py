"""Command `penstock worker`."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.deploy.console.app import completed, subcommands
from penstock.deploy.console.exit_codes import guarded
from penstock.deploy.console.options import AsJson, Debug, Flags, ParentPid, ReadyFile, TokenFile
from penstock.deploy.console.peer import Peer
from penstock.deploy.console.settings import WorkerSettings

worker = subcommands(invoke_without_command=True)


@worker.callback()
@completed
def _worker(
    context: typer.Context,
    flags: Annotated[Flags, WorkerSettings],
    token_file: TokenFile = None,
    ready_file: ReadyFile = None,
    parent_pid: ParentPid = None,
    debug: Debug = False,
) -> None:
    """Run a worker daemon. It runs your input_fn in child processes and streams their batches.

    Prints its name as one line once the coordinator has registered it, for which it waits. On SIGTERM or Ctrl-C the
    daemon migrates its slots, serves those that no other worker has room for until --drain is over, and ends. A
    second Ctrl-C ends it immediately.

    \b
    Examples:
      penstock worker --slots 8 --allow mypackage                           on the coordinator's machine
      penstock worker --slots 8 --allow mypackage --coordinator head:7070 \\
          --listen 10.0.0.2:0 --token-file token                            on another machine
    """
    if context.invoked_subcommand is not None:
        _refuse_options_of_the_daemon(context)
        return  # not `guarded`, because the subcommand ends the process
    from penstock.deploy.operations.run_daemon import run_worker

    guarded(run_worker)(flags, token_file, ready_file, debug, parent_pid)


def _refuse_options_of_the_daemon(context: typer.Context) -> None:
    """Refuse options before a subcommand, as in `penstock worker --slots 8 drain NAME`, which would ignore them."""
    for parameter in context.command.params:
        name = parameter.name or ""
        given = context.get_parameter_source(name)
        if given is not None and given.name == "COMMANDLINE" and name not in ("config", "debug"):
            raise typer.BadParameter(
                f"must come after `{context.invoked_subcommand}`; before the subcommand it is an option of the daemon",
                param_hint=parameter.opts[0],
            )


@worker.command("drain")
def drain_worker(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="The worker, as `penstock status` shows it."),
    ],
    undo: Annotated[bool, typer.Option("--undo", help="Let the worker take slots again.")] = False,
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout", metavar="SECONDS", min=0, help="Time to wait until the worker has no slots; 0: none."
        ),
    ] = 120.0,
    *,
    peer: Peer,
    as_json: AsJson = False,
) -> None:
    """Migrate a worker's slots to other workers. It can then be stopped without a pause in training.

    Each slot keeps running until another worker is ready to take it; if none has free capacity, it stays until workers
    join. The daemon gets no new slots, and keeps running: stop it once this command has succeeded.

    \b
    Examples:
      penstock worker drain node7:4711             and wait until it has no slots
      penstock worker drain node7:4711 --undo      let it take slots again
    """
    from penstock.deploy.operations.drain import drain

    drain(name, undo, timeout, peer, as_json)
