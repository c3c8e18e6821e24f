"""Error tree and its catalogue: every error that can be raised can cross gRPC, and arrives as the same error."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from penstock.proto import errors
from penstock.proto.errors import CATALOGUE, PenstockError, ProtocolError, error_named, malformed

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


def test_every_error_is_public_and_in_the_docs() -> None:
    names = {error.__name__ for error in ERRORS}
    assert names <= set(errors.__all__)
    page = (REPO / "docs" / "errors.md").read_text()
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []


@pytest.mark.parametrize("name", CATALOGUE)
def test_status_is_a_grpc_failure_status(name: str) -> None:
    status = CATALOGUE[name].status
    assert status in grpc.StatusCode.__members__
    assert status != "OK"


@pytest.mark.parametrize("error", ERRORS)
def test_error_comes_back_from_its_name(error: type[PenstockError]) -> None:
    back = error_named(error.__name__, "worker w1, box 0, step 3: it broke", "Traceback: far away")
    assert type(back) is error
    assert back.message == "worker w1, box 0, step 3: it broke"
    assert back.remote_traceback == "Traceback: far away"
    assert str(back).startswith("worker w1, box 0, step 3: it broke\n")
    assert "Traceback: far away" in str(back)
    assert str(error_named(error.__name__, "it broke")) == "it broke"


def test_malformed_keeps_its_remedy_on_the_wire() -> None:
    here = malformed("a frame must have a known kind, got 9")
    assert here.message == "a frame must have a known kind, got 9. Run the same release of Penstock at both ends"
    back = error_named(type(here).__name__, here.message)
    assert (type(back), back.message) == (ProtocolError, here.message)


def test_newer_peers_error_becomes_the_root() -> None:
    back = error_named("TomorrowsError", "it broke", "Traceback: far away")
    assert type(back) is PenstockError
    assert back.message == "TomorrowsError: it broke"
    assert back.remote_traceback == "Traceback: far away"


@pytest.mark.parametrize("name", ["BaseException", "SystemExit", "os.system", "Entry", ""])
def test_error_names_come_only_from_catalogue(name: str) -> None:
    assert type(error_named(name, "it broke")) is PenstockError


def test_no_error_is_defined_outside_errors_py() -> None:
    names = {error.__name__ for error in ERRORS}
    home = Path(errors.__file__).resolve()
    strays = [
        f"{module.relative_to(REPO)}: {found[1]}"
        for root in ROOTS
        for module in sorted((REPO / root / "penstock").rglob("*.py"))
        if module.resolve() != home
        for found in re.finditer(r"^ *class (\w+)\(([^)]*)\)", module.read_text(), re.MULTILINE)
        if names & set(re.findall(r"\w+", found[2]))
    ]
    assert not strays, "\n".join(strays)
