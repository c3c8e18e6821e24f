"""`penstock coordinator` and `penstock worker`: settings, token, log, and the daemon until it ends. Standard output
gets one line, when the daemon is ready; the log goes to standard error."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import sys
from pathlib import Path
from typing import Any

from penstock.deploy.console.command_token import coordinator_tokens
from penstock.deploy.console.settings import CoordinatorSettings, WorkerSettings, describe, resolve, slot_budgets
from penstock.proto.errors import InvalidArgumentError
from penstock.proto.rpc.addresses import is_local, socket_path
from penstock.proto.rpc.credentials.tokens import Tokens, admin_tokens, read_token
from penstock.proto.rpc.version import VERSION
from penstock.runtime.config.settings import IN_MEMORY
from penstock.runtime.config.sizes import bytes_of
from penstock.runtime.files.atomic_files import write_whole
from penstock.runtime.process.memory_secrecy import keep_memory_private
from penstock.runtime.process.titles import name_process
from penstock.runtime.telemetry.logs import JsonLines, TextLines

_log = logging.getLogger("penstock.deploy")


def run_coordinator(
    flags: dict[str, Any],
    token_file: Path | None,
    ready_file: Path | None,
    debug: bool,
    parent_pid: int | None = None,
) -> None:
    """Run a coordinator until SIGTERM or SIGINT; with `parent_pid` until that process ends or asks for it."""
    from penstock.appliance.limits import Limits
    from penstock.appliance.server.server import serve

    settings = resolve(CoordinatorSettings, **flags)
    _begin(debug, settings.log_format, process="coordinator")
    tls = settings.tls()
    in_memory = os.fspath(settings.state_dir) == IN_MEMORY
    _log.info("coordinator %s: %s", VERSION, describe(settings, **flags))
    tokens = coordinator_tokens(settings.tokens_in(token_file), None if in_memory else settings.state_dir)
    if (path := socket_path(settings.listen)) is not None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    limits = Limits(
        worker_lease_s=settings.lease,
        client_lease_s=settings.client_lease,
        balance_after_s=settings.balance_after,
        budget=bytes_of(settings.budget),
        max_slots=slot_budgets(settings.max_slots),
    )
    for name in sorted(set(limits.max_slots) - {"client"} - Tokens(tokens).names_of("client")):
        raise InvalidArgumentError(f"--max-slots {name}: no token has this name: add a line client/{name}:TOKEN")

    def ready(address: str) -> None:
        _log.info("listening on %s", address)
        _announce(address, ready_file)

    asyncio.run(
        serve(
            settings.listen,
            settings.state_dir,
            tokens,
            tls=tls,
            insecure=settings.insecure,
            parent_pid=parent_pid,
            ready=ready,
            limits=limits,
            http=settings.http,
            http_any_port="http" not in settings.model_fields_set,
            on_end=settings.on_end,
        )
    )
    _log.info("stopped on request")


def run_worker(
    flags: dict[str, Any],
    token_file: Path | None,
    ready_file: Path | None,
    debug: bool,
    parent_pid: int | None = None,
) -> None:
    """Run a worker until SIGTERM or SIGINT, or until the process `parent_pid` ends or asks for it."""
    from penstock.worker.daemon.serving import serve
    from penstock.worker.daemon.worker_settings import DaemonSettings, own_name

    settings = resolve(WorkerSettings, **flags)
    name = settings.name or own_name()
    _begin(debug, settings.log_format, process="worker", worker=name)
    tls = settings.tls()
    _log.info("worker %s: %s", VERSION, describe(settings, **flags))
    if is_local(settings.listen) and not is_local(settings.coordinator):
        _log.warning(
            "lanes listen on %s only: boxes on other machines cannot reach them (--listen HOST:0)", settings.listen
        )
    tokens = settings.tokens_in(token_file)
    token = read_token("worker", file=tokens)
    guarded = settings.http and not is_local(settings.http)
    asyncio.run(
        serve(
            DaemonSettings(
                coordinator=settings.coordinator,
                token=token,
                slots=settings.slots,
                allow=settings.allow.split(","),
                listen=settings.listen,
                name=name,
                parent_pid=parent_pid or 0,
                runner_memory=bytes_of(settings.runner_memory),
                runner_user=settings.runner_user,
                runner_processes=settings.runner_processes,
                no_sandbox=settings.no_sandbox,
                drain_s=settings.drain,
                liveness_file=settings.liveness_file,
                tls=tls,
                insecure=settings.insecure,
                http=settings.http,
                http_tokens=admin_tokens(file=tokens) if guarded else "",
            ),
            lambda name: _announce(name, ready_file),
        )
    )
    _log.info("stopped on request")


def _begin(debug: bool, log_format: str, **always: str) -> None:
    """Set up a daemon's log, name, dump of stacks at a crash, and memory that only root's processes can read.
    `always`: fields of each log line in JSON."""
    keep_memory_private()
    name_process("penstock-worker" if always["process"] == "worker" else "penstock-coord")
    faulthandler.enable()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(always) if log_format == "json" else TextLines())
    logging.captureWarnings(log_format == "json")  # otherwise warnings are not JSON objects
    logging.basicConfig(level=logging.DEBUG if debug else logging.INFO, handlers=[handler])
    logging.getLogger("asyncio").setLevel(logging.WARNING)


def _announce(line: str, ready_file: Path | None) -> None:
    """Write a line to standard output, and to `ready_file`, which appears as a whole."""
    if ready_file is not None:
        try:
            write_whole(ready_file, f"{line}\n".encode(), sync=False)
        except OSError as error:
            raise InvalidArgumentError(
                f"--ready-file {ready_file} cannot be written: {error.strerror}. Pass another path"
            ) from error
    print(line, flush=True)
