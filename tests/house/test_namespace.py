"""`penstock` is a PEP 420 namespace over five roots: one stray `penstock/__init__.py` would hide the other four."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
ROOTS = {
    "proto": ("proto", "runtime"),
    "appliance": ("appliance",),
    "worker": ("worker", "data"),
    "client": ("client",),
    "deploy": ("deploy",),
}
"""Root folder -> the packages that lie in it."""
PACKAGES = [(root, package) for root, packages in ROOTS.items() for package in packages]


@pytest.mark.parametrize("root", ROOTS)
def test_root_holds_exactly_its_own_packages(root: str) -> None:
    found = {entry.name for entry in (REPO / root / "penstock").iterdir()} - {"__pycache__"}
    assert found == set(ROOTS[root]), f"{root}/penstock may hold its packages alone, above all no __init__.py"


@pytest.mark.parametrize(("root", "package"), PACKAGES)
def test_package_is_importable_and_typed(root: str, package: str) -> None:
    folder = REPO / root / "penstock" / package
    assert (folder / "__init__.py").is_file()
    assert (folder / "py.typed").is_file()
    assert importlib.import_module(f"penstock.{package}").__name__ == f"penstock.{package}"


def test_penstock_itself_is_no_regular_package() -> None:
    penstock = importlib.import_module("penstock")
    assert getattr(penstock, "__file__", None) is None
