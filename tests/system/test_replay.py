"""`penstock replay` against real coordinators and workers: what it makes is, to the bit, what the loop was handed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import streams
import torch
from cluster import INPUTS, TOKEN, Cluster, running
from typer.testing import CliRunner

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.deploy.cli.main import app
from penstock.deploy.loader_processes import LoaderForkServer
from penstock.deploy.operations.saved_file import read_state
from penstock.deploy.replay.replay_batch import ReplayRequest, replay
from penstock.deploy.replay.replay_report import tables
from penstock.proto import errors
from penstock.proto.rpc.calls import CoordinatorClient
from penstock.proto.state.codec import decode_state, encode_state

SEED = 7


@dataclass
class Seen:
    """Batches and states that the loops got."""

    batches: dict[tuple[str, int], dict[int, bytes]] = field(default_factory=dict)
    """(job, box) -> step -> the batch, encoded."""
    states: dict[str, Path] = field(default_factory=dict)
    """Files with a state of step 10."""


@dataclass
class Stage:
    cluster: Cluster
    seen: Seen
    server: LoaderForkServer
    folder: Path

    def client(self) -> CoordinatorClient:
        return CoordinatorClient(self.cluster.address, TOKEN, insecure=True)

    def replayed(
        self, client: CoordinatorClient | None, job: str, step: int, box: int = 0, **more: Any
    ) -> dict[str, Any]:
        """Replay a batch, compare it with the one that was delivered, and return what replay found."""
        out = self.folder / f"{job}-{box}-{step}.pst"
        run = None if client is None else job
        request = ReplayRequest(run, step, box, out=out, allow=["streams"], deadline_s=60, **more)
        found = replay(request, client, self.server)
        assert out.read_bytes() == self.seen.batches[job, box][step], f"{job} box {box} step {step}"
        assert (found["box"], found["step"]) == (box, step)
        return found


def box_of(cluster: Cluster, job: str, number: int = 0, boxes: int = 1, **more: Any) -> Appliance:
    return cluster.box(job, box=number, num_boxes=boxes, seed=SEED, **more)


def train(
    stage: Stage,
    job: str,
    input_fn: Callable[..., Any],
    *args: Any,
    box: int = 0,
    boxes: int = 1,
    last: int = 24,
    **kwargs: Any,
) -> None:
    """Two epochs that are left, and then on to the last step."""
    got = stage.seen.batches[job, box] = {}
    loader = DataLoader(input_fn, *args, **kwargs)
    with box_of(stage.cluster, job, box, boxes) as appliance:
        executor = DataExecutor(loader, appliance=appliance)
        for steps in (5, 2):
            for batch in islice(executor, steps):
                got[executor.step] = encode_state(batch)
        executor = DataExecutor(loader, num_steps=last - 7, appliance=appliance)
        for batch in executor:
            got[executor.step] = encode_state(batch)
            if executor.step == 10 and job in stage.seen.states:
                torch.save({"model": 1, "loader": [loader.state_dict()]}, stage.seen.states[job])


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("replay")
    with running(folder / "state") as cluster, pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", INPUTS)
        cluster.add_worker(12, name="w1")
        with LoaderForkServer("penstock.deploy.replay.slot_replay") as server:
            stage = Stage(cluster, Seen(), server, folder)
            stage.seen.states = {job: folder / f"{job}.pt" for job in ("four", "two")}
            with ThreadPoolExecutor(4) as pool:
                done = [
                    pool.submit(train, stage, "four", streams.shared_noisy, 40, box=0, boxes=2),
                    pool.submit(train, stage, "four", streams.shared_noisy, 40, box=1, boxes=2),
                    pool.submit(train, stage, "two", streams.stateful, 24),
                    pool.submit(train, stage, "uneven", streams.uneven, [2, 7]),
                ]
                for one in done:
                    one.result(60)
            yield stage


@pytest.mark.parametrize(
    ("job", "box", "steps"),
    [
        ("four", 1, (1, 6, 24)),
        ("two", 0, (6, 15)),
        ("uneven", 0, (5, 17)),  # the first epoch is left when one worker has ended
    ],
)
def test_it_is_the_batch_that_the_loop_was_handed(stage: Stage, job: str, box: int, steps: tuple[int, ...]) -> None:
    """The first step, those right behind a break, one in the middle, and the last; of a run that has ended."""
    with stage.client() as client:
        for step in steps:
            found = stage.replayed(client, job, step, box)
            assert found["verified"], found["verification"]
            assert found["epoch"] == (0 if step <= 5 else 1 if step <= 7 else found["epoch"])


def test_from_a_checkpoint(stage: Stage) -> None:
    """Alone it cannot be verified; of a run it can, and a later one proves what lies before it."""
    job = "four"
    files = [stage.seen.states[job]]
    alone = stage.replayed(None, job, 12, checkpoints=files, args="[40]")
    assert alone["replayed_from"] == {"step": 10, "what": "the checkpoint of step 10"}
    assert alone["verification"] == "not verified: no stream digest is known both at step 10 and soon after step 12"
    with stage.client() as client:
        of_run = stage.replayed(client, job, 12, checkpoints=files)
        assert of_run["replayed_from"]["step"] == 10
        assert of_run["verified"]
    with pytest.raises(
        errors.StateUnavailableError,
        match="cannot be used to replay step 9: only steps from 11",
    ):
        replay(ReplayRequest(None, 9, checkpoints=files, allow=["streams"]), None, stage.server)


def test_an_attempt_that_went_on_from_a_state(stage: Stage) -> None:
    """Replay an attempt that was resumed from a state on another topology; the attempt before it is remembered too."""
    job, workers = "four", 3
    state = torch.load(stage.seen.states[job], weights_only=True)["loader"][0]
    first, got = stage.seen.batches[job, 0], {}
    loader = DataLoader(streams.shared_noisy, 40)
    loader.load_state_dict(state)
    with stage.cluster.box(job, num_boxes=1, num_workers_per_box=workers, seed=None) as appliance:
        executor = DataExecutor(loader, num_steps=6, appliance=appliance)
        for batch in executor:
            got[executor.step] = encode_state(batch)
    with stage.client() as client:
        stage.seen.batches[job, 0] = got
        found = stage.replayed(client, job, 14)
        assert (found["attempt"], found["num_workers_per_box"]) == (2, workers)
        assert not found["verified"], "of other boxes there is no one stream digest to go on with"
        file = [stage.seen.states[job]]
        found = stage.replayed(client, job, 14, checkpoints=file)
        assert found["replayed_from"]["what"] == "the checkpoint of step 10"
        saved = read_state(file[0], None)
        converted = stage.folder / "converted.pt"
        converted.write_bytes(encode_state(saved.new_topology(1, 3).to_dict()))
        stage.replayed(None, job, 14, checkpoints=[converted], args="[40]")
        with pytest.raises(errors.StateMismatchError, match=r"of 2 x 2 workers .*, which began at step 0, got"):
            stage.replayed(client, job, 24, checkpoints=[converted])
        stage.seen.batches[job, 0] = first
        assert stage.replayed(client, job, 24)["attempt"] == 1, "the last that came so far"


def test_replay_that_is_late(stage: Stage) -> None:
    with stage.client() as client, pytest.raises(errors.DeadlineError, match="Raise --deadline"):
        replay(ReplayRequest("two", 24, allow=["streams"], deadline_s=0.001), client, stage.server)


def test_data_that_are_others_are_told(stage: Stage) -> None:
    with stage.client() as client:
        assert stage.replayed(client, "uneven", 4, kwargs="{}")["verified"], "the run's arguments stand for others"
        with pytest.raises(errors.ReplayMismatchError, match="must equal that of the delivered batches"):
            stage.replayed(client, "two", 4, args="[48]")
        assert not (stage.folder / "two-0-4.pst").exists(), "another batch was written under its name"


def command(stage: Stage, *arguments: str) -> tuple[int, str, str]:
    """Run `penstock replay` in this process; return the exit code, standard output, and the last line of standard
    error."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PENSTOCK_TOKEN", TOKEN)
        environment.setenv("PENSTOCK_COORDINATOR", stage.cluster.address)
        done = CliRunner().invoke(app, ["replay", *arguments])
    return done.exit_code, done.stdout, (done.stderr.splitlines() or [""])[-1]


def test_command_shows_the_batch(stage: Stage) -> None:
    out = stage.folder / "shown.pt"
    options = ["--step", "3", "--box", "1", "--allow", "streams", "--out", str(out)]
    code, shown, line = command(stage, "four", *options, "--json")
    assert code == 0, line
    found = json.loads(shown)
    batch: Any = decode_state(stage.seen.batches["four", 1][3])
    leaves = {leaf["name"]: leaf for leaf in found["leaves"]}
    assert leaves["noise"]["shape"] == [4, 2]
    assert leaves["noise"]["nan"] == 0
    assert leaves["noise"]["mean"] == pytest.approx(batch["noise"].mean().item())
    assert leaves["keys"]["kind"] == "list of str"
    assert encode_state(torch.load(out, weights_only=True)) == stage.seen.batches["four", 1][3]
    about, of_leaves = tables(found)
    assert ("worker", f"slot {found['slot']} of 2, its batch {found['worker_step']}") in about.rows
    assert {line[0]: line[3] for line in of_leaves.rows} == {"x": "[4]", "number": "", "noise": "[4, 2]", "keys": "[4]"}


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["nobody", "--step", "1"], 18, "has no record of box 0 of run nobody/0"),
        (["two", "--step", "25", "--allow", "streams"], 20, "delivered to box 0 (steps 1 to 24 of attempt 1"),
        (["two", "--step", "1", "--allow", "other"], 25, "Pass --allow streams"),
        (["two", "--step", "1", "--out", "x.pkl"], 2, "must end with one of .pst, .pt"),
    ],
)
def test_what_cannot_be_had_is_said(stage: Stage, arguments: list[str], code: int, says: str) -> None:
    ended, _, line = command(stage, *arguments)
    assert (ended, says in line) == (code, True), line


def test_a_missing_allow_is_said_before_torch_is_imported(stage: Stage) -> None:
    """The import took most of the 28 seconds that a loaded machine needed to say so."""
    program = "import sys; sys.modules['torch'] = None; from penstock.deploy.__main__ import main; sys.exit(main())"
    known = {"PENSTOCK_TOKEN": TOKEN, "PENSTOCK_COORDINATOR": stage.cluster.address}
    for source, says in ((["two"], "Pass --allow streams"), (["--checkpoint", "x.pt"], "Pass --allow and its package")):
        command = [sys.executable, "-c", program, "replay", *source, "--step", "1"]
        done = subprocess.run(command, env=os.environ | known, capture_output=True, text=True, timeout=60)
        assert (done.returncode, says in done.stderr) == (25, True), done.stderr
