"""What the plug-ins share that put our loaders and checkpoints into the own tests of frameworks (run_own_tests.py).

A plug-in names the tests that it leaves out, with their reasons. A name without a test is an error, and so is a run in
which nothing of ours was used."""

from __future__ import annotations

from typing import Any

import pytest
import torch.utils.data

from penstock.client import Appliance, DataLoader, Lookahead

__all__ = ["LEFT_OUT", "ahead_of", "used"]

LEFT_OUT: dict[str, str] = {}
"""Test functions, or "name[parameters]", with why they are left out."""
_uses: list[str] = []


def used(name: str) -> None:
    """Count a use of something of ours."""
    _uses.append(name)


def ahead_of(loader: torch.utils.data.DataLoader[Any]) -> Lookahead:
    """Put our loader in the place of a torch one. Its batches are made in this process."""
    used("loader")
    return Lookahead(DataLoader(loader), appliance=Appliance(num_workers_per_box=0, seed=1))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    names = {item: {item.name, getattr(item, "originalname", item.name)} for item in items}
    unknown = LEFT_OUT.keys() - {name for found in names.values() for name in found}
    if unknown:
        raise pytest.UsageError(f"no such tests to leave out: {', '.join(sorted(unknown))}")
    left_out = [item for item in items if names[item] & LEFT_OUT.keys()]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if not _uses and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    uses = ", ".join(f"{_uses.count(name)} {name}s" for name in sorted(set(_uses)))
    terminalreporter.write_line(f"of ours: {uses or 'nothing'}")
