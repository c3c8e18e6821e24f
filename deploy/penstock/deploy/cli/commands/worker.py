"""`penstock worker`."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.deploy.cli.completion import worker_names
from penstock.deploy.console.common_options import subcommands, tls_flags
from penstock.deploy.console.coordinator_options import Peer
from penstock.deploy.console.exit_codes import guarded
from penstock.deploy.console.options import (
    Allow,
    AsJson,
    ConfigFile,
    Coordinator,
    Debug,
    Drain,
    LivenessFile,
    LogFormat,
    Name,
    NoCage,
    NoGroups,
    Otel,
    ParentPid,
    ReadyFile,
    RunnerMemory,
    RunnerProcesses,
    RunnerUser,
    Slots,
    Starts,
    StartTimeout,
    TlsCa,
    TlsCert,
    TlsKey,
    TlsName,
    TokenFile,
    WorkerHttp,
    WorkerInsecure,
    WorkerListen,
)

__all__ = ["worker"]

worker = subcommands(invoke_without_command=True)


@worker.callback()
def _worker(
    context: typer.Context,
    coordinator: Coordinator = None,
    slots: Slots = None,
    allow: Allow = None,
    listen: WorkerListen = None,
    runner_memory: RunnerMemory = None,
    starts: Starts = None,
    start_timeout: StartTimeout = None,
    runner_user: RunnerUser = None,
    runner_processes: RunnerProcesses = None,
    no_cage: NoCage = None,
    no_groups: NoGroups = None,
    name: Name = None,
    http: WorkerHttp = None,
    drain: Drain = None,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_name: TlsName = None,
    insecure: WorkerInsecure = None,
    log_format: LogFormat = None,
    otel: Otel = None,
    ready_file: ReadyFile = None,
    config: ConfigFile = None,
    liveness_file: LivenessFile = None,
    parent_pid: ParentPid = None,
    debug: Debug = False,
) -> None:
    """Run a worker daemon: it runs your input_fn in child processes and streams their batches.

    Prints its name as one line once the coordinator knows it. Waits for a coordinator that is not there yet. On
    SIGTERM or Ctrl-C it hands its slots over, one by one, each when another worker is ready for it, and ends; the
    second time at once.

    \b
    Examples:
      penstock worker --slots 8 --allow mypackage                           beside its coordinator
      penstock worker --slots 8 --allow mypackage --coordinator head:7070 \\
          --listen 10.0.0.2:0 --token-file token                            on an input node
    """
    if context.invoked_subcommand is not None:
        _refuse_options_of_the_daemon(context)
        return  # and not guarded: that ends the command
    from penstock.deploy.operations.run_daemon import run_worker

    flags = {
        "slots": slots,
        "allow": ",".join(allow) if allow else None,
        "listen": listen,
        "runner_memory": runner_memory,
        "starts": starts,
        "start_timeout": start_timeout,
        "runner_user": runner_user,
        "runner_processes": runner_processes,
        "no_cage": no_cage,
        "no_groups": no_groups,
        "name": name,
        "http": http,
        "drain": drain,
        "liveness_file": liveness_file,
        "insecure": insecure,
    }
    tls = tls_flags(tls_ca, tls_cert, tls_key, tls_name)
    telemetry = {"log_format": log_format, "otel": otel}
    guarded(run_worker)(coordinator, flags, tls, telemetry, token_file, ready_file, debug, parent_pid)


def _refuse_options_of_the_daemon(context: typer.Context) -> None:
    """They would not count for the command that follows: --coordinator before `drain` names no coordinator for it."""
    for parameter in context.command.params:
        name = parameter.name or ""
        given = context.get_parameter_source(name)
        if given is not None and given.name == "COMMANDLINE" and name not in ("config", "debug"):
            raise typer.BadParameter(
                f"it is an option of the daemon here: give it behind `{context.invoked_subcommand}`",
                param_hint=parameter.opts[0],
            )


@worker.command("drain")
@guarded
def drain_worker(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="The worker, as `penstock status` shows it.", autocompletion=worker_names),
    ],
    undo: Annotated[bool, typer.Option("--undo", help="It is to take slots again.")] = False,
    timeout: Annotated[
        float,
        typer.Option("--timeout", metavar="SECONDS", min=0, help="Wait so long until it has no slots; 0: only order."),
    ] = 120.0,
    *,
    peer: Peer,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Have a worker hand its slots over to others, so that it can be stopped without anybody noticing.

    It gets no new slots. Each of its own goes on until another worker is ready to take it; one for which there is no
    place stays where it is, until workers join. The daemon itself goes on: stop it when this command has ended well.

    \b
    Examples:
      penstock worker drain node7:4711             and wait until it has no slots
      penstock worker drain node7:4711 --undo      it is to take slots again
    """
    from penstock.deploy.operations.drain import drain

    drain(name, undo, timeout, peer, as_json)
