"""`penstock up` and `penstock down`: makes the plan of the settings, chooses the engine, and prints the result."""

from __future__ import annotations

import json
import logging
import os
import secrets
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.deploy.console.exit_codes import INTERRUPTED, USAGE, CommandError
from penstock.deploy.console.peer import Peer
from penstock.deploy.console.settings import UpSettings, flag, resolve, state_home
from penstock.deploy.engines import local
from penstock.deploy.engines.engine import Fleet, FleetPlan, Scaling, exports
from penstock.deploy.engines.fleet_folder import FleetFolder
from penstock.deploy.engines.ray import ray_down, ray_scale, ray_up
from penstock.deploy.engines.supervisor import supervise
from penstock.proto.errors import InvalidArgumentError
from penstock.proto.rpc.addresses import is_local as is_loopback
from penstock.proto.rpc.addresses import socket_path
from penstock.runtime.config.settings import variable

if TYPE_CHECKING:  # at run time gRPC is imported only when a command needs it
    from penstock.proto.v1 import coordinator_pb2 as pb

RAY_LISTEN = "127.0.0.1:7070"
"""Default of --listen with --engine ray, which uses the port alone."""
_OF_RAY = ("ray_address", "near", "state_dir", "send_token")
"""Settings that only the engine ray has."""


def run_up(flags: dict[str, Any], token_file: Path | None, *, detach: bool, as_json: bool, debug: bool) -> None:
    """Start a fleet; a local one without `detach` runs in this process until it has ended."""
    settings = resolve(UpSettings, **flags)
    folder = _folder(settings)
    folder.make()
    logging.basicConfig(
        level=logging.DEBUG if debug else logging.INFO, format="penstock up: %(message)s", stream=sys.stderr
    )
    if "workers" in settings.model_fields_set and (detach or settings.engine == "ray"):
        running = folder.fleet()
        if running is not None and running.plan and (folder.supervised or running.engine == "ray"):
            fleet = _scaled(running, settings, folder)
            if fleet is not None:
                _print_exports(fleet, as_json)
                return
    plan = _plan_of(settings, token_file, folder)
    if settings.engine == "ray":
        _refuse_another(folder, plan)
        fleet = ray_up(plan, folder)
        folder.save(fleet)
        _print_exports(fleet, as_json)
        return
    if detach:
        signal.signal(signal.SIGTERM, _interrupted)
        _print_exports(local.up(plan, folder), as_json)
    else:
        supervise(plan, folder, lambda fleet: _print_exports(fleet, as_json))


def _scaled(running: Fleet, settings: UpSettings, folder: FleetFolder) -> Fleet | None:
    """Bring a running fleet to another number of workers; None if it does not run any more. Raises CommandError if
    another setting was changed too."""
    given = {name: getattr(settings, name) for name in settings.model_fields_set} | _tls_files(settings)
    for name in given.keys() - {"workers", "timeout", "dir"}:
        if (is_now := running.plan.get(name)) != (wanted := given[name]):
            raise CommandError(
                f"only --workers of a running fleet can be changed, but {flag(name)} is {is_now!r} in {folder.path}, "
                f"got {wanted!r}. End the fleet by `penstock down`",
                USAGE,
            )

    def scaling() -> Scaling:
        drained = [worker.worker for worker in _status_of(running) if worker.draining]
        return Scaling(workers=settings.workers, drained=drained, request=secrets.token_hex(8))

    if running.engine == "local":
        return local.scale(folder, scaling(), settings.timeout)
    fleet = ray_scale(running, scaling, settings.timeout)
    if fleet is not None:
        folder.save(fleet)
    return fleet


def _status_of(fleet: Fleet) -> Iterable[pb.WorkerStatus]:
    """Return what the coordinator reports of the workers."""
    token_file = None if "credentials" in fleet.tls else Path(fleet.token_file)
    with Peer(coordinator=fleet.coordinator, token_file=token_file, **fleet.tls).client() as client:
        return client.status().workers


def _interrupted(number: int, _: object) -> None:
    raise CommandError("ended by SIGTERM while the fleet was starting. Start it again", INTERRUPTED)


def _plan_of(settings: UpSettings, token_file: Path | None, folder: FleetFolder) -> FleetPlan:
    """Return the plan, whose values the daemons check further. Write a token file if there is none."""
    if not settings.allow:
        raise InvalidArgumentError(
            f"{flag('allow')} (or the variable {variable(UpSettings, 'allow')}) must be given: the modules whose "
            "input_fn workers may run. Give a prefix such as mypackage, or '*' for any"
        )
    is_local = settings.engine == "local"
    for name in _OF_RAY:
        if is_local and name in settings.model_fields_set:
            raise InvalidArgumentError(
                f"{flag(name)} must be given only with --engine ray, got --engine local. Omit it"
            )
    if not is_local and (settings.listen.endswith(":0") or socket_path(settings.listen) is not None):
        raise InvalidArgumentError(
            "--listen must have a port other than 0 with --engine ray, so that Ray can start the coordinator again at "
            "the same address"
        )
    if settings.credentials == str(folder.credentials):  # this shell has them from the output of an earlier call
        os.environ.pop("PENSTOCK_CREDENTIALS", None)
        settings = settings.model_copy(update={"credentials": ""})
    if not is_local and not settings.listen:
        settings = settings.model_copy(update={"listen": RAY_LISTEN})
    cores = max(1, len(os.sched_getaffinity(0)) // settings.workers)
    slots = settings.slots or (cores if is_local else 8)
    tokens = settings.tokens_in(token_file)
    own = {"slots": slots, "token_file": str(folder.token_file(None if tokens is None else Path(tokens)))}
    tls = _tls_files(settings)
    if is_local and settings.listen and not (is_loopback(settings.listen) or settings.insecure or tls):
        tls = {"credentials": str(folder.credentials)}
    return FleetPlan.model_validate({**settings.model_dump(), **tls, **own})


def _tls_files(settings: UpSettings) -> dict[str, str]:
    names = ("tls_ca", "tls_cert", "tls_key", "credentials")
    return {name: str(Path(file).expanduser().absolute()) for name in names if (file := getattr(settings, name))}


def _folder(settings: UpSettings) -> FleetFolder:
    return FleetFolder(Path(settings.dir) if settings.dir else state_home() / settings.name)


def _refuse_another(folder: FleetFolder, plan: FleetPlan) -> None:
    """Raise CommandError if another fleet runs in the folder: an engine never replaces it."""
    up = folder.fleet()
    if folder.supervised or (up is not None and (up.engine, up.name) != (plan.engine, plan.name)):
        what = f"{up.name} ({up.engine})" if up is not None else "a local one"
        raise CommandError(f"a fleet already runs in {folder.path}, {what}. End it by `penstock down`", USAGE)


def _print_exports(fleet: Fleet, as_json: bool) -> None:
    """Print the variables for a training job, the only text on standard output, and what is to be done on others."""
    print(json.dumps(fleet.as_dict(), indent=2) if as_json else exports(fleet), flush=True)
    if others := fleet.for_other_machines():
        print(others, file=sys.stderr)


def run_down(flags: dict[str, Any], timeout_s: float, as_json: bool) -> None:
    """End the fleet whose record is in the folder that `flags` (of `penstock up`) name."""
    folder = _folder(resolve(UpSettings, **flags))
    if not folder.path.is_dir():
        raise CommandError(
            f"no fleet was started in {folder.path}. Give the same --dir or --name as for `penstock up`", USAGE
        )
    fleet = folder.fleet()
    if fleet is None or fleet.engine == "local":
        ended = local.down(folder, timeout_s)
    else:
        ended = ray_down(fleet, timeout_s)
        folder.forget()
    if as_json:
        about = {"engine": fleet.engine, "name": fleet.name} if fleet is not None else {"engine": None, "name": None}
        print(json.dumps({**about, "dir": str(folder.path), "ended": ended}, indent=2))
    elif ended:
        print("\n".join(f"ended: {what}" for what in ended))
    else:
        print(f"no fleet is running in {folder.path}")
