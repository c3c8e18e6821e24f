"""One embedded appliance for a whole module: real coordinator, worker daemon and lanes, started once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.client import Appliance


@pytest.fixture(scope="module")
def appliance() -> Iterator[Appliance]:
    """Two workers for the one box, seed 7."""
    with Appliance(num_workers_per_box=2, seed=7, timeout_s=60, replay=True) as running:
        yield running
