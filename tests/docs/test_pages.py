"""The pages say what the code says: every error with its status and exit code, every public name, links that lead
somewhere. (Links between pages of docs/ are checked by `make docs`, where a broken one is an error.)"""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest
from documented import REPO

from penstock.deploy.console.exit_codes import exit_code
from penstock.proto.errors import CATALOGUE, PenstockError

API = {
    "penstock.client": "client.md",
    "penstock.client.checkpoint": "client-checkpoint.md",
    "penstock.client.integrations.jax": "client.md",
    "penstock.client.integrations.lightning": "client.md",
    "penstock.client.integrations.transformers": "client.md",
    "penstock.worker": "worker.md",
    "penstock.data": "data.md",
}
_ROW = re.compile(r"^\| `(\w+)`(?: \(`(\w+)`\))? \| [^|]+ \| `(\w+)` \| (\d+) \| [^|]+ \|$", re.MULTILINE)


def test_the_catalogue_has_every_error_as_it_is() -> None:
    rows = _ROW.findall((REPO / "docs/errors.md").read_text())
    assert {(name, status, int(code)) for name, _, status, code in rows} == {
        (name, entry.status, exit_code(entry.error(""))) for name, entry in CATALOGUE.items()
    }, "docs/errors.md: one row for each error: | `Name` (`Python's`) | meaning | `STATUS` | exit code | what to do |"
    for name, of_python, _, _ in rows:
        error = CATALOGUE[name].error
        own = [
            base.__name__ for base in error.__bases__ if not issubclass(base, PenstockError) and base is not Exception
        ]
        assert of_python in own if own else not of_python or of_python in {kind.__name__ for kind in error.__mro__}


@pytest.mark.parametrize("module", API)
def test_the_reference_has_every_public_name(module: str) -> None:
    shown, current = set(), ""
    page = (REPO / "docs/api" / API[module]).read_text()
    for kind, name in re.findall(r"^\.\. (currentmodule|autoclass|autofunction):: ([\w.]+)$", page, re.MULTILINE):
        if kind == "currentmodule":
            current = name
        else:
            shown.add(name if "." in name else f"{current}.{name}")
    assert {name.rpartition(".")[2] for name in shown if name.rpartition(".")[0] == module} == exported(module)


def test_the_tests_that_pages_name_are_there() -> None:
    """A page that promises behaviour names the test of it. `test_x.py::test_y`, `test_y` or `test_y[case]`."""
    files = list((REPO / "tests").rglob("test_*.py"))
    there = {name for path in files for name in [path.stem, *re.findall(r"def (test_\w+)", path.read_text())]}
    pages = [*(REPO / "docs").glob("*.md"), REPO / "README.md", REPO / "CONTRIBUTING.md"]
    a_name = re.compile(r"`(?:[\w/.]*[/:]+)?(test_\w+)(?:\[[^`]*)?`")
    named = {name for page in pages for name in a_name.findall(page.read_text())}
    assert sorted(named - there) == []


def exported(module: str) -> set[str]:
    """Its __all__, read and not imported: a framework takes seconds of a core."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    found = re.search(r"^__all__ = (\[.*?\])", Path(spec.origin).read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    return set(ast.literal_eval(found[1]))


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_out_of_the_root_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(#[^)]*)?\)", (REPO / page).read_text())
    lost = [link for link, _ in links if not re.match(r"https?:", link) and not (REPO / link).exists()]
    assert not lost


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", *(f"docs/{path.name}" for path in (REPO / "docs").glob("*.md"))])
def test_modules_that_a_page_names_exist(page: str) -> None:
    roots = [
        REPO / name for name in ("appliance", "client", "worker", "proto", "deploy", "tests", "benchmarks", "examples")
    ]
    there = {str(path.relative_to(REPO)) for root in roots for path in root.rglob("*.py")}
    text = (REPO / page).read_text()
    named = set(re.findall(r"`([\w./-]+\.py)`", text)) - {"penstock/__init__.py"}  # CONTRIBUTING.md: there is none
    lost = {name for name in named if not any(f"/{path}".endswith(f"/{name}") for path in there)}
    assert not lost
