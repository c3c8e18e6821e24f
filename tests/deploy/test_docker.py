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


def test_packages_are_installed_by_hash() -> None:
    """All but torch, a build argument, and what other extras want."""
    commands = [command.strip() for name, rest in instructions() if name == "RUN" for command in rest.split("&&")]
    loose = [command for command in commands if "pip install" in command and "--require-hashes" not in command]
    assert [command.partition("pip install ")[2] for command in loose] == [
        "--no-deps /wheels/*.whl",
        '"${TORCH}"',
        '"${wheel}${EXTRAS:+[${EXTRAS}]}"',
    ]
    assert all("--no-build-isolation" in command for command in commands if "pip wheel" in command)
