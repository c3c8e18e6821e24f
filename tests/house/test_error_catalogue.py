"""Error tree and its catalogue: every error that can be raised can cross gRPC, and arrives as the same error."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import grpc

from penstock.proto import errors
from penstock.proto.errors import CATALOGUE, PenstockError, error_named

REPO = Path(__file__).parents[2]
ROOTS = ("proto", "appliance", "worker", "client", "deploy")


def tree(top: type[PenstockError]) -> Iterator[type[PenstockError]]:
    """`top` and every class of errors.py below it."""
    yield top
    for child in top.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from tree(child)


ERRORS = sorted(set(tree(PenstockError)), key=lambda error: error.__name__)


def test_catalogue_holds_exactly_the_tree() -> None:
    assert {name: entry.error for name, entry in CATALOGUE.items()} == {error.__name__: error for error in ERRORS}


def test_every_error_is_in_the_docs() -> None:
    names = {error.__name__ for error in ERRORS}
    page = (REPO / "docs" / "errors.md").read_text()
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []


def test_errors_come_back_from_their_names() -> None:
    for error in ERRORS:
        assert type(error_named(error.__name__, "it broke")) is error
        assert CATALOGUE[error.__name__].status in grpc.StatusCode.__members__.keys() - {"OK"}
    back = error_named("DeadlineError", "worker w1, box 0, step 3: it broke", "Traceback: far away")
    assert back.message == "worker w1, box 0, step 3: it broke"
    assert back.remote_traceback == "Traceback: far away"
    assert str(back).startswith("worker w1, box 0, step 3: it broke\n")
    assert "Traceback: far away" in str(back)
    assert str(error_named("DeadlineError", "it broke")) == "it broke"


def test_newer_peers_error_becomes_the_root() -> None:
    back = error_named("TomorrowsError", "it broke", "Traceback: far away")
    assert type(back) is PenstockError
    assert back.message == "TomorrowsError: it broke"
    assert back.remote_traceback == "Traceback: far away"


def test_error_names_come_only_from_catalogue() -> None:
    assert {type(error_named(name, "it broke")) for name in ("SystemExit", "os.system", "Entry", "")} == {PenstockError}


def test_no_error_is_defined_outside_errors_py() -> None:
    names = {error.__name__ for error in ERRORS}
    home = Path(errors.__file__).resolve()
    strays = [
        f"{module.relative_to(REPO)}: {found[1]}"
        for root in ROOTS
        for module in sorted((REPO / root / "penstock").rglob("*.py"))
        if module.resolve() != home
        for found in re.finditer(r"\bclass (\w+)\(([^)]*)\)", module.read_text())
        if names & set(re.findall(r"\w+", found[2]))
    ]
    assert not strays, "\n".join(strays)
