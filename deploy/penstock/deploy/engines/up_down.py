"""Implementation of `penstock up` and `penstock down`: chooses the engine by the settings, and prints the result."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.deploy.console.daemon_settings import TlsSettings, resolve
from penstock.deploy.console.exit_codes import INTERRUPTED, USAGE, CommandError
from penstock.deploy.console.fleet_settings import ENGINES, UpSettings
from penstock.deploy.console.signals import signals_as_errors
from penstock.deploy.engines.engine import Fleet, FleetPlan, exports
from penstock.deploy.engines.fleet_folder import FleetFolder, default_folder
from penstock.deploy.engines.fleet_plan import plan_of
from penstock.deploy.engines.local import LocalEngine
from penstock.deploy.engines.ray import RayEngine
from penstock.deploy.engines.supervisor import supervise
from penstock.proto.rpc.addresses import refuse_unsafe

__all__ = ["run_down", "run_up"]


def run_up(
    flags: dict[str, Any],
    tls_flags: dict[str, str | None],
    token_file: Path | None,
    *,
    detach: bool,
    as_json: bool,
    debug: bool,
) -> None:
    """Start a fleet (a coordinator and workers). A local fleet without `detach` runs in this process, and the function
    returns when the fleet has ended. `flags`, `tls_flags`: values from the command line; None for those not given."""
    settings = resolve(UpSettings, **flags)
    tls = resolve(TlsSettings, **tls_flags)
    folder = _folder(settings)
    folder.make()
    plan = plan_of(settings, tls, token_file, folder)
    logging.basicConfig(
        level=logging.DEBUG if debug else logging.INFO, format="penstock up: %(message)s", stream=sys.stderr
    )
    if settings.engine != "local":
        _refuse_another(folder, plan)
        fleet = RayEngine().up(plan, folder.path)
        folder.save(fleet)
        _print_exports(fleet, as_json)
        return
    loaded = tls.load()
    refuse_unsafe(plan.listen, encrypted=loaded is not None and bool(loaded.cert), insecure=plan.insecure)
    if detach:
        with _signals_as_errors(folder) as check:
            fleet = LocalEngine().up(plan, folder.path)
            try:
                check()
            except CommandError:
                LocalEngine().down(folder.path, DOWN_S)
                raise
        _print_exports(fleet, as_json)
        return
    supervise(plan, folder, lambda fleet: _print_exports(fleet, as_json))


DOWN_S = 60.0
"""Seconds in which a fleet that is stopped while it starts must end, before its processes are killed."""


def _folder(settings: UpSettings) -> FleetFolder:
    return FleetFolder(Path(settings.dir) if settings.dir else default_folder(settings.name))


def _signals_as_errors(folder: FleetFolder) -> contextlib.AbstractContextManager[Callable[[], None]]:
    """Return a context in which a signal that would end this process raises an error instead, as Ctrl-C does. So a
    fleet that is being started is ended, too."""
    return signals_as_errors(
        lambda number: CommandError(
            f"the fleet in {folder.path} was ended by {number.name} while it was starting", INTERRUPTED
        )
    )


def _refuse_another(folder: FleetFolder, plan: FleetPlan) -> None:
    """Raise CommandError if another fleet runs in the folder. An engine may change its own fleet, but never replaces
    another one."""
    up = folder.fleet()
    if folder.supervised or (up is not None and (up.engine, up.name) != (plan.engine, plan.name)):
        what = f"{up.name} ({up.engine})" if up is not None else "a local one"
        raise CommandError(f"a fleet already runs in {folder.path}, {what}. End it by `penstock down`", USAGE)


def _print_exports(fleet: Fleet, as_json: bool) -> None:
    """Print the variables that a training job needs to find the fleet. They are the only text on standard output."""
    print(json.dumps(fleet.as_dict(), indent=2) if as_json else exports(fleet), flush=True)


def run_down(flags: dict[str, Any], timeout_s: float, as_json: bool) -> None:
    """End the fleet whose record is in the folder. `flags`: flags of `penstock up` that say which folder it is."""
    where = _folder(resolve(UpSettings, **flags))
    if not where.path.is_dir():
        raise CommandError(
            f"no fleet was started in {where.path}. Give the same --dir or --name as for `penstock up`", USAGE
        )
    fleet = where.fleet()
    if fleet is None or fleet.engine == "local":
        ended = LocalEngine().down(where.path, timeout_s)
    else:
        if fleet.engine not in ENGINES:  # another release wrote the record
            raise CommandError(
                f"the engine must be one of {', '.join(ENGINES)}, got {fleet.engine} for the fleet in "
                f"{where.path}. Run `penstock down` of the release that started it",
                USAGE,
            )
        ended = RayEngine().down(fleet, timeout_s)
        where.forget()
    if as_json:
        about = {"engine": fleet.engine, "name": fleet.name} if fleet is not None else {"engine": None, "name": None}
        print(json.dumps({**about, "dir": str(where.path), "ended": ended}, indent=2))
    elif ended:
        print("\n".join(f"ended: {what}" for what in ended))
    else:
        print(f"no fleet is running in {where.path}")
