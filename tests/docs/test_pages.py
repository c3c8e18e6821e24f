"""The pages say what the code says: every error with its status and exit code, every public name, links that lead
somewhere. (Links between pages of docs/ are checked by `make docs`, where a broken one is an error.)"""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
from documented import REPO

from penstock.deploy.exits import exit_code
from penstock.proto.errors import CATALOGUE, PenstockError

API = {
    "penstock.client": "client.md",
    "penstock.client.checkpoint": "client-checkpoint.md",
    "penstock.worker": "worker.md",
    "penstock.worker.datasets": "worker-datasets.md",
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
    page = (REPO / "docs/api" / API[module]).read_text()
    shown = set(re.findall(r"^\.\. auto(?:class|function):: (\w+)$", page, re.MULTILINE))
    assert shown == set(importlib.import_module(module).__all__)


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_out_of_the_root_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(#[^)]*)?\)", (REPO / page).read_text())
    lost = [link for link, _ in links if not re.match(r"https?:", link) and not (REPO / link).exists()]
    assert not lost


@pytest.mark.parametrize("page", sorted(path.name for path in (REPO / "docs").glob("*.md")))
def test_every_page_is_in_the_index(page: str) -> None:
    listed = re.findall(r"^([\w/*-]+)$", (REPO / "docs/index.md").read_text(), re.MULTILINE)
    assert page == "index.md" or any(Path(page).match(f"{entry}.md") for entry in listed), "name it in docs/index.md"
