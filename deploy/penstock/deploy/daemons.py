"""`penstock coordinator` and `penstock worker`: settings, token, log, and then the daemon until it ends.

Standard output gets one line, when the daemon is ready; everything else is log, on standard error.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.deploy.exits import UNSAFE_BIND, CommandError
from penstock.deploy.settings import (
    IN_MEMORY,
    CoordinatorSettings,
    PeerSettings,
    WorkerSettings,
    bytes_of,
    describe,
    resolve,
)
from penstock.deploy.tokens import coordinator_token, peer_token
from penstock.proto.channel import VERSION, is_local

__all__ = ["run_coordinator", "run_worker"]

_log = logging.getLogger("penstock.deploy")


def run_coordinator(flags: dict[str, Any], token_file: Path | None, ready_file: Path | None, debug: bool) -> None:
    """Serve until SIGTERM or SIGINT. `flags`: what was given on the command line, None for the rest."""
    from penstock.appliance.limits import MEMORY_BUDGET, Limits
    from penstock.appliance.server import serve

    _start_log(debug)
    settings = resolve(CoordinatorSettings, **flags)
    _refuse_unsafe(settings.listen, settings.insecure)
    in_memory = os.fspath(settings.state_dir) == IN_MEMORY
    _log.info("coordinator %s: %s", VERSION, describe(settings, **flags))
    token = coordinator_token(token_file, None if in_memory else settings.state_dir)
    limits = replace(Limits(), worker_lease_s=settings.lease, client_lease_s=settings.client_lease)
    if in_memory:
        limits = replace(limits, budget=MEMORY_BUDGET)

    def ready(address: str) -> None:
        _log.info("listening on %s", address)
        _announce(address, ready_file)

    asyncio.run(
        serve(settings.listen, settings.state_dir, token, insecure=settings.insecure, ready=ready, limits=limits)
    )
    _log.info("ended as told")


def run_worker(
    coordinator: str | None, flags: dict[str, Any], token_file: Path | None, ready_file: Path | None, debug: bool
) -> None:
    """Serve until SIGTERM or SIGINT. `flags`: what was given on the command line, None for the rest."""
    from penstock.worker.daemon import Settings, serve

    _start_log(debug)
    peer = resolve(PeerSettings, coordinator=coordinator)
    settings = resolve(WorkerSettings, **flags)
    _refuse_unsafe(settings.listen, settings.insecure)
    _log.info("worker %s: %s, %s", VERSION, describe(peer, coordinator=coordinator), describe(settings, **flags))
    if is_local(settings.listen) and not is_local(peer.coordinator):
        _log.warning(
            "lanes listen on %s only: boxes on other machines cannot reach them (--listen HOST:0)", settings.listen
        )
    token = peer_token(token_file)

    def ready(name: str) -> None:
        _announce(name, ready_file)

    asyncio.run(
        serve(
            Settings(
                coordinator=peer.coordinator,
                token=token,
                slots=settings.slots,
                allow=settings.prefixes,
                listen=settings.listen,
                name=settings.name,
                runner_memory=bytes_of(settings.runner_memory),
            ),
            ready,
        )
    )
    _log.info("ended as told")


def _refuse_unsafe(listen: str, insecure: bool) -> None:
    if insecure or is_local(listen):
        return
    raise CommandError(
        f"{listen} can be reached from other machines, and without TLS token and data would cross the network in clear "
        "text: listen on 127.0.0.1, or say --insecure on a network that you trust",
        UNSAFE_BIND,
    )


def _start_log(debug: bool) -> None:
    faulthandler.enable()
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.DEBUG if debug else logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    logging.getLogger("asyncio").setLevel(logging.WARNING)


def _announce(line: str, ready_file: Path | None) -> None:
    """The one line, to standard output and to the file: whole or not there at all."""
    if ready_file is not None:
        beside = ready_file.with_name(f"{ready_file.name}.{os.getpid()}")
        beside.write_text(line + "\n")
        beside.replace(ready_file)
    print(line, flush=True)
