"""`penstock worker`."""

from __future__ import annotations

import typer

from penstock.deploy.commands.base import subcommands, tls_flags
from penstock.deploy.exits import guarded
from penstock.deploy.options import (
    Allow,
    Coordinator,
    Debug,
    LifelinePid,
    Name,
    ReadyFile,
    RunnerMemory,
    Slots,
    TlsCa,
    TlsCert,
    TlsKey,
    TlsName,
    TokenFile,
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
    name: Name = None,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_name: TlsName = None,
    insecure: WorkerInsecure = None,
    ready_file: ReadyFile = None,
    lifeline_pid: LifelinePid = None,
    debug: Debug = False,
) -> None:
    """Run a worker daemon: it runs your input_fn in child processes and streams their batches.

    Prints its name as one line once the coordinator knows it. Waits for a coordinator that is not there yet. On
    SIGTERM or Ctrl-C it hands its slots on and ends.
    """
    if context.invoked_subcommand is not None:
        return  # and not guarded: that ends the command
    from penstock.deploy.daemons import run_worker

    flags = {
        "slots": slots,
        "allow": ",".join(allow) if allow else None,
        "listen": listen,
        "runner_memory": runner_memory,
        "name": name,
        "insecure": insecure,
    }
    tls = tls_flags(tls_ca, tls_cert, tls_key, tls_name)
    guarded(run_worker)(coordinator, flags, tls, token_file, ready_file, debug, lifeline_pid)
