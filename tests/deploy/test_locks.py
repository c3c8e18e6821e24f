"""deploy/locks: each lock has all that pyproject.toml asks for, pinned and by hash."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPO = Path(__file__).parents[2]
LOCKS = REPO / "deploy" / "locks"
RELOCK = runpy.run_path(str(LOCKS / "relock.py"))
KINDS: dict[str, tuple[str, tuple[str, ...] | None, tuple[str, ...]]] = RELOCK["LOCKS"]


def pinned(name: str) -> dict[str, str]:
    """Package -> version. Every entry must have a hash."""
    entries = re.split(r"\n(?=\S)", (LOCKS / f"{name}.txt").read_text().strip())
    found: dict[str, str] = {}
    for entry in entries:
        if not entry.startswith("#"):
            package, version = entry.split()[0].split("==")
            assert "--hash=sha256:" in entry, package
            found[canonicalize_name(package)] = version
    return found


@pytest.mark.parametrize("name", KINDS)
def test_lock_satisfies_the_package_requirements(name: str) -> None:
    python, extras, without = KINDS[name]
    locked = pinned(name)
    for requirement in map(Requirement, RELOCK["wanted"](extras)):
        environment: Any = {**default_environment(), "python_version": python}
        if requirement.marker is not None and not requirement.marker.evaluate(environment):
            continue
        if requirement.name in without:
            assert requirement.name not in locked
        else:
            where = f"{name}.txt does not fit {requirement}: make lock"
            assert requirement.specifier.contains(locked.get(canonicalize_name(requirement.name), "0"), True), where
