"""The histories notice small faults of the product's own code: what they find nothing wrong with means something."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from proof.mutations import MUTATIONS
from proof.suite import run

WITHIN = 200
"""Histories that a mutation may survive."""


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_found(name: str, record_property: Callable[[str, object], None]) -> None:
    outcomes = run(range(1, 1 + WITHIN), MUTATIONS[name].kinds, mutation=name, parallel=2)
    found = [outcome for outcome in outcomes if outcome.difference]
    assert found, f"{WITHIN} histories did not see {name}"
    record_property("found", f"history {len(outcomes)}: {found[0].difference}")
    assert "proof/mutations.py" not in found[0].difference, "write this mutation anew"
