"""A batch that kills its runner each time is quarantined: the run fails by its name, or goes on without it, and a run
that is resumed leaves out the same."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Iterator
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


def skipped(appliance: Appliance, kind: str, poison: list[int], shuffle: bool) -> list[list[int]]:
    """The whole stream of an input with poison in it, which is left out with a warning and a count."""
    loader = DataLoader(hazards.poisoned, kind, poison, shuffle)
    with recorded() as told:
        got = stream(appliance, loader)
    named = [text for text in told if "is quarantined and skipped: it killed its runner 4 times" in text]
    assert len(named) == len(poison)
    assert all(re.search(r"batch \d+ of box 0 slot 0 \(step \d+\) is quarantined", text) for text in named)
    session = loader._session
    assert session is not None
    assert session.stats().skipped == len(poison)
    return got


@pytest.fixture(scope="module")
def two_left_out(skipping: Appliance) -> Callable[[str], list[list[int]]]:
    """The stream of a kind of input without the batches with TWO. Each batch that is left out kills four runners first,
    so it is made once."""
    return functools.cache(lambda kind: skipped(skipping, kind, TWO, False))


TWO = [9, 37]


@pytest.mark.parametrize(
    ("kind", "shuffle", "poison"),
    [
        ("torchdata", True, [17]),
        ("own", False, TWO),
        ("torch", False, [1, 22, 26]),  # the first batch of all, and two in a row
    ],
)
def test_stream_lacks_only_the_poison_batch(
    skipping: Appliance,
    two_left_out: Callable[[str], list[list[int]]],
    kind: str,
    shuffle: bool,
    poison: list[int],
) -> None:
    with FakeAppliance(num_workers_per_box=2, seed=7, replay=True) as undisturbed:
        whole = stream(undisturbed, DataLoader(hazards.poisoned, kind, [], shuffle))
    got = two_left_out(kind) if poison is TWO else skipped(skipping, kind, poison, shuffle)
    marks = [sample // 4 + 1 for sample in poison] if kind == "own" else poison
    wanted = [without(part, marks) for part in by_worker(whole)]
    assert list(by_worker(got)) == wanted
    assert len(got) == 24 - len(poison)
    # In turn, as long as both have some.
    assert got[: 2 * len(wanted[0])] == [b for pair in zip(*wanted, strict=False) for b in pair]


@pytest.mark.parametrize("kind", ["own"])
def test_resumed_runs_leave_out_the_same_batches(
    skipping: Appliance, two_left_out: Callable[[str], list[list[int]]], kind: str
) -> None:
    """Three legs, each from the state of the one before; the two poisoned batches lie in different ones."""
    poison, whole = TWO, two_left_out(kind)
    got: list[list[int]] = []
    state: dict[str, Any] | None = None
    for steps in (4, 5, None):
        loader = DataLoader(hazards.poisoned, kind, poison, False)
        if state is not None:
            loader.load_state_dict(state)
        with recorded() as told:
            got += stream(skipping, loader, steps)
        assert all("quarantined" in text or "SIGSEGV" in text for text in told)
        if len(got) == 9:  # the batch with 9 was left out by then, and the state knows it
            again = DataLoader(hazards.poisoned, kind, poison, False)
            again.load_state_dict(loader.state_dict())
            with recorded() as told:
                assert stream(skipping, again, 4) == whole[9:13]
            assert not any("after batch 2, in next" in text for text in told)
        state = loader.state_dict()
    assert got == whole


@pytest.mark.parametrize(("kind", "says"), [("generator", r"has a method skip_batch\(\)")])
def test_unskippable_batch_fails_with_the_reason(skipping: Appliance, kind: str, says: str) -> None:
    got: list[Any] = []
    with (
        recorded() as told,
        pytest.raises(errors.InputFnError, match=f"batch 6 killed its runner.*cannot be skipped.*{says}"),
    ):
        got.extend(DataExecutor(DataLoader(hazards.poisoned, kind, [20]), appliance=skipping))
    assert len(got) == 10  # all that came before it
    assert any("is quarantined" in text for text in told)


def test_by_default_the_run_fails_and_names_it(appliance: Appliance) -> None:
    with (
        beside(appliance, num_workers_per_box=2) as failing,
        recorded() as told,
        pytest.raises(errors.WorkerLostError, match=r"batch 5 of box 0 slot 0 \(step 9\)") as caught,
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
