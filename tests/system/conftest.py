"""Embedded appliance for this folder's modules: real coordinator, worker daemon and lanes, started once in each process
that runs them. A test that kills or stops one of its daemons starts an appliance of its own."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from penstock.client import Appliance

_shared = ExitStack()
_open: list[Appliance] = []


@pytest.fixture(scope="module")
def appliance() -> Appliance:
    """Two workers for the one box, seed 7; the same for all modules that follow each other."""
    if not _open:
        _open.append(_shared.enter_context(Appliance(num_workers_per_box=2, seed=7, timeout_s=60, replay=True)))
        _shared.callback(_open.clear)
    return _open[0]


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Close the appliance after the last test of this folder: for other tests an open one would be the default
    appliance."""
    if nextitem is None or Path(__file__).parent not in nextitem.path.parents:
        _shared.close()
