"""What kernels and containers deny is said at once, by name, before anything is started; or it does no harm."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster import INPUTS
from denied import CALLS, cover, deny

from penstock.appliance.server.server import IN_MEMORY
from penstock.appliance.server.server import serve as serve_coordinator
from penstock.client import Appliance
from penstock.client.checkpoint.saving.staging import SharedImage
from penstock.deploy.doctor.machine_check import check_machine
from penstock.deploy.engines.engine import FleetPlan
from penstock.deploy.engines.fleet_folder import FleetFolder
from penstock.deploy.engines.supervisor import supervise
from penstock.proto.errors import PenstockError
from penstock.runtime.process.end import reap
from penstock.runtime.process.spawn import fork
from penstock.worker.daemon.serving import serve as serve_worker
from penstock.worker.daemon.worker_settings import DaemonSettings

NO_RIGHT = 77
NOWHERE = "127.0.0.1:1"
SOON_S = 20.0


def appliance() -> None:
    Appliance(num_workers_per_box=1)


def job() -> None:
    Appliance(NOWHERE, job="lm", box=0, num_boxes=1)


def worker() -> None:
    asyncio.run(serve_worker(DaemonSettings(coordinator=NOWHERE, token="x" * 32, slots=1, insecure=True)))


def coordinator() -> None:
    asyncio.run(serve_coordinator("127.0.0.1:0", IN_MEMORY, "x" * 32))


def fleet() -> None:
    plan = FleetPlan.model_validate({"token_file": "token", "slots": 1, "allow": "x"})
    supervise(plan, FleetFolder(Path(tempfile.gettempdir()) / "no-fleet"), lambda fleet: None)


def said(
    tmp_path: Path, denial: Callable[[], object], *starts: Callable[[], None]
) -> tuple[list[tuple[str, str]], list[str]]:
    """Return what the doctor finds amiss, with the level, and the errors of these starts, in a child to which something
    is denied."""

    def child() -> int:
        os.closerange(3, 4096)  # what the tests before left open, which can be more than a test allows
        with told.open("w") as file:
            try:
                denial()
            except PermissionError:
                return NO_RIGHT
            for finding in check_machine(1):
                if finding.check not in ("sandbox", "memory") and finding.level != "ok":
                    print("found", finding.check, finding.level, sep="\t", file=file)
            for start in starts:
                began = time.monotonic()
                try:
                    start()
                except PenstockError as error:
                    assert time.monotonic() - began < SOON_S
                    print(error.message, file=file)
        return 0

    told = tmp_path / "told"
    status = reap(fork(child))
    if status == NO_RIGHT:
        pytest.skip("needs the right to mount")
    assert status == 0
    lines = [line.split("\t") for line in told.read_text().splitlines()]
    found = [(line[1], line[2]) for line in lines if line[0] == "found"]
    return found, [line[0] for line in lines if line[0] != "found"]


@pytest.mark.parametrize("call", sorted(CALLS))
def test_system_call(call: str, tmp_path: Path) -> None:
    starts = [appliance, worker, fleet]
    starts += [job] if call in ("eventfd", "fallocate", "memfd_create") else []
    starts += [coordinator] if call == "flock" else []
    found, errors = said(tmp_path, lambda: deny(call), *starts)
    assert found[0] == (call, "problem")
    for error in errors:
        assert (
            f"cannot run here, which `penstock doctor` shows too: {call}: Operation not permitted. Use Linux" in error
        )
    assert len(errors) == len(starts)


@pytest.mark.parametrize("call", ["fallocate", "memfd_create"])
def test_memory_of_a_checkpoint(call: str, tmp_path: Path) -> None:
    """A checkpointer needs no appliance."""
    _, errors = said(tmp_path, lambda: deny(call), lambda: SharedImage(1).close())
    assert errors == ["4,096 bytes of shared memory for the state cannot be allocated: Operation not permitted"]


def test_few_open_files(tmp_path: Path) -> None:
    def denial() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))

    found, errors = said(tmp_path, denial, appliance, worker, coordinator, fleet)
    assert found == [("open files", "problem")]
    assert len(errors) == 4
    for error in errors:
        assert "open files: at most 24 may be open, but at least" in error
        assert "ulimit -Hn" in error


def test_no_proc(tmp_path: Path) -> None:
    found, errors = said(tmp_path, lambda: cover("/proc"), appliance, worker, coordinator, fleet)
    assert found == [("/proc", "problem")]
    assert len(errors) == 4
    assert all("/proc: No such file or directory. Mount it" in error for error in errors)


def test_no_temporary_folder(tmp_path: Path) -> None:
    """Only an embedded appliance needs one."""

    def denial() -> None:
        cover("/tmp", "/var/tmp", read_only=True)
        os.environ.pop("TMPDIR", None)
        os.chdir("/proc")
        tempfile.tempdir = None

    found, (error,) = said(tmp_path, denial, appliance)
    assert found == [("temporary folder", "warning")]
    assert "temporary folder: No usable temporary directory found" in error
    assert "Set TMPDIR" in error


def test_full_shared_memory(tmp_path: Path) -> None:
    found, _ = said(tmp_path, lambda: cover("/dev/shm"))
    assert found == [("/dev/shm", "warning")]


JOB = """
import streams
from penstock.client import Appliance, DataExecutor, DataLoader

if __name__ == "__main__":
    with Appliance(num_workers_per_box=1, timeout_s=60) as appliance:
        print(len(list(DataExecutor(DataLoader(streams.counter, 4), num_steps=4, appliance=appliance))))
"""


def test_only_ipv6_and_a_temporary_folder_whose_path_is_not_utf8(tmp_path: Path) -> None:
    """Neither matters: the daemons listen on [::1], and the socket is in /tmp."""
    script, folder = tmp_path / "job.py", os.fsencode(tmp_path) + b"/\xff"
    script.write_text(JOB)
    os.mkdir(folder)
    if shutil.which("ip") is None:
        pytest.skip("needs ip (iproute2)")
    inside = 'ip link set lo up && ip addr del 127.0.0.1/8 dev lo && exec "$@"'
    command = ["unshare", "--net", "sh", "-c", inside, "sh", sys.executable, str(script)]
    environment = {**os.environb, b"TMPDIR": folder, b"PENSTOCK_LANE": b"tcp", b"PYTHONPATH": INPUTS.encode()}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    if "unshare" in done.stderr:
        pytest.skip(f"needs a network namespace: {done.stderr}")
    assert (done.returncode, done.stdout) == (0, "4\n"), done.stderr
