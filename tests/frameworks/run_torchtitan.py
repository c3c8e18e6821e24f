"""torchtitan's own launcher and trainer, with our dataloader: `make frameworks` runs this, in minutes.

Its smallest Llama 3 is trained on CPUs with gloo (titan_configs.py), killed with SIGKILL, and started again: on as many
ranks, with equal losses and rows, and on others, with the same rows in each step of the optimizer.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

pytestmark = pytest.mark.timeout(900)

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
STEPS, KILLED_AT, INTERVAL = 12, 7, 3
DEADLINE_S = 240.0
CHECKPOINTS = ["ours", "their_checkpoints"]


class Job:
    """A training in a folder of its own, started any number of times."""

    def __init__(self, inputs: Path, folder: Path, config: str) -> None:
        self.inputs, self.folder, self.config = inputs, folder, config
        folder.mkdir(parents=True)
        self._starts = 0

    def start(self, ranks: int, *options: str) -> Run:
        self._starts += 1
        return Run(self, self.folder / f"start{self._starts}", ranks, options)

    def run(self, ranks: int, *options: str) -> Run:
        """Start it, and wait until it has ended well."""
        run = self.start(ranks, *options)
        assert run.wait() == 0, run.said()
        return run

    def killed(self, ranks: int, *options: str, at: int = KILLED_AT) -> Run:
        """Start it, and kill all of it once it has logged the loss of step `at`."""
        run = self.start(ranks, *options)
        deadline = time.monotonic() + DEADLINE_S
        while max(run.losses(), default=0) < at:
            assert run.process.poll() is None, run.said()
            assert time.monotonic() < deadline, run.said()
            time.sleep(0.05)
        run.kill()
        assert STEPS not in run.losses(), "it had come to its end before it was killed"
        return run


class Run:
    """One start."""

    def __init__(self, job: Job, logs: Path, ranks: int, options: tuple[str, ...]) -> None:
        self.ranks, self._logs = ranks, logs
        logs.mkdir()
        self._output = logs / "output.txt"
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--rdzv-backend=c10d"]
        command += ["--rdzv-endpoint=localhost:0", str(HERE / "titan_on_cpu.py")]
        command += ["--module", "titan_configs", "--config", job.config]
        command += ["--hf_assets_path", str(job.inputs), "--dump_folder", str(job.folder)]
        command += ["--dataloader.dataset_path", str(job.inputs / "corpus"), "--debug.seed", "1"]
        command += ["--training.steps", str(STEPS), "--checkpoint.interval", str(INTERVAL), *options]
        path = os.pathsep.join([str(EXAMPLES), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PENSTOCK_SEED": "1", "TITAN_LOGS": str(logs)}
        with self._output.open("w") as output:
            self.process = subprocess.Popen(command, env=os.environ | environment, stdout=output, stderr=output)

    def wait(self) -> int:
        try:
            return self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def kill(self) -> None:
        """Kill torchrun and its ranks, each of which has a session of its own."""
        self.process.kill()
        self.process.wait(DEADLINE_S)
        for pid in self._logs.glob("*.pid"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid.read_text()), signal.SIGKILL)

    def said(self) -> str:
        return self._output.read_text()[-20000:]

    def losses(self) -> dict[int, str]:
        """The loss of each step, in hexadecimal digits: equal to the bit."""
        return {line["step"]: line["loss"] for line in _lines(self._logs / "losses.jsonl")}

    def rows(self, rank: int) -> list[list[str]]:
        """The digests of the rows of each batch of a rank."""
        return [line["rows"] for line in _lines(self._logs / f"rank{rank}.jsonl")]

    def validations(self, rank: int) -> list[list[list[str]]]:
        """As `rows`, for each validation."""
        validations: list[list[list[str]]] = []
        for line in _lines(self._logs / f"validation{rank}.jsonl"):
            validations += [[]] if "rows" not in line else []
            if "rows" in line:
                validations[-1].append(line["rows"])
        return validations

    def steps(self) -> list[list[str]]:
        """The digests of all rows of each step of the optimizer, sorted."""
        first = min(self.losses())
        batches = [self.rows(rank) for rank in range(self.ranks)]
        each = len(batches[0]) // (max(self.losses()) - first + 1)
        return [
            sorted(row for rank in batches for batch in rank[at : at + each] for row in batch)
            for at in range(0, len(batches[0]), each)
        ]


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer of bytes, and the folder "corpus"."""
    folder = tmp_path_factory.mktemp("inputs")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    (folder / "corpus").mkdir()
    texts = [" ".join(f"{number}:{word}" for word in range(number % 40)) for number in range(3000)]
    for part in range(2):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts[part::2])
        (folder / "corpus" / f"{part}.jsonl").write_text(lines)
    return folder


@pytest.fixture(scope="session")
def whole(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two ranks, not interrupted."""
    return Job(inputs, tmp_path_factory.mktemp("whole") / "job", "their_checkpoints").run(2)


@pytest.mark.parametrize("config", CHECKPOINTS)
def test_killed_training_resumes_exactly(inputs: Path, whole: Run, tmp_path: Path, config: str) -> None:
    """Losses and rows equal to the bit, with another number of workers."""
    job = Job(inputs, tmp_path / "job", config)
    killed = job.killed(2)
    resumed = job.run(2, "--dataloader.num_workers", "3")
    first = min(resumed.losses())
    assert 1 < first <= KILLED_AT
    assert first % INTERVAL == 1
    for run in (killed, resumed):
        for step, loss in run.losses().items():
            assert loss == whole.losses()[step], f"step {step}"
    assert max(resumed.losses()) == STEPS
    for rank in range(2):
        done = killed.rows(rank)
        assert done == whole.rows(rank)[: len(done)]
        assert resumed.rows(rank) == whole.rows(rank)[first - 1 :]
    assert len({row for rank in range(2) for batch in whole.rows(rank) for row in batch}) == STEPS * 8


@pytest.mark.parametrize("config", CHECKPOINTS)
def test_other_data_parallel_degrees(inputs: Path, whole: Run, tmp_path: Path, config: str) -> None:
    """2 ranks, then 1, then 2: each step of the optimizer has the rows of the run that was not interrupted."""
    job = Job(inputs, tmp_path / "job", config)
    job.killed(2)
    one = job.killed(1, at=10)
    two = job.run(2)
    for run in (one, two):
        first = min(run.losses())
        assert first > 1
        assert run.steps() == whole.steps()[first - 1 : first - 1 + len(run.steps())]
        for step, loss in run.losses().items():
            assert float.fromhex(loss) == pytest.approx(float.fromhex(whole.losses()[step]), rel=1e-3)
    assert max(two.losses()) == STEPS


@pytest.mark.parametrize("split_by", ["tensor", "context"])
def test_ranks_of_a_model_get_equal_batches(inputs: Path, whole: Run, tmp_path: Path, split_by: str) -> None:
    """Save as one box of two ranks, and resume as two boxes of one."""
    job = Job(inputs, tmp_path / "job", "ours")
    split = job.killed(2, f"--parallelism.{split_by}_parallel_degree", "2")
    assert split.rows(0)[: len(split.rows(1))] == split.rows(1)[: len(split.rows(0))]
    resumed = job.run(2)
    first = min(resumed.losses())
    assert first > 1
    assert resumed.steps() == whole.steps()[first - 1 :]


def test_validator_reads_its_own_stream(inputs: Path, whole: Run, tmp_path: Path) -> None:
    """It makes a loader for each validation. They change nothing in the training, and all have the same batches."""
    run = Job(inputs, tmp_path / "job", "validated").run(
        2, "--validator.dataloader.dataset_path", str(inputs / "corpus")
    )
    assert run.losses() == whole.losses()
    for rank in range(2):
        first, *others = run.validations(rank)
        assert len(first) == 2
        assert len(others) == 2
        assert all(other == first for other in others)


def test_checkpoints_of_both_managers(inputs: Path, whole: Run, tmp_path: Path) -> None:
    """A training saved by torchtitan's manager is resumed with ours, and then has the newest checkpoint of ours."""
    job = Job(inputs, tmp_path / "job", "their_checkpoints")
    job.killed(2)
    job.config = "ours"
    for at in (10, STEPS):
        resumed = job.killed(2, at=at) if at < STEPS else job.run(2)
        first = min(resumed.losses())
        assert first > at - 6
        assert resumed.losses() == {step: whole.losses()[step] for step in resumed.losses()}
        assert resumed.steps()[:1] == whole.steps()[first - 1 : first]
