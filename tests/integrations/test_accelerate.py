"""Accelerate, with two processes, killed and resumed. What its loader is ahead, and that this is handled at every step,
is in test_lookahead.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from framework_runs import Framework, framework, killed_and_resumed


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Framework]:
    with framework("integrations.accelerate_loop", tmp_path_factory.mktemp("accelerate")) as found:
        yield found


@pytest.mark.timeout(300)
def test_killed_and_resumed(example: Framework) -> None:
    killed_and_resumed(example, ranks=2)
