"""A batch that kills its runner each time is quarantined: the run fails by its name, or goes on without it, and a run
that is resumed leaves out the same."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import hazards
import pytest
from neighbours import beside

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.client.testing import FakeAppliance
from penstock.proto import errors


@pytest.fixture(scope="module")
def skipping(appliance: Appliance) -> Iterator[Appliance]:
    """Two workers; the first one's input can be poisoned."""
    with beside(appliance, num_workers_per_box=2, replay=True, poison="skip") as joined:
        yield joined


@contextmanager
def recorded() -> Iterator[list[str]]:
    """The texts of the warnings in the block, once it is over; none of them is an error."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield texts
        finally:
            texts += [str(one.message) for one in caught if "set_vital" not in str(one.message)]


def stream(appliance: Appliance, loader: DataLoader, steps: int | None = None) -> list[list[int]]:
    executor = DataExecutor(loader, num_steps=steps, appliance=appliance)
    return [(batch["x"] if isinstance(batch, dict) else batch).flatten().tolist() for batch in executor]


def by_worker(batches: list[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """Return what each of the two workers sent; their numbers lie apart."""
    return [b for b in batches if b[0] < 48], [b for b in batches if b[0] >= 48]


def without(batches: list[list[int]], poison: list[int]) -> list[list[int]]:
    return [batch for batch in batches if not set(batch) & set(poison)]


KIND, TWO = "own", [9, 37]


def test_the_stream_lacks_only_poison_also_when_it_is_resumed(skipping: Appliance) -> None:
    """Three legs, each from the state of the one before; the two poisoned batches lie in different ones."""
    with FakeAppliance(num_workers_per_box=2, seed=7, replay=True) as undisturbed:
        undisturbed_stream = stream(undisturbed, DataLoader(hazards.poisoned, KIND, []))
    wanted = [without(part, [sample // 4 + 1 for sample in TWO]) for part in by_worker(undisturbed_stream)]
    loader = DataLoader(hazards.poisoned, KIND, TWO)
    with recorded() as told:
        whole = stream(skipping, loader)
    named = [text for text in told if "is quarantined and skipped: it killed its runner 4 times" in text]
    assert len(named) == len(TWO)
    assert all(re.search(r"batch \d+ of box 0 slot 0 \(step \d+\) is quarantined", text) for text in named)
    session = loader._session
    assert session is not None
    assert session.stats().skipped == len(TWO)
    assert list(by_worker(whole)) == wanted
    assert len(whole) == 24 - len(TWO)
    # In turn, as long as both have some.
    assert whole[: 2 * len(wanted[0])] == [b for pair in zip(*wanted, strict=False) for b in pair]
    got: list[list[int]] = []
    state: dict[str, Any] | None = None
    for steps in (4, 5, None):
        loader = DataLoader(hazards.poisoned, KIND, TWO)
        if state is not None:
            loader.load_state_dict(state)
        with recorded() as told:
            got += stream(skipping, loader, steps)
        assert all("quarantined" in text or "SIGSEGV" in text for text in told)
        if len(got) == 9:  # the batch with 9 was left out by then, and the state knows it
            again = DataLoader(hazards.poisoned, KIND, TWO)
            again.load_state_dict(loader.state_dict())
            with recorded() as told:
                assert stream(skipping, again, 4) == whole[9:13]
            assert not any("after batch 2, in next" in text for text in told)
        state = loader.state_dict()
    assert got == whole


def test_unskippable_batch_fails_with_the_reason(skipping: Appliance) -> None:
    got: list[Any] = []
    with (
        recorded() as told,
        pytest.raises(
            errors.InputFnError, match=r"batch 6 killed its runner.*cannot be skipped.*has a method skip_batch\(\)"
        ),
    ):
        got.extend(DataExecutor(DataLoader(hazards.poisoned, "generator", [20]), appliance=skipping))
    assert len(got) == 10  # all that came before it
    assert any("is quarantined" in text for text in told)


def test_by_default_the_run_fails_and_names_it(appliance: Appliance) -> None:
    with (
        beside(appliance, num_workers_per_box=2) as failing,
        recorded() as told,
        pytest.raises(errors.PoisonBatchError, match=r"batch 5 of box 0 slot 0 \(step 9\)") as caught,
    ):
        stream(failing, DataLoader(hazards.poisoned, "torch", [17]))
    assert len([text for text in told if "SIGSEGV after batch 4, in next" in text]) >= 3
    text = str(caught.value)
    assert (
        "is quarantined, because it killed its runner 4 times. Repair the data or code of that batch, or pass "
        "Appliance" in text
    )
    assert 'poison="skip"' in text
    assert "in __getitem__" in caught.value.remote_traceback
