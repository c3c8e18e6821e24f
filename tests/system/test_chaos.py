"""Short run of `make chaos`."""

from __future__ import annotations

import pytest
from chaos import chaos


@pytest.mark.timeout(300)
def test_a_short_storm() -> None:
    assert chaos(4, 6.0) >= 2
