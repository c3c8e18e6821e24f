"""Installation by the conda recipe, and the error on other systems than Linux."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

REPO = Path(__file__).parents[2]
CONDA_NAMES = {"torch": "pytorch", "xxhash": "python-xxhash"}


def test_the_conda_recipe_needs_what_pip_needs() -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    recipe = yaml.safe_load((REPO / "deploy/conda/recipe.yaml").read_text())
    pip = {name.split(";")[0].replace(" ", "") for name in project["dependencies"]}
    pip.add("python" + project["requires-python"])
    conda = {each.replace(" ", "") for each in recipe["requirements"]["run"]} - {"__linux"}
    renamed = {CONDA_NAMES.get(name := each.split(">")[0], name) + each[len(name) :] for each in pip}
    assert conda == renamed
    assert recipe["package"]["version"] == project["version"]
    (entry_point,) = recipe["build"]["python"]["entry_points"]
    assert entry_point == f"penstock = {project['scripts']['penstock']}"


@pytest.mark.parametrize("module", ["penstock.client", "penstock.worker", "penstock.deploy.__main__"])
def test_another_system_is_named(module: str) -> None:
    program = f"import sys; sys.platform = 'darwin'; import {module} as m; getattr(m, 'main', int)()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "Penstock must run on Linux, got darwin" in last
    assert "container" in last
