"""Setup that all tests share: paths of their modules, an environment without settings of Penstock, and their order."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

os.environ["HYPOTHESIS_NO_PLUGINS"] = "1"  # that of trio imports trio, in each process of pytest
import hypothesis
from hypothesis.internal.conjecture import providers

HERE = Path(__file__).parent
# inputs: users' modules, which workers import too. support: what several test modules need.
# simulation: `simulated`, which `make simulate` runs too. fuzz: the targets, which `make fuzz` runs too.
# model: `proof`, which `make histories` runs too.
sys.path[:0] = [str(HERE / folder) for folder in ("inputs", "support", "simulation", "fuzz", "model")]

gc.disable()  # until all is imported and collected, see below: it would walk thousands of tests again and again

for _name in {name for name in os.environ if name.startswith(("PENSTOCK_", "TORCHELASTIC_"))} - {"PENSTOCK_SIGNALS"}:
    del os.environ[_name]
os.environ["PENSTOCK_INSECURE"] = "true"  # most clusters of tests are on loopback, with tokens of tests
os.environ["PENSTOCK_CONFIG"] = os.devnull  # not the settings file that a developer has at home
# What runs here announces itself in this folder: neither a developer's nor another test process's is found.
os.environ["XDG_RUNTIME_DIR"] = tempfile.mkdtemp(prefix="penstock-tests-")
atexit.register(shutil.rmtree, os.environ["XDG_RUNTIME_DIR"], ignore_errors=True)
# numpy's BLAS starts a thread for each core when it is imported, and these spin for a tenth of a second each time.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

# A shell without job control has what it starts in the background ignore Ctrl-C, and all that is started by that, too;
# nohup does the same with a closed terminal.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# A deadline of 200 ms for each example is a timed test: it fails on a machine that others use. And who lands something
# should not be stopped by an example that is new: they are the same each time, but with --hypothesis-profile search.
hypothesis.settings.register_profile("landing", deadline=None, derandomize=True)
hypothesis.settings.register_profile("search", deadline=None)
hypothesis.settings.load_profile("landing")
# Each process would read all our modules for constants to draw, a second of a core, and draw others in another order of
# files, because it knows those that are imported so far.
providers._get_local_constants = lambda: providers._local_constants

LONGEST = (
    "deploy/test_alerts",
    "system/test_mix",
    "model/test_mutations",
    "integrations/test_kill_and_resume",
    "docs/test_blocks",
    "checkpoint/test_bucket_kills",
    "checkpoint/test_killed_writer",
    "benchmarks/test_checkpoint",
    "deploy/test_doctor",
    "deploy/test_dashboard",
    "deploy/test_mix_command",
    "deploy/test_telemetry",
    "model/test_histories",
    "system/test_user_code",
    "system/test_embedded",
    "system/test_runner_user",
    "system/test_runner_faults",
    "system/test_elastic",
    "system/test_idle",
    "system/test_stopped",
    "system/test_partitions",
    "system/test_network_faults",
    "system/test_daemon_faults",
    "system/test_coordinator_faults",
    "system/test_memory_limit",
    "system/test_replay",
    "system/test_appliance_contract",
    "system/test_disk_faults",
    "system/test_client_faults",
    "system/test_chains",
    "worker/test_children",
)
"""Files that take more than half a minute, the longest first; those of one folder, which share daemons, together."""
STARTING = (
    "system",
    "integrations",
    "deploy",
    "client",
    "checkpoint",
    "model",
    "security",
    "simulation",
    "docs",
    "packaging",
)
"""Folders whose tests start processes and wait for them."""
SLOW_SUITES = {
    "benchmarks",
    "integrations",
    "packaging",
    "checkpoint/test_bucket_kills",
    "checkpoint/test_killed_writer",
    "checkpoint/test_other_libraries",
    "checkpoint/test_power_loss",
    "deploy/test_alerts",
    "deploy/test_demo",
    "deploy/test_run_ends",
    "deploy/test_set_ups",
    "docs/test_blocks",
    "docs/test_notebook",
    "model/test_mutations",
    "model/test_random_histories",
    "system/test_chains",
    "system/test_chaos",
    "system/test_client_faults",
    "system/test_coordinator_faults",
    "system/test_daemon_faults",
    "system/test_denied_threads",
    "system/test_elastic",
    "system/test_idle",
    "system/test_memory_limit",
    "system/test_mix",
    "system/test_network_faults",
    "system/test_partitions",
    "system/test_runner_faults",
    "system/test_signals",
    "system/test_stopped",
    "system/test_upgrades",
}
"""Folders and files that `make slow` runs and `make test` leaves out: whole trainings, programs and pages, and faults
of real processes at many moments. Each protects a whole that the other tests prove in parts: the decisions after a
fault in tests/simulation, tests/appliance and tests/worker, a lost worker and a resume in tests/system."""


@cache
def _is_slow(path: Path) -> bool:
    """Return True for a file or a folder of the slow suites."""
    inside = path.relative_to(HERE)
    return not SLOW_SUITES.isdisjoint((inside.with_suffix("").as_posix(), *inside.parts[:1]))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files whose tests the option -m deselects anyway: importing them takes each process seconds."""
    chosen, path = config.getoption("markexpr"), collection_path
    if chosen not in ("slow", "not slow") or not path.is_relative_to(HERE) or not path.name.startswith("test_"):
        return None
    return True if _is_slow(path) != (chosen == "slow") else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the slow suites, and sort the files: long ones first, and then folders that start processes. A file that
    takes a minute and comes last keeps one process busy and the others idle. What is left at the end is short."""

    @cache
    def rank(path: Path) -> int:
        name, folder = path.relative_to(HERE).with_suffix("").as_posix(), path.relative_to(HERE).parts[0]
        if name in LONGEST:
            return LONGEST.index(name)
        return len(LONGEST) + (STARTING.index(folder) if folder in STARTING else len(STARTING))

    for item in items:
        if _is_slow(item.path):
            item.add_marker("slow")
    items.sort(key=lambda item: rank(item.path))


def pytest_collection_finish() -> None:
    """Freeze the objects that were imported and collected so far, because they stay to the end. The garbage collector,
    which many tests call, would look at them each time: half a second with thousands of tests, instead of a
    millisecond."""
    gc.freeze()
    gc.enable()
    if "grpc" in sys.modules:
        # Else gRPC ends its poller when the garbage collector takes the last channel of asyncio, and waits for it: in
        # one of five runs for ever, after a thousand channels (1.74).
        import grpc.aio

        grpc.aio.init_grpc_aio()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Freeze the objects that a file's tests made torch and others import, after its last test. There are hundreds of
    thousands of them."""
    yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()
