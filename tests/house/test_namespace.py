"""`penstock` is a PEP 420 namespace over five roots: one stray `penstock/__init__.py` would hide the other four."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
ROOTS = ("proto", "appliance", "worker", "client", "deploy")


@pytest.mark.parametrize("root", ROOTS)
def test_root_holds_exactly_its_own_package(root: str) -> None:
    found = {entry.name for entry in (REPO / root / "penstock").iterdir()} - {"__pycache__"}
    assert found == {root}, f"{root}/penstock may hold {root}/ and nothing else, above all no __init__.py"


@pytest.mark.parametrize("root", ROOTS)
def test_package_is_importable_and_typed(root: str) -> None:
    package = REPO / root / "penstock" / root
    assert (package / "__init__.py").is_file()
    assert (package / "py.typed").is_file()
    assert importlib.import_module(f"penstock.{root}").__name__ == f"penstock.{root}"


def test_penstock_itself_is_no_regular_package() -> None:
    penstock = importlib.import_module("penstock")
    assert getattr(penstock, "__file__", None) is None
