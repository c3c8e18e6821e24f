"""`penstock doctor` on loaders that are well and on loaders that are ill: found out, named, and nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result
from waiting import until

from penstock.deploy.cli.main import app
from penstock.deploy.doctor.loader_check import METHODS, REPLAY, STATE, TRIALS, LoaderReport, LoaderRequest, examine_in
from penstock.deploy.doctor.loader_report import tables
from penstock.deploy.loader_processes import LoaderForkServer
from penstock.proto.errors import InputFnError, PenstockError, WorkerLostError

Examine = Callable[..., LoaderReport]


def request_of(
    input_fn: str, *args: Any, workers: int = 1, batches: int = 16, replay: bool = False, **kwargs: Any
) -> LoaderRequest:
    return LoaderRequest(input_fn, json.dumps(args), json.dumps(kwargs), batches, workers, replay, 3, 60.0)


@pytest.fixture(scope="module")
def ward() -> Iterator[LoaderForkServer]:
    """The interpreter that all tests of this module fork from."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "inputs"))
        ward = LoaderForkServer(TRIALS)
    with ward:
        yield ward


@pytest.fixture
def examine(ward: LoaderForkServer) -> Examine:
    return lambda *args, **kwargs: examine_in(ward, request_of(*args, **kwargs))


def wrong(diagnosis: LoaderReport) -> dict[str, int | None]:
    """where -> the first batch that differs."""
    return {check.where: check.differs for patient in diagnosis.loaders for check in patient.checks if not check.exact}


# ---- well


def test_four_methods_on_two_workers(examine: Examine) -> None:
    found = examine("streams:shared", 14, workers=2)
    assert (found.code, found.verdict) == (0, "can be saved at any step and resumed exactly")
    assert found.saved_by == METHODS
    recovers = [row[1] for row in tables(found)[0].rows if row[0] == "recovers from"]
    assert recovers == ["the launch's start, or the newest saved step that the workers of a box divide"]
    (warning,) = found.warnings
    assert "len() of worker 0's loader is 14, and its first epoch has 7 batches" in warning  # 14 are both workers'
    for patient in found.loaders:
        assert patient.capabilities["state_methods"] == 4
        assert patient.capabilities["takes_strict"]
        assert patient.streamed["looked_at"]
        assert patient.streamed["samples"] == 16 * 4
        assert sorted(check.where for check in patient.checks) == [
            "after batch 1, by aggregate and deaggregate",
            "from the start, by replay",
        ]


@pytest.mark.parametrize(
    ("input_fn", "args", "methods", "own_workers"),
    [
        ("streams:counter", [], 2, 0),
        ("streams:stateful", [24, 2, False], 2, 2),
    ],
)
def test_exact(examine: Examine, input_fn: str, args: list[Any], methods: int, own_workers: int) -> None:
    found = examine(input_fn, *args, batches=8)
    assert (found.code, wrong(found)) == (0, {})
    assert found.verdict == "can be saved at any step and resumed exactly"
    assert found.saved_by == (STATE if methods == 2 else METHODS)
    capabilities = found.loaders[0].capabilities
    assert (capabilities["state_methods"], capabilities["own_workers"]) == (methods, own_workers)


@pytest.mark.parametrize(
    ("input_fn", "args", "where"),
    [
        ("streams:counts_late", [], "after batch 1, batch 2 differs"),
        ("patients:forgets_its_end", [], "the loader continues after batch 6, the last of epoch 0"),
        # torchdata counts its fast-forward twice: only what a restored loader saves is wrong
        ("third_party:stream", [], "after batch 9, saved by a loader that was restored, batch 10 differs"),
    ],
)
def test_wrong_states_are_replaced_by_replay(examine: Examine, input_fn: str, args: list[Any], where: str) -> None:
    found = examine(input_fn, *args)
    assert found.code == 0
    assert found.saved_by == REPLAY
    assert found.verdict.startswith("can be saved at any step and resumed exactly, by counted replay: restored ")
    assert where in found.verdict


def test_later_batches_than_the_next_are_compared(examine: Examine) -> None:
    found = examine("delayed:looks_ahead", 20, batches=32)
    assert found.saved_by == REPLAY
    assert "restored after batch 1, batch 22 differs" in found.verdict


def test_without_methods_only_by_replay(examine: Examine) -> None:
    found = examine("streams:generator")
    assert found.code == 31
    assert "the loader has no state_dict and load_state_dict" in found.verdict
    assert "Appliance(replay=True)" in found.verdict
    by_replay = examine("streams:generator", replay=True)
    assert (by_replay.code, wrong(by_replay)) == (0, {})


# ---- ill


def test_not_repeatable_at_all(examine: Examine) -> None:
    found = examine("patients:unrepeatable", replay=True)
    assert (found.code, wrong(found)) == (30, {"from the start, by replay": 1})
    assert "after a new start it yields other batches" in found.verdict


def test_wrong_aggregation_of_right_states(examine: Examine) -> None:
    found = examine("patients:aggregates_badly", workers=2)
    assert found.code == 30
    assert "restored after batch 8, by aggregate and deaggregate, batch 9 differs" in found.verdict


def test_cannot_be_saved(examine: Examine) -> None:
    found = examine("streams:odd_state")
    assert found.code == 31
    assert found.verdict.startswith("cannot be saved: ")
    assert "state['user']['lock'] is a _thread.lock" in found.verdict


@pytest.mark.parametrize(
    ("input_fn", "args", "error", "says"),
    [
        ("streams:raises_at", [5], InputFnError, "batch 5 raised KeyError: 'broken sample'"),
        ("patients:crashes", [], WorkerLostError, "the process that ran it was killed by SIGSEGV"),
    ],
)
def test_what_stops_the_stream_is_raised(
    examine: Examine, input_fn: str, args: list[Any], error: type[PenstockError], says: str
) -> None:
    with pytest.raises(error) as raised:
        examine(input_fn, *args)
    assert says in raised.value.message


def test_what_user_code_leaves_behind_is_killed(examine: Examine, tmp_path: Path) -> None:
    marker = tmp_path / "processes"
    assert examine("patients:leaves_behind", str(marker), replay=True).code == 0
    pids = [int(line) for line in marker.read_text().splitlines()]
    assert len(pids) == 2  # streamed, and restored
    until(lambda: all(gone(pid) for pid in pids))


# ---- warnings


def test_workers_that_stream_the_same(examine: Examine) -> None:
    never = examine("streams:unsharded", workers=2, replay=True, batches=4)
    (warning,) = never.warnings
    assert (
        "there are 2 workers, and the loader never reads its assignment, so each worker streams the whole input"
        in warning
    )
    (warning,) = examine("patients:unsharded", workers=2, batches=2).warnings
    assert "there are 2 workers, and all stream the same batches" in warning
    assert not examine("streams:unsharded", replay=True).warnings


def test_samples_of_several_workers(examine: Examine) -> None:
    """Each worker reads all numbers in an order of its own, because what it reads of its assignment divides nothing."""
    found = examine("dividing:orders", 40, workers=2, batches=10)
    assert any(
        warning.startswith("80 of 80 samples of the first epoch come from more than one of the 2 workers")
        for warning in found.warnings
    )
    assert [patient.streamed["worker_info"] for patient in found.loaders] == ["none", "none"]


def test_divided_samples_are_no_warning(examine: Examine) -> None:
    found = examine("dividing:web_shards", 48, workers=3, batches=6, replay=True)
    assert not found.warnings
    assert {patient.streamed["worker_info"] for patient in found.loaders} == {"of_run"}


def test_random_generators_are_named(examine: Examine) -> None:
    found = examine("augmented:images", "compose", "constant", 8, workers=2, batches=4, replay=True)
    (warning,) = found.warnings
    assert warning.startswith("random generators Images.transform.random_generator, Images.transform.py_random, ")
    assert "input_fn leaves them in the same state on all workers" in warning
    assert not examine("augmented:images", "compose", "slot", 8, workers=2, batches=4, replay=True).warnings
    (row,) = [text for what, text in tables(examine("augmented:lazy"))[0].rows if what == "random generators"]
    assert row.endswith(".generator: set before each sample and batch, from the seed and its position")


def test_a_file_that_processes_share_is_named(examine: Examine, tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_bytes(b"".join(b"%08d" % row for row in range(64)))
    found = examine("patients:held_file", str(path), replay=True)
    (warning,) = found.warnings  # whether the rows were wrong or, by chance, right
    assert warning.startswith(f"the loader's own processes share {path}, which was open when they were forked")
    assert "seeded generators" not in found.verdict
    assert not examine("patients:held_file", str(path), 0, replay=True).warnings


# ---- the command


@pytest.fixture
def call(ward: LoaderForkServer, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """The command in this process, and in the ward of this module, whose interpreter is most of what it costs."""
    monkeypatch.setattr(
        "penstock.deploy.doctor.loader_check.LoaderForkServer", lambda module: contextlib.nullcontext(ward)
    )
    return lambda *arguments: CliRunner().invoke(app, ["doctor", *arguments])


def test_command_well_shows_what_user_code_prints(shell: Any) -> None:
    done = shell.call("doctor", "patients:talks", "--args", "[14]", "--workers", "2", "--batches", "8")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("patients:talks: 2 workers, 8 batches each\n")
    assert "4: state_dict, load_state_dict, aggregate_state_dict, deaggregate_state_dict" in done.stdout
    assert done.stdout.endswith("\npatients:talks can be saved at any step and resumed exactly.\n")
    assert set(done.stderr.splitlines()) == {"hello from the input"}
    assert "hello" not in done.stdout


def test_command_as_json(call: Callable[..., Result]) -> None:
    done = call("streams:counts_late", "--json", "--batches", "4")
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    assert (found["ok"], found["exit_code"], found["input_fn"]) == (True, 0, "streams:counts_late")
    assert found["saved_by"] == "replay"
    (worker,) = found["workers"]
    assert (worker["state_methods"], worker["length"], worker["batches"], worker["samples"]) == (2, 50, 4, 16)
    check = worker["checks"][1]
    assert (check["where"], check["exact"], check["what"]) == ("after batch 1", False, "batch 2 differs")


def test_command_with_a_loader_that_hangs(shell: Any, tmp_path: Path) -> None:
    marker = tmp_path / "hangs"
    done = shell.call("doctor", "patients:hangs", "--args", json.dumps([str(marker)]), "--deadline", "3")
    assert done.returncode == 17
    assert "in waits_for_ever" in done.stderr
    assert "not done in time: streaming 32 batches of patients:hangs, worker 0 (stacks are above)" in done.error
    until(lambda: gone(int(marker.read_text())))


def test_command_interrupted(shell: Any, tmp_path: Path) -> None:
    marker = tmp_path / "hangs"
    doctor = shell.begin("doctor", "patients:hangs", "--args", json.dumps([str(marker)]))
    until(marker.exists)
    assert doctor.stop(signal.SIGINT) == 130
    assert doctor.log.read_text() == ""
    until(lambda: gone(int(marker.read_text())))


def gone(pid: int) -> bool:
    """No such process, or one that only waits for its parent to look."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (ProcessLookupError, FileNotFoundError):
        return True
