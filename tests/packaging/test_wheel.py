"""The wheel that users install, built from the sdist, in an environment where nothing of the tree is on the path.

The environment is a new one, with this one's other packages behind it, so that nothing is downloaded.
"""

from __future__ import annotations

import json
import os
import site
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
ROOTS = ("appliance", "client", "deploy", "proto", "worker")
PACKAGES = (*ROOTS, "data", "runtime")


@dataclass
class Installed:
    """A fresh environment with the wheel in it."""

    python: Path
    site: Path
    folder: Path
    """Empty, to run things in."""
    sdist: list[str]
    """Names in the sdist, below its one folder."""
    wheel: list[str]
    """Names in the wheel."""

    def run(self, *command: str) -> str:
        """Return its output; it must end with 0, and see nothing of the tree."""
        environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        done = subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=110, check=False
        )
        assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
        return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("packaging")
    dist = folder / "dist"
    call(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist), str(REPO))  # the wheel from the sdist
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    call(sys.executable, "-m", "venv", "--without-pip", str(folder / "venv"))
    python = folder / "venv" / "bin" / "python"
    call(sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel))
    packages = next((folder / "venv" / "lib").glob("python3*")) / "site-packages"
    # Behind its own. A .pth in a folder that is only on the path is not read: the editable install here stays unseen.
    (packages / "others.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    (folder / "empty").mkdir()
    with tarfile.open(sdist) as archive:
        inside = [name.partition("/")[2] for name in archive.getnames()]
    return Installed(python, packages, folder / "empty", inside, zipfile.ZipFile(wheel).namelist())


def call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"


def test_the_sdist_can_be_built_and_tested(installed: Installed) -> None:
    names = set(installed.sdist)
    assert {"LICENSE", "README.md", "CHANGELOG.md", "Makefile", "pyproject.toml", ".ci/run", "docs/conf.py"} <= names
    assert {"tests/conftest.py", "tests/data/mds/make.py", "examples/own_loader.py", "benchmarks/measure.py"} <= names
    assert {
        "deploy/docker/Dockerfile",
        "deploy/grafana/penstock.json",
        "deploy/kubernetes/helm/Chart.yaml",
        "deploy/slurm/service.sbatch",
    } <= names
    assert {name.partition("/")[0] for name in names} == {
        *("PKG-INFO", "pyproject.toml", "Makefile", ".ci", ".dockerignore", ".gitignore"),
        *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE"),
        *(*ROOTS, "benchmarks", "docs", "examples", "tests"),
    }
    made_here = {"out", "build", "dist", "__pycache__", ".venv", ".peers", ".fuzz", ".hypothesis", ".mypy_cache"}
    assert not [name for name in names if made_here & set(name.split("/"))]


def test_the_wheel_has_only_the_packages(installed: Installed) -> None:
    inside = {name for name in installed.wheel if ".dist-info/" not in name}
    assert {name.split("/")[1] for name in inside} == set(PACKAGES)
    assert {name.split("/")[0] for name in inside} == {"penstock"}
    assert "penstock/__init__.py" not in inside
    assert {f"penstock/{package}/py.typed" for package in PACKAGES} <= inside
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in installed.wheel)
    of_the_tree = {
        path.relative_to(REPO / root).as_posix() for root in ROOTS for path in (REPO / root / "penstock").rglob("*.py")
    }
    assert {name for name in inside if name.endswith(".py")} == of_the_tree


WHERE = """
import importlib, json, sys, penstock
from importlib.metadata import version
assert penstock.__file__ is None, penstock.__file__
homes = {name: importlib.import_module("penstock." + name).__file__ for name in sys.argv[1:]}
print(json.dumps([version("penstock"), list(penstock.__path__), homes]))
"""


def test_it_is_what_is_imported_and_run(installed: Installed) -> None:
    version, path, homes = json.loads(installed.run(str(installed.python), "-c", WHERE, *PACKAGES))
    assert path == [str(installed.site / "penstock")]
    assert all(Path(home).is_relative_to(installed.site) for home in homes.values()), homes
    command = str(installed.python.with_name("penstock"))
    assert installed.run(command, "--version") == f"penstock {version}\n"
    assert "doctor" in installed.run(command, "--help")


JOB = """
import torch
from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.worker import current_assignment

def input_fn(count):
    me = current_assignment()
    return [torch.tensor(n) for n in range(me.global_worker_id, count, me.total_num_workers)]

if __name__ == "__main__":
    with Appliance(num_workers_per_box=2):
        print([int(batch) for batch in DataLoader(input_fn, 6)])
"""


def test_a_job_runs(installed: Installed) -> None:
    (installed.folder / "job.py").write_text(JOB)
    assert installed.run(str(installed.python), "job.py") == "[0, 1, 2, 3, 4, 5]\n"
