"""deploy/docker/Dockerfile, as far as it can be known without an engine. docs/deploy.md: how it was built for real."""

from __future__ import annotations

import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from penstock.deploy.cli.main import app
from penstock.deploy.console.settings import CoordinatorSettings, WorkerSettings
from penstock.runtime.config.settings import variable

REPO = Path(__file__).parents[2]
DOCKERFILE = (REPO / "deploy" / "docker" / "Dockerfile").read_text()
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]

BLOCKED = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "fsspec"}:
            raise ModuleNotFoundError(f"the image of the coordinator has no {name}")

sys.meta_path.insert(0, Missing())
"""


def instructions() -> list[tuple[str, str]]:
    """(name, rest) of each, lines joined, comments left out."""
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE, flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in text.splitlines() if line.strip()]


def stages() -> dict[str, list[tuple[str, str]]]:
    found: dict[str, list[tuple[str, str]]] = {}
    for name, rest in instructions():
        if name == "FROM":
            current = found.setdefault(rest.split(" AS ")[1], [])
        elif found:
            current.append((name, rest))
    return found


def test_what_is_copied_is_there_and_not_ignored() -> None:
    kept = [line[1:] for line in (REPO / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for name, rest in instructions():
        if name != "COPY" or rest.startswith("--from"):
            continue
        for source in rest.split()[:-1]:
            assert (REPO / source).exists(), source
            assert any(source == path or fnmatch(source, f"{path}/*") for path in kept), f"{source} is ignored"
    for path in kept:
        assert (REPO / path).exists(), path


@pytest.mark.parametrize("stage", ["coordinator", "torch"])
def test_image_runs_as_numeric_non_root_user(stage: str) -> None:
    users = [rest for name, rest in stages()[stage] if name == "USER"]
    assert users == ["10001:10001"]
    for role in ("worker", "client"):
        assert not [rest for name, rest in stages()[role] if name == "USER"], "it is the one of the stage torch"


@pytest.mark.parametrize(("role", "settings"), [("coordinator", CoordinatorSettings), ("worker", WorkerSettings)])
def test_role_has_command_probe_and_settings(role: str, settings: Any) -> None:
    stage = dict(stages()[role])
    assert stage["ENTRYPOINT"] == '["penstock"]'
    assert stage["CMD"] == f'["{role}"]'
    command: Any = get_command(app)
    command.make_context("penstock", [role])
    assert f'"penstock.deploy.probe", "{role}", "live"' in stage["HEALTHCHECK"]
    known = {variable(settings, field) for field in settings.model_fields}
    given = {word.partition("=")[0] for name, rest in stages()[role] if name == "ENV" for word in rest.split()}
    assert {name for name in given if name.startswith("PENSTOCK_")} <= known


def test_extras_exist_and_versions_match() -> None:
    for extras in re.findall(r"^ARG EXTRAS=(\S+)$", DOCKERFILE, re.MULTILINE):
        assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
    assert set(re.findall(r"-t penstock-\w+:(\S+)", DOCKERFILE)) == {PROJECT["version"]}
    manifests = [*(REPO / "deploy" / "kubernetes").rglob("*.yaml")]
    tags = {tag for file in manifests for tag in re.findall(r"image: penstock-\w+:(\S+)", file.read_text())}
    assert tags == {PROJECT["version"]}


def test_coordinator_needs_no_torch_or_fsspec(shell: Any) -> None:
    (shell.folder / "sitecustomize.py").write_text(BLOCKED)
    path = f"{shell.folder}:{shell.environment['PYTHONPATH']}"
    started = shell.start("coordinator", "--listen", "127.0.0.1:0", "--state-dir", "state", PYTHONPATH=path)
    assert shell.call("status", "--coordinator", started.line).returncode == 0
    assert "has no torch" in shell.run("doctor", "streams:slow", PYTHONPATH=path).stderr, "which does need it"
    assert started.stop() == 0
