"""Training in JAX with Orbax, which is killed and started again, each time with other workers.

JAX starts threads, so it runs in processes of its own and not in that of pytest.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from cluster import TOKEN, Cluster, running
from held_port import HeldPort
from interpreters import EXAMPLES


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    inputs = Path(__file__).parents[1] / "inputs"
    path = os.pathsep.join([str(EXAMPLES), str(inputs), *filter(None, [os.environ.get("PYTHONPATH")])])
    with running(tmp_path_factory.mktemp("state"), PYTHONPATH=path) as cluster:
        cluster.add_worker(4, "--allow", "jax_views", allow="integrations")
        yield cluster


def start(cluster: Cluster, job: str, *arguments: str) -> subprocess.Popen[str]:
    here = Path(__file__).parents[1]
    paths = [str(EXAMPLES), str(here / "inputs"), str(here / "support"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PENSTOCK_COORDINATOR": cluster.address,
        "PENSTOCK_TOKEN": TOKEN,
        "PENSTOCK_JOB": job,
        "PENSTOCK_SEED": "1",  # one for all, so that all runners are forked from one interpreter
        "JAX_PLATFORMS": "cpu",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen([sys.executable, *arguments], env=environment, stdout=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str], status: int = 0) -> str:
    """Return what a process printed; assert that it ended with this status."""
    try:
        said, _ = process.communicate(timeout=150)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == status
    return said


@pytest.mark.timeout(200)
def test_jax_arrays_hold_their_entries(cluster: Cluster) -> None:
    said = json.loads(ended(start(cluster, "jax-views", "-m", "jax_views")))
    numbers = [float(number) for number in range(40)]
    assert said["kept"] == [[number] * 2 for number in numbers]
    assert said["dtypes"] == ["bfloat16", "float32"]
    assert said["shared"] == 40, "device_put copies: nothing is proven"
    assert 0 < said["copies"] < 40, "kept arrays hold entries, so the rest comes as copies"
    assert said["sums"] == [4096 * number * number for number in numbers]
    assert said["donated"] == numbers, "JAX wrote into a batch"
    assert said["copies_after"] <= 2, "entries were not released"


class Training:
    """The example, started any number of times in one folder."""

    def __init__(self, cluster: Cluster, out: Path) -> None:
        self.cluster, self.out = cluster, out
        self._lives = 0

    def run(self, steps: int, workers: int, killed: tuple[str, int] | None = None, processes: int = 1) -> list[Any]:
        """Return what each process logged. `killed`: the moment and the step at which it kills itself."""
        self._lives += 1
        options = ["--steps", str(steps), "--checkpoint-every", "4", "--out", str(self.out), "--workers", str(workers)]
        module = "integrations.jax_train"
        command = ["-m", module] if killed is None else ["-m", "killed_training", module, killed[0], str(killed[1])]
        job = f"{self.out.name}-{self._lives}"
        port = HeldPort()
        try:
            group = ["--processes", str(processes), "--jax-coordinator", f"127.0.0.1:{port.number}"]
            started = [
                start(self.cluster, job, *command, *options, *group, "--process", str(number))
                for number in range(processes)
            ]
            for process in started:
                ended(process, -9 if killed else 0)
        finally:
            port.close()
        logged = []
        for number in range(processes):
            log = self.out / f"rank{number}.jsonl"
            logged.append([json.loads(line) for line in log.read_text().splitlines()])
            log.unlink()
        return logged


@pytest.mark.timeout(900)  # seven starts of Python with torch, JAX and Orbax
def test_killed_example_resumes_exactly(cluster: Cluster, tmp_path: Path) -> None:
    (whole,) = Training(cluster, tmp_path / "whole").run(15, 2)
    assert [line["step"] for line in whole] == list(range(1, 16))
    training = Training(cluster, tmp_path / "killed")
    (in_save,) = training.run(13, 2, ("save", 8))
    (in_part,) = training.run(13, 3, ("part", 8))
    (last,) = training.run(13, 1)
    assert in_save[0]["step"] == 1
    assert in_part[0]["step"] == 5, "the checkpoint of step 8 was not complete"
    assert last[0]["step"] in (5, 9)
    assert last[-1]["step"] == 13
    for life in (in_save, in_part, last):
        first = life[0]["step"]
        assert life == whole[first - 1 : first - 1 + len(life)]

    boxes = training.run(15, 1, processes=2)
    assert [[line["step"] for line in box] for box in boxes] == [[14, 15]] * 2
    for first_box, other, line in zip(*boxes, whole[13:], strict=True):
        assert list(chain(*zip(first_box["pieces"], other["pieces"], strict=True))) == line["pieces"]
        assert first_box["loss"] == other["loss"]
        # Sums are made in another order, so it is not the same to the bit.
        assert float.fromhex(first_box["loss"]) == pytest.approx(float.fromhex(line["loss"]), rel=1e-4)
