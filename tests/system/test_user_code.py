"""User code that does its worst: the training loop gets an error that names it, or notices nothing but time, and the
daemon lives."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import signal
import subprocess
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hazards
import pytest
import streams
from census import abandoned, children
from cluster import Cluster, running
from family import alive, fork_servers, memory_of, runners
from waiting import until

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.client.testing import FakeAppliance
from penstock.proto import errors
from penstock.runtime.process.sandbox import why_not_whole

HASTY_S = 5.0
"""The deadline of loops that are to run into it. What hangs is told at half of it, and has to be known by its end."""
FLOODED = 9
"""Batches of the flood, half a second each."""
STOP_S = 20.0
"""Seconds for a runner that does not stop by itself. Its grace period is half a second, and without that it would never
end."""

_jobs = itertools.count()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("state"), PENSTOCK_JOB="shell", PENSTOCK_INSECURE="true") as cluster:
        worker = cluster.add_worker(8, allow="*", name="w", stderr=subprocess.PIPE)
        assert worker.stderr is not None
        with worker.stderr, Listener(worker.stderr.fileno()):
            with at(cluster) as appliance:
                numbers(appliance, DataLoader(streams.counter, 3))  # its fork server is up
            yield cluster
            cluster.stop()


class Listener(threading.Thread):
    """Passes on what the worker says, except while somebody holds `deaf`, and for the test that holds it."""

    deaf = threading.Lock()

    def __init__(self, fd: int) -> None:
        super().__init__()
        self.fd = fd

    def run(self) -> None:
        while select.select([self.fd], [], [])[0]:
            with self.deaf:
                if not select.select([self.fd], [], [], 0)[0]:
                    continue  # the holder has read it
                said = os.read(self.fd, 1 << 16)
            if not said:
                return
            if len(said) < 4096:  # no flood
                os.write(2, said)

    def __enter__(self) -> None:
        self.start()

    def __exit__(self, *exception: object) -> None:
        self.join(30)


def at(cluster: Cluster, timeout_s: float = 60.0, **options: Any) -> Appliance:
    return cluster.box(f"job-{next(_jobs)}", num_workers_per_box=1, timeout_s=timeout_s, **options)


def daemon(cluster: Cluster) -> int:
    return cluster.workers[0].pid


def the_runner(cluster: Cluster) -> int:
    """The one that streams now; those of an earlier test may be about to end."""
    until(lambda: len(runners(daemon(cluster))) == 1, what="there is one runner")
    return runners(daemon(cluster))[0]


def the_maker(cluster: Cluster) -> int:
    """The process that makes the batches of a pure loader: the runner's child."""
    runner = the_runner(cluster)
    until(lambda: children(runner, "penstock-epoch"), what="it makes an epoch")
    return children(runner, "penstock-epoch")[0]


def plain(batch: Any) -> Any:
    return batch["number"] if isinstance(batch, dict) else batch.tolist()


def numbers(appliance: Appliance, loader: DataLoader, steps: int | None = None) -> list[Any]:
    return [plain(batch) for batch in DataExecutor(loader, num_steps=steps, appliance=appliance)]


# ---- hangs


@pytest.mark.parametrize(
    ("where", "says", "frame"),
    [
        ("input_fn", "in input_fn since", "in waits_for_ever"),
        ("c code", r"in next\(\) of batch 3 since", "in waits_in_c"),
    ],
)
def test_a_hang_is_told_with_place_time_and_stack(cluster: Cluster, where: str, says: str, frame: str) -> None:
    with (
        at(cluster, HASTY_S) as hasty,
        pytest.warns(UserWarning, match=f"slow worker: slot 0 .* worker w is {says}"),
        pytest.raises(errors.DeadlineError, match=says) as caught,
    ):
        numbers(hasty, DataLoader(hazards.hangs, where))
    assert "worker w" in str(caught.value)
    assert frame in caught.value.remote_traceback
    assert "hazards.py" in caught.value.remote_traceback


def test_wait_for_a_length_or_a_state_tells_the_stack_too(cluster: Cluster, tmp_path: Path) -> None:
    """`list(executor)` asks for len() first, and a save may meet a runner that has just been replaced."""
    with at(cluster, HASTY_S) as hasty, pytest.raises(errors.DeadlineError, match="in input_fn since") as caught:
        list(DataExecutor(DataLoader(hazards.hangs, "input_fn"), appliance=hasty))
    assert "in waits_for_ever" in caught.value.remote_traceback
    job = f"job-{next(_jobs)}"
    boxes = [
        cluster.box(job, num_workers_per_box=1, timeout_s=HASTY_S, box=box, num_boxes=2, attempt="one")
        for box in range(2)
    ]
    with boxes[0], boxes[1]:
        loaders = [DataLoader(hazards.hangs_again, str(tmp_path / f"made {box}")) for box in range(2)]
        for loader, appliance in zip(loaders, boxes, strict=True):
            assert len(numbers(appliance, loader, 10)) == 10
        title = f"{job}/0 box 1".encode()
        (runner,) = (pid for pid in runners(daemon(cluster)) if title in Path(f"/proc/{pid}/cmdline").read_bytes())
        os.kill(runner, signal.SIGKILL)
        session = loaders[1]._session
        assert session is not None
        until(lambda: session.run.views[0].restarts, what="another runner is to continue")
        with pytest.raises(errors.DeadlineError, match=r"at step 10 was not complete .* in input_fn") as late:
            loaders[0].state_dict()
        assert "in waits_for_ever" in late.value.remote_traceback


def test_stopped_runner_is_reported_and_continues(cluster: Cluster) -> None:
    got: list[Any] = []
    with at(cluster, HASTY_S) as hasty:
        loader = DataLoader(streams.counter, 3000)

        def read() -> None:
            for batch in DataExecutor(loader, num_steps=3000 - len(got), appliance=hasty):
                got.append(plain(batch))

        got += numbers(hasty, loader, 10)
        runner = the_maker(cluster)
        os.kill(runner, signal.SIGSTOP)
        try:
            with (
                pytest.warns(UserWarning, match="stopped by a signal"),
                pytest.raises(errors.DeadlineError, match="stopped by a signal") as caught,
            ):
                read()
            assert f"kill -CONT {runner}" in caught.value.remote_traceback
        finally:
            os.kill(runner, signal.SIGCONT)
        read()
    assert got == list(range(1, 3001))


# ---- deaths


@pytest.mark.parametrize(
    ("how", "says"),
    [("segfault", r"SIGSEGV[\s\S]*reads_address_zero"), ("exit", "exited with status 0 before")],
)
def test_death_in_mid_epoch_is_recovered(cluster: Cluster, tmp_path: Path, how: str, says: str) -> None:
    marker = tmp_path / "died"
    marker.touch()
    with FakeAppliance(num_workers_per_box=1, seed=5, replay=True) as undisturbed:
        whole = numbers(undisturbed, DataLoader(hazards.dies, how, str(marker)))
    marker.unlink()
    with at(cluster) as appliance, pytest.warns(UserWarning, match=says):
        assert numbers(appliance, DataLoader(hazards.dies, how, str(marker))) == whole
    assert len(whole) == 20


def test_stopped_fork_server_hides_no_death(cluster: Cluster) -> None:
    (fork_server,) = fork_servers(daemon(cluster))
    with at(cluster) as appliance:
        loader = DataLoader(streams.counter, 3000)
        got = numbers(appliance, loader, 10)
        runner = the_runner(cluster)
        os.kill(fork_server, signal.SIGSTOP)
        try:
            os.kill(runner, signal.SIGKILL)
            session = loader._session
            assert session is not None
            until(lambda: "SIGKILL" in session.run.views[0].note, what="the death is told")
        finally:
            os.kill(fork_server, signal.SIGCONT)
        with pytest.warns(UserWarning, match="SIGKILL"):
            got += numbers(appliance, loader, 2990)
        assert got == list(range(1, 3001))
        runner = the_runner(cluster)
        os.kill(fork_server, signal.SIGSTOP)
        try:
            loader.close()
            until(lambda: not alive(runner), what="it is stopped", deadline_s=STOP_S)
        finally:
            os.kill(fork_server, signal.SIGCONT)


def _pids(marker: Path) -> list[int]:
    return [int(line) for line in marker.read_text().split()] if marker.exists() else []


def test_descendants_end_with_their_runner_and_a_fork_server_is_replaced(cluster: Cluster, tmp_path: Path) -> None:
    """With a runner that is killed, then with the fork server, and with the job."""
    marker = tmp_path / "pids"
    (fork_server,) = fork_servers(daemon(cluster))
    with at(cluster) as appliance, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the recoveries, whose runners do the same
        loader = DataLoader(hazards.escapes, str(marker))
        got = numbers(appliance, loader, 10)
        until(lambda: len(_pids(marker)) == 3, what="all have left")
        left = _pids(marker)
        runner = the_maker(cluster)
        # However far they went, they are below their runner, so that the end of another child does not end them.
        until(lambda: set(left) <= set(children(runner)), what="all are the runner's own")
        os.kill(runner, signal.SIGKILL)
        until(lambda: not any(map(alive, left)), what="those of the dead runner are gone")
        got += numbers(appliance, loader, 200)
        until(lambda: len(_pids(marker)) == 6, what="all have left again")
        os.kill(fork_server, signal.SIGKILL)
        until(lambda: not any(map(alive, _pids(marker)[:6])), what="those of the dead fork server are gone")
        got += numbers(appliance, loader, 200)
        assert got == list(range(410))
        assert fork_server not in fork_servers(daemon(cluster))
    until(lambda: not any(map(alive, _pids(marker))), what="all are gone")


def _litter() -> set[str]:
    """Return what dead processes have left in shared memory, and directories of torch's shared-memory manager, which
    only runners start here."""
    return abandoned() | {name for name in os.listdir("/tmp") if name.startswith("torch-shm")}


def test_killed_runner_leaves_no_worker_processes(cluster: Cluster) -> None:
    before = _litter()
    with at(cluster) as appliance, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loader = DataLoader(hazards.many_processes, "file_system")
        numbers(appliance, loader, 40)
        runner = the_runner(cluster)
        os.kill(runner, signal.SIGKILL)
        until(lambda: not alive(runner), what="it is dead")
    until(lambda: not any(map(children, fork_servers(daemon(cluster)))), what="all of its processes are gone")
    until(lambda: not _litter() - before, what=f"nothing is left: {_litter() - before}")


# ---- what user code does to its process


def test_a_runner_that_will_not_stop_is_stopped(cluster: Cluster, tmp_path: Path) -> None:
    marker = tmp_path / "pid"
    with at(cluster, HASTY_S) as appliance, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the slow worker
        loader = DataLoader(hazards.will_not_stop, str(marker))
        numbers(appliance, loader, 2)
        Path(f"{marker}.go").touch()
        with contextlib.suppress(errors.DeadlineError):  # it goes on until it sees the file
            numbers(appliance, loader, 10**6)
        until(lambda: _pids(marker), what="it hangs now")
        (runner,) = _pids(marker)
        loader.close()
        until(lambda: not alive(runner), what="it is gone", deadline_s=STOP_S)


def test_closing_all_descriptors_is_a_clear_error(cluster: Cluster) -> None:
    with at(cluster) as appliance, pytest.raises(errors.InputFnError, match="closed file descriptors"):
        numbers(appliance, DataLoader(hazards.closes_descriptors))


def test_what_it_inherits_and_may_do(cluster: Cluster, tmp_path: Path) -> None:
    """docs/security.md says it in short."""
    path = tmp_path / "told"
    with at(cluster) as appliance:
        assert numbers(appliance, DataLoader(hazards.tells_what_it_has, str(path))) == [1, 2, 3]
    told = json.loads(path.read_text())
    environment = told["environment"]
    assert {"PENSTOCK_TOKEN", "PENSTOCK_INSECURE", "PENSTOCK_JOB"} <= cluster.environment.keys()
    assert {name: environment[name] for name in environment if name.startswith("PENSTOCK_")} == {"PENSTOCK_RUNNER": "1"}
    assert environment["PATH"] == os.environ["PATH"]
    kinds = {link.partition(":[")[0].removesuffix(" (deleted)") for link in told["descriptors"]}
    assert kinds == {"/dev/null", "/memfd:penstock-progress", "/memfd:penstock-stack", "pipe", "socket"}
    for kind in ("pipe", "socket"):  # its output, and what it speaks with the daemon by
        assert len({link for link in told["descriptors"] if link.startswith(kind)}) == 1
    assert told["privileges"] == "1"
    assert why_not_whole() or told["signal"] == "PermissionError"


def test_changed_cwd_umask_limits_are_harmless(cluster: Cluster) -> None:
    with at(cluster) as appliance:
        got = numbers(appliance, DataLoader(hazards.unsettles))
    assert [number for number, _ in got] == list(range(60))


def test_output_flood_costs_only_its_author(cluster: Cluster) -> None:
    """The worker's own standard error is a pipe that nobody reads while it lasts."""
    (worker,) = cluster.workers
    with Listener.deaf, warnings.catch_warnings():
        warnings.simplefilter("error")
        with at(cluster) as appliance:
            before = memory_of(worker.pid)
            loader = DataLoader(hazards.floods, FLOODED)
            executor = DataExecutor(loader, num_steps=FLOODED, appliance=appliance)
            # 4 s of it: a worker that is not heard of for 3 s has lost its slots.
            assert [int(batch) for batch in executor] == list(range(FLOODED))
            assert executor.stats.recoveries == 0
            assert memory_of(worker.pid) - before < 64 << 20
        assert worker.stderr is not None
        os.set_blocking(worker.stderr.fileno(), False)
        said = bytearray()

        def told() -> bool:
            said.extend(worker.stderr.read() or b"")  # type: ignore[union-attr]
            return b"lines were left out" in said

        until(told, what="the log says what it left out")
        os.set_blocking(worker.stderr.fileno(), True)


def test_an_open_file_stands_in_each_epoch_where_input_fn_left_it(cluster: Cluster, tmp_path: Path) -> None:
    """Its offset is shared by all processes that are forked from the one that opened it."""
    path = tmp_path / "numbers"
    path.write_bytes(b"".join(b"%08d" % number for number in range(3000)))
    with at(cluster):
        loader = DataLoader(hazards.held_file, str(path))
        for batches in (2999, 5, 2999, 2999):  # the second epoch is abandoned
            assert [int(batch) for batch in itertools.islice(loader, batches)] == [*range(1, batches + 1)]


# ---- helper processes


def test_failing_helper_fails_only_the_save(cluster: Cluster) -> None:
    with at(cluster, 6.0) as appliance:
        loader = DataLoader(hazards.bad_in_scratch, "hang")
        executor = DataExecutor(loader, num_steps=200, appliance=appliance)
        got, told = [], []
        for batch in executor:
            got.append(plain(batch))
            if executor.step == 61:  # no snapshot was taken just there
                with pytest.raises(errors.DeadlineError, match="did not finish the task state") as caught:
                    loader.state_dict()
                told.append(caught.value)
    assert got == list(range(1, 201))
    assert "in waits_for_ever" in told[0].remote_traceback


def test_killed_helper_process_is_replaced_once(cluster: Cluster, tmp_path: Path) -> None:
    with at(cluster) as appliance:
        loader = DataLoader(hazards.bad_in_scratch, str(tmp_path), 60)
        executor = DataExecutor(loader, num_steps=180, appliance=appliance)
        got = []
        for batch in executor:
            got.append(plain(batch))
            if executor.step == 151:  # no snapshot was taken just there
                for number in range(2):
                    (tmp_path / f"kill {number}").touch()
                with pytest.raises(errors.WorkerLostError, match=r"SIGKILL.* during the task state; the stream of "):
                    loader.state_dict()
                (tmp_path / "kill 0").touch()
                state = loader.state_dict()
        assert got == [*range(1, 61)] * 3
        assert not list(tmp_path.glob("kill *")), "no helper process was needed"
        again = DataLoader(hazards.bad_in_scratch, str(tmp_path), 60)
        again.load_state_dict(state)
        rest = [plain(batch) for batch in DataExecutor(again, num_steps=29, appliance=appliance)]
    assert rest == list(range(32, 61))
