"""Random generators that the user's dataset and collate_fn hold are named, with what is done with them; with a constant
seed, workers that would draw the same numbers are told of."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import augmented
import pytest

from penstock.client import Appliance, DataLoader
from penstock.client.testing import FakeAppliance

SAME = "input_fn leaves them in the same state on all workers"


def drawn(appliance: Appliance | FakeAppliance, transform: str, seeded_by: str) -> tuple[list[list[float]], list[str]]:
    """The numbers drawn by each of two workers, and the warnings."""
    with warnings.catch_warnings(record=True) as caught, appliance:
        warnings.simplefilter("always")
        numbers = [batch[0, 1].item() for batch in DataLoader(augmented.images, transform, seeded_by, 16)]
    return [numbers[::2], numbers[1::2]], [str(one.message) for one in caught]


@pytest.mark.parametrize("transform", augmented.TRANSFORMS)
def test_workers_that_draw_the_same_are_told_of(transform: str, caplog: pytest.LogCaptureFixture) -> None:
    if transform in ("albumentations", "monai"):
        pytest.importorskip(transform, exc_type=ImportError)
    caplog.set_level(logging.INFO, "penstock.client")
    (first, second), told = drawn(FakeAppliance(num_workers_per_box=2, replay=True), transform, "constant")
    assert first == second
    (warning,) = told
    assert "random generators Images.transform" in warning
    assert SAME in warning
    (first, second), told = drawn(FakeAppliance(num_workers_per_box=2, replay=True), transform, "initial_seed")
    assert first != second
    assert not told
    (message,) = [record.message for record in caplog.records if "random generators" in record.message]
    assert message.endswith(": in the first epoch as input_fn left them, in later ones seeded by that and the epoch")


@pytest.mark.parametrize("input_fn", [augmented.masked, augmented.masked_as_worker])
def test_transformers_masks_differ_between_workers(appliance: Appliance, tmp_path: Path, input_fn: Any) -> None:
    """In worker processes and, by the same names, in the training process."""
    import transformers.tokenization_utils_base  # noqa: F401  the class of batches, by whose name they arrive

    vocabulary = tmp_path / "vocabulary.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{n}" for n in range(50))]))
    masks = [batch["labels"].tolist() for batch in DataLoader(input_fn, str(vocabulary))]
    assert len(masks) == 16
    assert masks[0] != masks[1]
    with FakeAppliance(num_workers_per_box=2, seed=7, replay=True):
        assert [batch["labels"].tolist() for batch in DataLoader(input_fn, str(vocabulary))] == masks


def test_a_generator_made_at_the_first_batch_is_set_for_each() -> None:
    """Batches depend neither on the number of workers, nor on where a state was taken."""

    def batches(workers: int, steps: int, state: object = None) -> tuple[list[list[float]], object]:
        with FakeAppliance(num_workers_per_box=workers):
            loader = DataLoader(augmented.lazy)
            if state is not None:
                loader.load_state_dict(state)  # type: ignore[arg-type]
            got = [batch.tolist() for _, batch in zip(range(steps), loader, strict=False)]
            return got, loader.state_dict()

    whole, _ = batches(1, 8)
    assert len({batch[0] % 1 for batch in whole}) == 8
    start, state = batches(2, 3)
    assert start + batches(3, 5, state)[0] == whole
