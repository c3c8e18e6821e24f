"""Lightning: exact at every step, with and without a length."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import streams
from reading_ahead import PASS, STEPS, WHOLE, places

from penstock.client import Appliance, DataLoader, Lookahead

pytestmark = [
    pytest.mark.filterwarnings("ignore:::lightning.*"),  # its advice
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
]


@pytest.fixture(scope="module")
def appliance() -> Iterator[Appliance]:
    with Appliance(num_workers_per_box=2, seed=7, timeout_s=60) as found:
        yield found


@pytest.mark.parametrize(("input_fn", "depth"), [(streams.counter, 0), (streams.unsized, 1)])
def test_exact_at_every_step(appliance: Appliance, tmp_path: Path, input_fn: Any, depth: int) -> None:
    """depth: what the naive state is ahead. Lightning takes a batch more if the loader has no length."""
    from lightning_fits import fit

    module, _ = fit(appliance, input_fn, tmp_path, max_epochs=3, max_steps=STEPS)
    assert module.numbers == WHOLE[:STEPS]
    assert module.exact == places(appliance, input_fn)
    left = [PASS - (step - 1) % PASS - 1 for step in range(1, STEPS + 1)]
    assert module.naive == {step: step + min(depth, left[step - 1]) for step in range(1, STEPS + 1)}
    for step in (1, PASS - 1, PASS, PASS + 1):
        resumed, _ = fit(appliance, input_fn, tmp_path, tmp_path / f"step={step}.ckpt", max_steps=step + 2)
        assert resumed.numbers == WHOLE[step : step + 2]
    resumed, trainer = fit(appliance, input_fn, tmp_path, tmp_path / "end-epoch=0.ckpt", max_epochs=2)
    assert resumed.numbers == WHOLE[PASS : 2 * PASS], "Lightning itself would not have loaded this one"
    assert trainer.current_epoch == 2


def test_batches_that_are_none_are_counted(appliance: Appliance, tmp_path: Path) -> None:
    """Lightning trains on none of them, and calls fewer hooks."""
    from lightning_fits import fit

    module, _ = fit(appliance, streams.gaps, tmp_path, max_epochs=1)
    assert module.numbers == [1, 1001, 3, 1003]
    whole = places(appliance, streams.gaps)
    assert module.exact == {step: whole[step] for step in range(1, PASS + 1)}
    resumed, _ = fit(appliance, streams.gaps, tmp_path, tmp_path / "step=3.ckpt", max_epochs=1)
    assert resumed.numbers == [1003]


def test_a_step_that_takes_batches_counts_them(appliance: Appliance, tmp_path: Path) -> None:
    from lightning_fits import Takes, fit

    module, _ = fit(appliance, streams.counter, tmp_path, kind=Takes, max_epochs=1)
    assert module.numbers == WHOLE[:PASS]
    whole = places(appliance, streams.counter)
    assert module.exact == {step: whole[step] for step in (2, 4, 6)}
    resumed, _ = fit(appliance, streams.counter, tmp_path, tmp_path / "step=2.ckpt", kind=Takes, max_epochs=1)
    assert resumed.numbers == WHOLE[4:PASS]


LIMIT = 4


def test_epochs_shorter_than_a_pass(appliance: Appliance, tmp_path: Path) -> None:
    """The rest of an epoch is left; also where training goes on from the end of such an epoch."""
    from lightning_fits import fit

    limits: dict[str, Any] = {"max_epochs": 3, "limit_train_batches": LIMIT}
    module, _ = fit(appliance, streams.epochs, tmp_path, **limits)
    assert len(module.numbers) == 3 * LIMIT
    for name, step in (("end-epoch=0", LIMIT), (f"step={LIMIT}", LIMIT), ("step=3", 3)):
        resumed, trainer = fit(appliance, streams.epochs, tmp_path, tmp_path / f"{name}.ckpt", **limits)
        assert resumed.numbers == module.numbers[step:], name
        assert trainer.current_epoch == 3


def test_accumulation_shifted_by_a_resume_warns(appliance: Appliance, tmp_path: Path) -> None:
    """Lightning's own; a checkpoint of the end of the epoch does not have it."""
    from lightning_fits import fit

    limits: dict[str, Any] = {"max_epochs": 1, "accumulate_grad_batches": PASS - 2}
    fit(appliance, streams.unsized, tmp_path, **limits)
    with warnings.catch_warnings(record=True) as heard:  # beside its advice
        warnings.simplefilter("always")
        fit(appliance, streams.unsized, tmp_path, tmp_path / "step=2.ckpt", **limits)
    ours = f"LoaderState: the {PASS} batches of the checkpoint's epoch are no multiple of"
    assert sum(str(warning.message).startswith(ours) for warning in heard) == 1
    fit(appliance, streams.unsized, tmp_path, tmp_path / "end-epoch=0.ckpt", **limits)


@pytest.mark.parametrize("input_fn", [streams.counter, streams.unsized])
def test_fit_twice(appliance: Appliance, input_fn: Any) -> None:
    """Lightning begins an epoch twice there, and without a length takes a batch each time."""
    from lightning.pytorch import Trainer
    from lightning_fits import Module

    from penstock.client.integrations.lightning import LoaderState

    loader = DataLoader(input_fn, PASS // 2)
    ahead = Lookahead(loader, appliance=appliance)
    module = Module(ahead, loader)
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(
        max_epochs=1, callbacks=[LoaderState(ahead)], enable_checkpointing=False, accelerator="cpu", **quiet
    )
    trainer.fit(module, ahead)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, ahead)
    assert module.numbers == WHOLE[: 2 * PASS]
    assert ahead.step == 2 * PASS
    loader.close()
