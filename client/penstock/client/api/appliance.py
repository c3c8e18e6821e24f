"""Appliance: a training process's connection to the coordinator and workers that make its batches.

Without an address it starts both daemons as a child of this process (under torchrun, local rank 0 does so for all ranks
of the machine); with `num_workers_per_box=0` nothing. Loaders iterated without an appliance share one: the innermost
`with` of the thread, else the only one open in other threads (scopes.py), else a default one made from the environment,
which lives to the end of the process."""

from __future__ import annotations

import atexit
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

from penstock.client.api.appliance_settings import (
    ApplianceOptions,
    ApplianceSettings,
    Launcher,
    attempt_key,
    check_names,
    check_ranks,
    given_ranks,
    resolve,
    signature_of,
)
from penstock.client.api.rendezvous import CoordinatorAccess, SharedAppliance
from penstock.client.api.scopes import EnteredScope
from penstock.client.embedded import Embedded, ended_error
from penstock.client.states.code_reference import check_guard, command_line, forbid_in_runner, main_line, search_path
from penstock.client.states.saved_state import BoxStart
from penstock.client.stream import open_streams
from penstock.client.stream.device_reader import reader_for
from penstock.client.stream.open_run import OpenRun, RunLink
from penstock.client.stream.receiver_process import Receiver
from penstock.client.stream.streams import Opening, Reader, StreamRun
from penstock.client.stream.wait_notice import WaitNotice
from penstock.proto.batch.digest import DigestCover
from penstock.proto.errors import (
    BoxTakenError,
    CoordinatorUnavailableError,
    InvalidArgumentError,
    OverloadedError,
    PenstockError,
)
from penstock.proto.lane.frames import LANE_PROTOCOL
from penstock.proto.rpc.addresses import host_id, is_local, refuse_clear_token, socket_path
from penstock.proto.rpc.calls import CoordinatorClient
from penstock.proto.rpc.credentials.tokens import admin_tokens, read_token
from penstock.proto.rpc.tls import Tls
from penstock.proto.rpc.version import VERSION
from penstock.proto.state.position import Position
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.proto.v1 import records_pb2
from penstock.runtime.moved_names import says_where
from penstock.runtime.process.forks import OwnerProcess
from penstock.runtime.process.machine_needs import require

if TYPE_CHECKING:
    from penstock.client.in_process import Fault

REACH_S = 20.0
"""Seconds for which an unreachable coordinator is called again: a restart of the coordinator takes a few seconds."""
RETRY_S = 0.25

_open: weakref.WeakSet[Appliance] = weakref.WeakSet()
_lines: set[int] = set()
"""Lines of the training script at which appliances were made and runs opened."""


@says_where
class Appliance:
    """Connection of this process, one box, to the coordinator and workers that load its data.

    Example::

        with Appliance(num_workers_per_box=4, device="cuda"):            # embedded: all on this machine
            for batch in DataExecutor(loader, num_steps=1000):
                ...
        appliance = Appliance("coordinator:7001", job="run-7", seed=1)   # workers on other machines

    An argument that is left out comes from the variable PENSTOCK_<NAME> (the address from PENSTOCK_COORDINATOR), then,
    for box and num_boxes, from torchrun's RANK and WORLD_SIZE or torch.distributed, then from the settings file, then
    from the default in brackets.

    Args:
        address: "host:port" of the coordinator. None: embedded; coordinator and workers are started on this machine,
            and stopped with this appliance.
        options: see ApplianceOptions in penstock.client.api.appliance_settings, and the API's page. Credentials,
            transport and metrics are set by variables and the settings file alone: `penstock config` lists them.

    Raises:
        InvalidArgumentError, BoxOutOfRangeError: an argument or a variable has an invalid value; this process cannot
            use the device; the compression package is not installed.
        TlsError: a certificate or key cannot be used, and the error names the file; or there is none, and the token
            would cross TCP without `insecure`.
        RuntimeError: called inside a worker, because the main script has no `if __name__ == "__main__":`."""

    def __init__(self, address: str | None = None, **options: Unpack[ApplianceOptions]) -> None:
        forbid_in_runner("creating an Appliance")
        check_names(options)
        self._given_ranks = given_ranks(options)
        self._describe(resolve(address=address, **options))
        self._tls = _tls_of(self.settings)
        self.metrics_url = _exported(self.settings, self._launcher, self._tls)
        if not self.in_process:
            self._connect()
        _open.add(self)

    _given_ranks = frozenset({"box", "num_boxes"})

    metrics_url = ""
    """URL of the page with this process's metrics; "" without PENSTOCK_HTTP."""

    def _describe(self, settings: ApplianceSettings) -> None:
        self.settings = settings
        self._launcher = Launcher()
        self._owner = OwnerProcess()
        _lines.add(main_line())
        self._closed = False
        self._lock = threading.Lock()
        self._runs: list[StreamRun] = []
        self._ordinals: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._opened = 0
        self._seeds: dict[int, int] = {}
        """By the loader's number in the job: a loader whose run is opened again keeps its seed."""
        self._job_here = ""
        self._faults: tuple[Fault, ...] = ()
        self.in_process = settings.num_workers_per_box == 0
        self.embedded = self.in_process or not settings.address

    def _connect(self) -> None:
        settings = self.settings
        self._access: CoordinatorAccess | None = None
        self._daemons: Embedded | None = None
        self._rendezvous: SharedAppliance | None = None
        require("Appliance()", "job")
        self._receiver = Receiver(settings.max_batch_bytes, self._tls)
        open_streams.receivers.add(self._receiver)
        if settings.address:
            token = read_token("client", settings.tokens_in())
            self._access = CoordinatorAccess(settings.address, token, self._job(fresh=settings.num_boxes == 1))
        elif settings.num_boxes == 1:
            self._embed()
        elif self._launcher.one_host:
            self._rendezvous = SharedAppliance(self._launcher)
            if self._rendezvous.hosts:
                self._embed()
                assert self._access is not None
                self._rendezvous.publish(self._access)
        else:
            where = "several hosts" if self._launcher.key else "several processes"
            alone = "" if self._launcher.key else ", or let torchrun or MASTER_ADDR=localhost say that all are here"
            raise InvalidArgumentError(
                f"Appliance(num_boxes={settings.num_boxes}) over {where} needs a coordinator's address, got none: "
                "start `penstock coordinator` and `penstock worker`, and pass the address or set PENSTOCK_COORDINATOR"
                f"{alone}"
            )

    def _embed(self) -> None:
        settings = self.settings
        slots = settings.num_boxes * settings.slots_per_box
        require("Appliance()", "embedded", "coordinator", "worker", slots=slots)
        self._daemons = daemons = Embedded(_on_death(self))
        weakref.finalize(self, daemons.let_go).atexit = False  # dropped without being closed
        job = self._job(fresh=True)
        daemons.announce(job)
        self._access = CoordinatorAccess(daemons.address, daemons.token, job)

    def _job(self, *, fresh: bool) -> str:
        run_id = self._launcher.run_id
        job = self.settings.job or ("" if run_id == "none" else run_id.replace("/", "-"))
        if job or fresh:
            return job or f"job-{secrets.token_hex(4)}"
        raise InvalidArgumentError(
            f"job must be given with num_boxes={self.settings.num_boxes}, got none: pass Appliance(job=...) or set "
            "PENSTOCK_JOB, with the same name on all boxes"
        )

    def _client(self) -> CoordinatorClient:
        access = self._access
        assert access is not None
        return CoordinatorClient(access.address, access.token, tls=self._tls, insecure=self.settings.insecure)

    # ---- opening a run

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def job(self) -> str:
        """Name of the job. In embedded mode the first access waits until the daemons have started."""
        if not self.in_process:
            return self._reach(time.monotonic() + self.settings.timeout_s, WaitNotice()).job
        if not self._job_here:
            self._job_here = self._job(fresh=True)
        return self._job_here

    def _check_open(self) -> None:
        self._owner.check(f"{self!r}")
        if self._closed:
            raise PenstockError(f"this {type(self).__name__} is closed: make a new one")

    def _reach(self, deadline: float, notice: WaitNotice) -> CoordinatorAccess:
        """Wait until an embedded coordinator accepts calls (beyond local rank 0: until rank 0 sends its address)."""
        self._check_open()
        if self._access is None:
            assert self._rendezvous is not None
            self._access = self._rendezvous.join(
                deadline,
                self.settings.timeout_s,
                lambda: notice.tell("local rank 0", "it has not started the embedded appliance"),
            )
        if self._daemons is not None:
            self._daemons.wait_until_up(deadline, lambda: notice.tell("the embedded coordinator", "it is starting"))
        return self._access

    def open_stream(self, owner: Any, opening: Opening) -> tuple[StreamRun, Reader]:
        check_ranks(self.settings, self._given_ranks)
        if self.in_process:
            return self._open_here(owner, opening)
        settings, run = self.settings, self._open_run(owner, opening)
        position = Position.received(opening.start.position)
        return run, reader_for(settings.device, run, position, opening.reference.label, settings.timeout_s)

    def _open_here(self, owner: Any, opening: Opening) -> tuple[StreamRun, Reader]:
        # imported here, because it imports the worker's code
        from penstock.client.in_process import InProcessReader, InProcessRun

        self._check_open()
        settings, ordinal = self.settings, self._ordinal(owner)
        seed = opening.seed if opening.seed is not None else self._seeds.get(ordinal)
        if seed is None and settings.num_boxes > 1:
            raise InvalidArgumentError(
                f"seed must be given with num_workers_per_box=0 and num_boxes={settings.num_boxes}, got none: pass "
                "Appliance(seed=...), the same on all boxes"
            )
        self._seeds[ordinal] = seed = secrets.randbits(63) if seed is None else seed
        options = self._spec(replace(opening, arguments=b"")).options
        topology = settings.box, settings.num_boxes, settings.slots_per_box
        run = InProcessRun(f"{self.job}/{ordinal}", *topology, options, opening, seed, self._forget)
        reader = InProcessReader(run, opening.reference.label, settings.device, settings.timeout_s, self._faults)
        with self._lock:
            self._runs.append(run)
        return run, reader

    def _ordinal(self, owner: Any) -> int:
        ordinal = self._ordinals.get(owner)
        if ordinal is None:
            ordinal = self._ordinals[owner] = self._opened
            self._opened += 1
        return ordinal

    def _open_run(self, owner: Any, opening: Opening) -> OpenRun:
        reference, start = opening.reference, opening.start
        _lines.add(main_line())
        check_guard(reference, _lines)
        settings = self.settings
        deadline, notice = time.monotonic() + settings.timeout_s, WaitNotice()
        access = self._reach(deadline, notice)
        if reference.only_here is not None and not self.embedded:
            raise InvalidArgumentError(
                f"{reference.only_here.message} (the coordinator at {access.address} accepts no code by value)"
            )
        if reference.main_path and not self.embedded:
            raise InvalidArgumentError(
                f"input_fn {reference.name.partition(':')[2]!r} is defined in the main script {reference.main_path}, "
                f"which workers of {access.address} cannot import: move it to a module that they can"
            )
        beside = socket_path(access.address)
        link = RunLink(
            client=self._client,
            receiver=self._receiver.start,
            host=host_id(),
            folder=beside and beside.parent,
            force_tcp=settings.lane == "tcp",
            compression=settings.compression,
            embedded=self.embedded,
            gone=self._gone,
            began=self._launcher.began,
        )
        request = pb.OpenRunRequest(
            version=VERSION,
            job=access.job,
            ordinal=self._ordinal(owner),
            attempt_key=attempt_key(settings, self._launcher) + opening.key,
            client_id=secrets.token_hex(16),
            box=settings.box,
            num_boxes=settings.num_boxes,
            num_workers_per_box=settings.slots_per_box,
            host_id=link.host,
            host=socket.gethostname(),
            loader=self._spec(opening),
            start=start.position,
            lane_protocol=LANE_PROTOCOL,
        )
        if opening.seed is not None:
            request.has_seed, request.seed = True, opening.seed
        run = OpenRun(link, request, self._forget, notice)
        with self._lock:
            self._runs.append(run)  # first, so that an end of the daemons reaches it
        try:
            self._open_patiently(deadline, run, start)
        except BaseException:
            run.close()
            raise
        return run

    def _gone(self) -> PenstockError | None:
        """Return the error of embedded daemons that have ended. Local rank 0 gets it from their process; other ranks
        find their socket without a listener, which an embedded coordinator never has again."""
        if not self.embedded or self._access is None:
            return None
        if self._daemons is not None:
            return self._daemons.failure
        return ended_error(self._access.address)

    def _open_patiently(self, deadline: float, run: OpenRun, start: BoxStart) -> None:
        """Open the run. Repeat it while the coordinator cannot be reached, which recognises a repeated call, or takes
        the box for held: perhaps by a dead process of the last launch, or by one that is about to be ended."""
        give_up = min(deadline, time.monotonic() + REACH_S)
        while True:
            if self._daemons is not None and self._daemons.failure is not None:
                raise self._daemons.failure
            try:
                run.open(start)
                return
            except BoxTakenError as error:
                if time.monotonic() > give_up:
                    raise
                run.notice.tell("the coordinator", error.message)
                time.sleep(RETRY_S)
            except CoordinatorUnavailableError as error:
                if time.monotonic() > give_up:
                    what = f"{error.message} (tried for {min(REACH_S, self.settings.timeout_s):g} s)"
                    if isinstance(error, OverloadedError):
                        raise OverloadedError(what) from None
                    raise CoordinatorUnavailableError(
                        f"{what}. Check that the coordinator runs at this address"
                    ) from None
                run.notice.tell("the coordinator", error.message)
                run.reach(error.retry_after_s if isinstance(error, OverloadedError) else RETRY_S)

    def _spec(self, opening: Opening) -> records_pb2.LoaderSpec:
        settings = self.settings
        reference, cover = opening.reference, opening.cover
        spec = records_pb2.LoaderSpec(input_fn=reference.name, title=reference.title, arguments=opening.arguments)
        spec.options.max_batch_bytes = settings.max_batch_bytes
        spec.options.full_digest, spec.options.row_digest = cover == DigestCover.FULL, cover == DigestCover.ROWS
        spec.options.strict_structure = settings.strict_structure
        spec.options.replay_without_state = opening.replay
        spec.options.replay_s = settings.replay_s
        spec.options.retention_steps = settings.retention_steps
        spec.options.force_tcp = settings.lane == "tcp"
        spec.options.timeout_s = settings.timeout_s
        spec.options.skip_poison = settings.poison == "skip"
        spec.options.synthetic = settings.synthetic
        if self.embedded:
            # Workers of the same user on the same machine must find the modules that this process can import, and a
            # script or module that reads its options as it is loaded must read those of this process.
            spec.sys_path.extend(search_path())
            spec.argv = command_line()
            spec.main_path = reference.main_path
        return spec

    # ---- closing

    def _forget(self, run: StreamRun) -> None:
        with self._lock:
            if run in self._runs:
                self._runs.remove(run)

    def close(self) -> None:
        """Close all runs and stop the processes that this appliance started. Batches that the loop holds stay valid.
        Local rank 0 of torchrun first waits, at most a minute, for the other ranks."""
        if not self._owner.is_here:
            return  # a forked child of the training process, at its exit
        with self._lock:
            if self._closed:
                return
            self._closed = True
            runs = list(self._runs)
        _open.discard(self)
        for run in runs:
            run.close()
        if not self.in_process:
            self._disconnect()

    def _disconnect(self) -> None:
        self._receiver.stop()
        stop = self._daemons.close if self._daemons is not None else lambda: None
        if self._rendezvous is not None:
            self._rendezvous.leave(stop)
        else:
            stop()

    def __enter__(self) -> Self:
        _entered.enter(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        _entered.leave(self)
        self.close()

    def __repr__(self) -> str:
        settings = self.settings
        where = "in this process" if self.in_process else settings.address or "embedded"
        topology = f"box {settings.box} of {settings.num_boxes}, {settings.num_workers_per_box} workers each"
        return f"<{type(self).__name__} {where}, {topology}>"


Appliance.__signature__ = signature_of(Appliance.__init__)  # type: ignore[attr-defined]


def _on_death(appliance: Appliance) -> Callable[[PenstockError], None]:
    """Return a function that ends all runs with an error, and does not keep the appliance alive."""
    reference = weakref.ref(appliance)

    def end(error: PenstockError) -> None:
        appliance = reference()
        for run in list(appliance._runs) if appliance is not None else ():
            run.fail(error, gone=True)

    return end


def _tls_of(settings: ApplianceSettings) -> Tls | None:
    if not settings.address:
        return None
    tls = settings.tls()
    refuse_clear_token(settings.address, encrypted=tls is not None, insecure=settings.insecure)
    return None if tls is None else tls.for_client()


def _exported(settings: ApplianceSettings, launcher: Launcher, tls: Tls | None) -> str:
    if not settings.http:
        return ""
    from penstock.client.metrics import open_web

    tokens = "" if is_local(settings.http) else admin_tokens(settings.tokens_in())
    return open_web(settings.http, launcher.local_rank, tokens, tls)


@atexit.register
def _close_all() -> None:
    for appliance in list(_open):
        appliance.close()


_entered: EnteredScope[Appliance] = EnteredScope(
    "penstock-appliances",
    "one appliance must be open for this thread, got {count} in `with` statements of other threads: pass "
    "DataExecutor(loader, appliance=...), or open the appliance in the thread that uses it",
    lambda appliance: not appliance.closed,
)


# ---- the default appliance

_default: Appliance | None = None
_default_lock = threading.Lock()


def current_appliance() -> Appliance:
    """Return the appliance for a loader that names none, see the module. Raises AmbiguousContextError."""
    global _default
    appliance = _entered.innermost()
    if appliance is not None:
        return appliance
    with _default_lock:
        if _default is None or _default.closed:
            _default = Appliance()
        return _default


def current_settings() -> ApplianceSettings:
    """Return the settings of the appliance that current_appliance() would return, without making one."""
    appliance = _entered.innermost() or _default
    return resolve() if appliance is None or appliance.closed else appliance.settings
