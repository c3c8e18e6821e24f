"""Checks of `penstock doctor machine`: calls machine_findings.py with the properties and the effective settings of this
machine."""

from __future__ import annotations

import datetime
import errno
import fcntl
import os
import platform
import resource
import shutil
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.deploy.console.daemon_settings import (
    IN_MEMORY,
    CoordinatorSettings,
    PeerSettings,
    TlsSettings,
    WorkerSettings,
    listen_address,
)
from penstock.deploy.console.exit_codes import debugging
from penstock.deploy.console.settings_sources import check_settings_file, flag
from penstock.deploy.doctor import machine_findings, machine_probes
from penstock.deploy.doctor.findings import Finding, ok, problem, warning
from penstock.deploy.doctor.import_check import try_import
from penstock.proto.errors import (
    DeadlineError,
    InputFnNotFoundError,
    InvalidArgumentError,
    PenstockError,
    TlsError,
)
from penstock.proto.rpc.credentials.roles import ROLES
from penstock.proto.rpc.credentials.tokens import Tokens, read_tokens, tokens_given
from penstock.proto.rpc.tls import expires, host_of, load_tls, own_names
from penstock.proto.state.allowed_modules import module_of, under
from penstock.runtime.config.job_settings import JobSettings
from penstock.runtime.config.settings import ResolvedSetting, Section, find
from penstock.runtime.config.settings_file import VARIABLE, read_settings_file
from penstock.runtime.files import filesystems
from penstock.runtime.process import sandbox
from penstock.worker.tools.loader_children import find_user

__all__ = ["MachineRequest", "check_import", "check_machine"]


@dataclass(frozen=True)
class MachineRequest:
    """Values from the command line for the checks of a machine. A value that was not given is None; the check then uses
    the effective setting."""

    flags: dict[str, Any]
    """Values of settings that were given as options: listen and state_dir of a coordinator, slots and allow of a
    worker, the TLS files."""
    token_file: Path | None = None
    input_fn: str | None = None
    """input_fn that must be importable here, as "module:name"; None: no import is tried."""
    deadline_s: float = 60.0
    """Longest time that the import of the input_fn may take, in seconds."""


def check_machine(request: MachineRequest) -> Iterator[Finding]:
    """Yield all findings, in the order in which a person checks them. Raises InvalidArgumentError for an invalid
    --listen."""
    if (listen := request.flags.get("listen")) is not None:
        try:
            listen_address(listen)
        except ValueError as error:
            raise InvalidArgumentError(f"{flag('listen')} {listen}: {error}") from error
    yield machine_findings.check_python(sys.version_info[:3])
    requires = machine_probes.requirements()
    yield from machine_findings.check_packages(requires, machine_probes.installed(requires))
    yield machine_findings.check_torch_build(machine_probes.cuda_packages(), machine_probes.nvidia_devices())
    yield machine_findings.check_kernel(platform.release(), machine_probes.kernel_gaps())
    yield machine_findings.check_sandbox(sandbox.why_not_whole())
    yield _groups(off=bool(_value(WorkerSettings, "no_groups", request)))
    yield _runner_user(_value(WorkerSettings, "runner_user", request) or "")
    yield from _settings()
    slots = _value(WorkerSettings, "slots", request) or os.cpu_count() or 1
    device = _value(JobSettings, "device", request) or ""
    available = machine_probes.memory_available(Path("/proc/meminfo").read_text())
    yield machine_findings.check_memory(available, machine_probes.cgroup_left("memory"), slots)
    yield machine_findings.check_files(*resource.getrlimit(resource.RLIMIT_NOFILE), slots)
    yield machine_findings.check_processes(
        resource.getrlimit(resource.RLIMIT_NPROC)[0], machine_probes.cgroup_left("pids"), slots
    )
    yield machine_findings.check_locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], device)
    now = datetime.datetime.now(datetime.UTC)
    yield machine_findings.check_clock(machine_probes.clock_source(), now, machine_probes.clock_synchronised())
    state_dir = _value(CoordinatorSettings, "state_dir", request)
    if state_dir is not None and os.fspath(state_dir) != IN_MEMORY:
        yield _disk(Path(state_dir))
    for section in (CoordinatorSettings, WorkerSettings):
        yield from _port(section, request, None if state_dir is None else Path(state_dir))
    yield from _tls(request, now)
    yield _token(request.token_file)
    if request.input_fn is not None:
        allow = _value(WorkerSettings, "allow", request)
        yield check_import(request.input_fn, allow.split(",") if allow else None, request.deadline_s)


def _groups(*, off: bool) -> Finding:
    from penstock.worker.tools.loader_children import control_groups

    return machine_findings.check_groups(
        "they are off (no_groups)" if off else control_groups.why_not(*control_groups.here())
    )


def _runner_user(wanted: str) -> Finding:
    why_not = ""
    try:
        if wanted:
            find_user(wanted)
    except InvalidArgumentError as error:
        why_not = error.message
    return machine_findings.check_runner_user(wanted, why_not, as_root=os.geteuid() == 0)


def _settings() -> Iterator[Finding]:
    try:
        check_settings_file()
        file = read_settings_file()
    except PenstockError as error:
        yield problem("settings", error.message, "penstock config --example shows all settings.")
        os.environ[VARIABLE] = os.devnull  # the other checks run without the invalid settings file
        return
    sections = (CoordinatorSettings, WorkerSettings, PeerSettings, TlsSettings, JobSettings)
    wrong = {
        f"{each.source}: {each.field}: {each.problem}" for section in sections for each in find(section) if each.problem
    }
    for line in sorted(wrong):
        yield problem("settings", line, "Correct the value there; `penstock config` shows the effective settings.")
    if not wrong:
        yield ok("settings", f"from {file.path}" if file else "no file; variables and defaults")


def _found(section: type[Section], field: str) -> ResolvedSetting:
    return next(each for each in find(section) if each.field == field)


def _value(section: type[Section], field: str, request: MachineRequest) -> Any:
    """Return the value of a setting, from the command line or another source; None if it is missing or invalid."""
    given = request.flags.get(field) if section is not JobSettings else None
    if given is not None:
        return given
    found = _found(section, field)
    return None if found.problem or not found.source else found.value


def _disk(path: Path) -> Finding:
    there = machine_probes.nearest(path)
    kind = filesystems.filesystem(there, Path("/proc/self/mountinfo").read_text())
    return machine_findings.check_disk(
        str(path), kind, kind in filesystems.NETWORK, shutil.disk_usage(there).free, machine_probes.fsync_s(there)
    )


def _port(section: type[Section], request: MachineRequest, state_dir: Path | None) -> Iterator[Finding]:
    """Check whether the port of a daemon is free. A port in use is a problem if a daemon of this kind is to run here,
    which an address or a state directory in the settings or options shows. Otherwise it is a warning."""
    name = section.table
    given = request.flags.get("listen") if section is CoordinatorSettings else None
    listen = given or _value(section, "listen", MachineRequest({}))
    if not listen:
        return
    host, port = host_of(listen)
    check = f"port of the {name}"
    error = machine_probes.bind_error(host, port)
    if error is None:
        yield ok(check, f"{listen} is free" if port else f"{listen} can be bound")
    elif error.errno == errno.EADDRINUSE:
        holder = _holder(state_dir) if section is CoordinatorSettings and state_dir else ""
        meant = given or _found(section, "listen").source not in ("", "default") or state_dir is not None
        remedy = f"Stop what listens there (ss -ltnp 'sport = :{port}'), or choose another: {flag('listen')} HOST:PORT"
        if holder:
            yield ok(check, f"{listen} is in use by the coordinator that runs here (process {holder})")
        else:
            yield (problem if meant else warning)(check, f"{listen} is in use", remedy)
    else:
        why = error.strerror or str(error)
        yield problem(
            check, f"{listen} cannot be listened on: {why}", f"{flag('listen')} with an address of this machine."
        )


def _holder(state_dir: Path) -> str:
    """Return the process id of the coordinator that runs on the state directory, as a text ("unknown" if it has not
    written one); "" if no coordinator does, or if the directory has no lock file that this user can read."""
    try:
        fd = os.open(state_dir / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return os.pread(fd, 64, 0).decode(errors="replace").strip() or "unknown"
    finally:
        os.close(fd)
    return ""


def _tls(request: MachineRequest, now: datetime.datetime) -> Iterator[Finding]:
    names = ("tls_ca", "tls_cert", "tls_key", "tls_name")
    files = {name: str(_value(TlsSettings, name, request) or "") for name in names}
    try:
        tls = load_tls(*files.values())
    except TlsError as error:
        yield problem("TLS", error.message, "docs/security.md has the recipe for a CA and certificates.")
        return
    if tls is None:
        yield ok("TLS", "not set up; without it daemons listen on this machine only")
    elif tls.cert:
        roles = tls.roles_named(own_names(tls), (*ROLES, "coordinator")) if tls.by_role else None
        yield machine_findings.check_tls(tls.cert_file, expires(tls), now, tls.name, roles)
    else:
        yield ok("TLS", f"{tls.ca_file} can be read; no certificate to show")


def _token(file: Path | None) -> Finding:
    try:
        if not tokens_given(file):
            return warning(
                "token",
                "none is set",
                "A coordinator makes one in its state directory; elsewhere: export PENSTOCK_TOKEN_FILE=FILE",
            )
        return ok("token", f"for {Tokens(read_tokens(file)).about}")
    except PenstockError as error:
        return problem("token", error.message, "See docs/cli.md, The token.")


def check_import(input_fn: str, allow: list[str] | None, deadline_s: float) -> Finding:
    """Check whether the input_fn can be imported here and whether its module is allowed. `allow`: module prefixes that
    a worker on this machine may run; None: not known."""
    check, module = "input_fn", module_of(input_fn)
    try:
        imported = try_import(input_fn, deadline_s)
    except InvalidArgumentError as error:
        return problem(check, error.message, "Correct --input-fn.")
    except InputFnNotFoundError as error:
        if "no module named" not in error.message:  # the module was found, and lacks the name
            return problem(
                check, error.message, "Correct the name in --input-fn, or install the module's right version."
            )
        return problem(
            check,
            error.message,
            f"pip install it on {socket.gethostname()}, or set PYTHONPATH to the folder of {module}.",
        )
    except DeadlineError as error:
        return problem(
            check, error.message, "Move loading of data and waiting for others from the module into input_fn."
        )
    except PenstockError as error:
        if error.remote_traceback and debugging():
            print(error.remote_traceback.rstrip(), file=sys.stderr)
        return problem(check, error.message, f'python -c "import {module}" shows the same.')
    if allow is not None and not under(module, allow):
        return problem(
            check,
            f"{module} can be imported, but a worker here may not run it: --allow is {','.join(allow)}",
            f"Start the worker with --allow {module.partition('.')[0]}.",
        )
    admitted = "" if allow is None else ", and a worker here may run it"
    return ok(check, f"{input_fn} can be imported from {imported.file or module}{admitted}")
