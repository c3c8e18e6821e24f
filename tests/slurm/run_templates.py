"""deploy/slurm as jobs of a real Slurm: they start, serve, are cancelled, queued again, and fail as they should.

`make slurm` runs this. It is named so that `make test` does not collect it: machines seldom have Slurm, and its queue
makes everything slow.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from slurm_nodes import MISSING, Slurm, wait_for

REPO = Path(__file__).parents[2]
TEMPLATES = REPO / "deploy" / "slurm"
SMALL = ("--cpus-per-task=1", "--mem-per-cpu=1M")
STEPS = 300


class Site:
    """A user's folder, and jobs that are submitted with the same environment."""

    def __init__(self, slurm: Slurm, folder: Path) -> None:
        self.slurm, self.folder = slurm, folder
        self.environment = {
            "PENSTOCK_FOLDER": str(folder / "penstock"),
            "PENSTOCK_STATE_DIR": str(folder / "state"),
            "PENSTOCK_WORKER_ALLOW": "train_lm",
            "PENSTOCK_INSECURE": "true",
            "PENSTOCK_WORKER_SLOTS": "2",
            "PYTHONPATH": str(REPO / "examples"),
            "OMP_NUM_THREADS": "1",
        }

    def submit(self, template: str, *arguments: str, options: tuple[str, ...] = (), **more: str) -> str:
        log = f"--output={self.folder}/%x-%j.log"
        environment = self.environment | more
        return self.slurm.submit(log, *SMALL, *options, str(TEMPLATES / template), *arguments, **environment)

    def log(self, job: str) -> str:
        (file,) = self.folder.glob(f"*-{self.slurm.facts(job)['JobId']}.log")
        return file.read_text()

    def workers(self) -> dict[str, Any]:
        """Return the living processes, by name."""
        address = self.folder / "penstock" / "address"
        if not address.exists():
            return {}
        token = {"PENSTOCK_TOKEN_FILE": str(self.folder / "penstock" / "token")}
        command = ("penstock", "status", "--json", "--coordinator", address.read_text().strip())
        found = self.slurm.run(*command, check=False, **token)
        workers = json.loads(found)["workers"] if found else []
        return {worker["worker"]: worker for worker in workers if worker["live"] and not worker["draining"]}

    def steps(self, box: int) -> list[int]:
        file = self.folder / "out" / f"box{box}.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [json.loads(line)["step"] for line in lines if line.endswith("}")]


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Two nodes on this machine."""
    if MISSING:
        pytest.skip(f"Slurm is not installed: there is no {', '.join(MISSING)}")
    slurm = Slurm(tmp_path_factory.mktemp("slurm"))
    yield slurm
    slurm.close()


@pytest.fixture
def site(slurm: Slurm, tmp_path: Path) -> Site:
    return Site(slurm, tmp_path)


@pytest.mark.timeout(900)
def test_elastic_workers_and_a_job_failing_once(site: Site) -> None:
    slurm = site.slurm
    service = site.submit("service.sbatch")
    of_service = {f"penstock-{service}-{number}" for number in (1, 2)}
    wait_for("the service's workers are there", lambda: site.workers().keys() == of_service, 60)
    assert (site.folder / "penstock" / "token").stat().st_mode & 0o777 == 0o600
    array = site.submit("workers.sbatch", options=("--array=1-2",))
    of_array = {f"penstock-workers-{array}-{task}" for task in (1, 2)}
    wait_for("the array's workers are there", lambda: site.workers().keys() == of_service | of_array, 60)

    options = ("--ntasks-per-node=1", "--nodes=2")
    arguments = ("-m", "train_lm.train", f"--steps={STEPS}", "--checkpoint-every=10", f"--out={site.folder}/out")
    training = site.submit("train.sbatch", *arguments, options=options)
    wait_for("it trains", lambda: len(site.steps(0)) > 30, 90)

    slurm.run("scancel", f"{array}_1")
    wait_for("a cancelled worker has left", lambda: f"penstock-workers-{array}-1" not in site.workers(), 20)
    assert slurm.wait(f"{array}_1", "CANCELLED")
    assert "stopped on request" in site.log(f"{array}_1")

    slurm.run("scancel", "--signal=USR1", "--batch", f"{array}_2")  # what Slurm sends before the time is over
    wait_for("the worker has left", lambda: "stopped on request" in site.log(f"{array}_2"), 30)
    wait_for("it is queued again", lambda: slurm.facts(f"{array}_2")["Restarts"] == "1", 30)

    before = site.steps(0)
    assert before[:3] == [1, 2, 3], "and no fault was seen by the loop until now"
    slurm.run("scancel", "--signal=KILL", f"{training}.0")
    wait_for("the training job is queued again", lambda: slurm.facts(training)["Restarts"] == "1", 60)
    assert "queued again (0 of 3 restarts before)" in site.log(training)
    slurm.wait(training, "COMPLETED", 400)
    for box in (0, 1):
        steps = site.steps(box)
        assert steps[0] % 10 == 1
        assert 1 < steps[0] <= before[-1] + 40, "it went on from a checkpoint"
        assert steps == list(range(steps[0], STEPS + 1))

    wait_for("the worker is back", lambda: f"penstock-workers-{array}-2" in site.workers(), 180)
    assert slurm.facts(f"{array}_1")["JobState"] == "CANCELLED", "and not the other one"
    slurm.run("scancel", service, array)
    slurm.wait(service, "CANCELLED")
    wait_for("all three have left in good order", lambda: site.log(service).count("stopped on request") == 3, 60)


@pytest.mark.timeout(300)
def test_a_service_ends_with_its_command_and_code(site: Site) -> None:
    # A worker that is told to end before it has registered ends at once, and logs nothing.
    registered = "[ $(penstock status | grep -cE -- '-[12] ') -ge 2 ]"
    command = f"until {registered}; do sleep 0.3; done; exec srun --overlap --ntasks=1 --nodes=1 penstock status"
    good = site.submit("service.sbatch", "bash", "-c", command)
    bad = site.submit("service.sbatch", "sh", "-c", "exit 7", PENSTOCK_STATE_DIR=str(site.folder / "other"))
    assert site.slurm.wait(good, "COMPLETED", 90)
    assert "No runs at " in site.log(good)
    assert site.log(good).count("stopped on request") == 3
    assert site.slurm.wait(bad, "FAILED", 90)["ExitCode"] == "7:0"


@pytest.mark.timeout(120)
def test_a_service_that_cannot_start_says_why(site: Site) -> None:
    job = site.submit("service.sbatch", PENSTOCK_INSECURE="")
    assert site.slurm.wait(job, "FAILED")["ExitCode"] == "16:0"
    assert "can be reached from other machines" in site.log(job)
