"""The own tests of Lightning, Accelerate, the Trainer and torchtitan, with our loader and checkpoints in theirs' place.

Their wheels have none: they are cloned at the tag of the version, or lie in OWN_TESTS/PACKAGE, if that variable names a
folder. Without network and folder they are skipped. The plug-ins in_*.py do the replacing, and say what is left out,
and why."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import pytest

HERE = Path(__file__).parent
RELEASES = Path(sys.prefix, "releases")


@dataclass(frozen=True)
class Suite:
    repository: str
    package: str
    plugin: str
    tests: tuple[str, ...]
    tag: str = "v{}"
    folder: str = "."
    """Where pytest runs."""
    settings: str = os.devnull
    """File of pytest's settings, seen from there."""
    release: str = ""
    """Version that is not the installed one, but one of RELEASES."""


def lightning(plugin: str, *tests: str) -> Suite:
    paths = tuple(f"tests_pytorch/{test}" for test in tests)
    return Suite("Lightning-AI/pytorch-lightning", "lightning", plugin, paths, "{}", "tests", "../pyproject.toml")


def trainer(release: str) -> Suite:
    tests = ("tests/trainer/test_trainer_checkpointing.py",)
    return Suite("huggingface/transformers", "transformers", "in_trainer", tests, release=release)


SAVING = (
    *("models/test_restore.py", "plugins/test_checkpoint_io_plugin.py", "plugins/test_async_checkpoint.py"),
    *("checkpointing/test_trainer_checkpoint.py", "trainer/connectors/test_checkpoint_connector.py"),
)
OF_ACCELERATE = "test_data_loader", "test_state_checkpointing", "test_accelerator"
OF_TORCHTITAN = "test_checkpoint", "test_dataset_checkpointing"
SUITES = {
    "lightning": lightning(
        *("in_lightning", *SAVING, "trainer/connectors/test_data_connector.py", "trainer/test_dataloaders.py", "loops")
    ),
    "lightning's files": lightning(
        *(
            "in_lightning_files",
            *SAVING,
            "checkpointing/test_model_checkpoint.py",
            "checkpointing/test_torch_saving.py",
        ),
        "checkpointing/test_checkpoint_callback_frequency.py",
    ),
    "accelerate": Suite(
        *("huggingface/accelerate", "accelerate", "in_accelerate"), tuple(f"tests/{name}.py" for name in OF_ACCELERATE)
    ),
    "trainer": trainer(""),
    "trainer of 5.23": trainer("5.23.0"),
    "trainer of 5.24": trainer("5.24.0"),
    "torchtitan": Suite(
        *("pytorch/torchtitan", "torchtitan", "in_torchtitan"),
        tuple(f"tests/unit_tests/{name}.py" for name in OF_TORCHTITAN),
    ),
}


def source(suite: Suite) -> Path:
    given = Path(os.environ.get("OWN_TESTS", os.devnull), suite.package)
    if given.is_dir():
        return given
    tag = suite.tag.format(suite.release or version(suite.package))
    clone = Path(sys.prefix, "own_tests", f"{suite.package}-{tag}")
    if not clone.exists():
        part, address = clone.with_name(f"{clone.name}.part"), f"https://github.com/{suite.repository}"
        command = ["git", "clone", "--quiet", "--depth", "1", "--branch", tag, address, str(part)]
        cloned = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        if cloned.returncode:
            pytest.skip(f"OWN_TESTS has no {suite.package}, and {address} cannot be cloned: {cloned.stderr.strip()}")
        part.rename(clone)
    return clone


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", SUITES)
def test_their_own(name: str) -> None:
    suite = SUITES[name]
    folder = source(suite) / suite.folder
    release = [RELEASES / f"{suite.package}=={suite.release}"] if suite.release else []
    assert all(path.is_dir() for path in release), "make frameworks installs them"
    command = [sys.executable, "-m", "pytest", "-p", suite.plugin, "-p", "no:cacheprovider", "-q", "--tb=short"]
    command += ["-c", suite.settings, "--rootdir", ".", "-o", "addopts=", "--timeout", "300", *suite.tests]
    before = filter(None, [os.environ.get("PYTHONPATH")])
    paths = [*release, HERE, HERE.parent / "support", folder, *before]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    assert subprocess.run(command, cwd=folder, env=environment, check=False).returncode == 0
