"""What frameworks do with loaders besides training: validation with a limit, gradient accumulation, a stop before the
end, lengths, progress bars. In each of them the batches are those of a plain loop, and the state is the loop's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lengths
import pytest
import streams
import torch
import validation_rows
from reading_ahead import PASS, WHOLE, following

from penstock.client import Appliance, DataLoader, Lookahead

pytestmark = [
    pytest.mark.filterwarnings("ignore:::lightning.*"),  # its advice
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
]
quiet: dict[str, Any] = {"logger": False, "accelerator": "cpu", "enable_model_summary": False}


@pytest.fixture(scope="module")
def appliance() -> Iterator[Appliance]:
    with Appliance(num_workers_per_box=2, seed=7, timeout_s=60) as found:
        yield found


def ahead_of(appliance: Appliance) -> Lookahead:
    return Lookahead(DataLoader(streams.counter, PASS // 2), appliance=appliance)


def validation_of(appliance: Appliance) -> Lookahead:
    return Lookahead(DataLoader(validation_rows.rows, PASS), appliance=appliance)


# ---- Lightning


def test_lightning(appliance: Appliance, tmp_path: Path) -> None:
    """Two validations an epoch of two batches, accumulation over three, and an early stop in the second epoch."""
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import EarlyStopping, TQDMProgressBar
    from lightning_fits import Module

    from penstock.client.integrations.lightning import LoaderState

    totals: list[Any] = []

    class Bar(TQDMProgressBar):
        def on_train_batch_end(self, *arguments: Any) -> None:
            super().on_train_batch_end(*arguments)
            totals.append(self.train_progress_bar.total)

    class Validated(Module):
        seen: list[int]

        def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
            self.seen.append(int(batch["number"]))
            self.log("constant", 1.0, batch_size=1)

    ahead, other = ahead_of(appliance), DataLoader(validation_rows.rows, PASS)
    module = Validated(ahead, ahead._loader)
    module.seen = []
    trainer = Trainer(
        **quiet,
        max_epochs=3,
        val_check_interval=3,
        limit_val_batches=2,
        num_sanity_val_steps=1,
        accumulate_grad_batches=3,
        callbacks=[LoaderState(ahead), EarlyStopping("constant", patience=2), Bar()],
        enable_checkpointing=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(module, ahead, other)
    assert module.numbers == WHOLE[: PASS + 3], "it stops at the third validation without progress"
    assert module.seen == [0, *[0, 1] * 3], "each validation has the first batches of an epoch"
    assert trainer.global_step == 3, "an optimizer step for three batches"
    assert set(totals) == {PASS}, totals
    assert ahead.step == PASS + 3
    assert following(ahead.state_dict(), 2, appliance) == WHOLE[PASS + 3 : PASS + 5]


# ---- Accelerate


def test_accelerate(appliance: Appliance) -> None:
    """Accumulation that ends with the epoch, a stop within the next, a bar, and validation with a limit."""
    from accelerate import Accelerator
    from accelerate.data_loader import prepare_data_loader
    from tqdm import tqdm

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)

    def prepared(ahead: Lookahead) -> Any:
        loader: Any = torch.utils.data.DataLoader(ahead, batch_size=None)
        return prepare_data_loader(loader, num_processes=1, process_index=0, put_on_device=True, dispatch_batches=False)

    ahead, other = ahead_of(appliance), validation_of(appliance)
    batches, validation = prepared(ahead), prepared(other)
    assert len(batches) == PASS
    weight = torch.nn.Parameter(torch.ones(()))
    model = accelerator.prepare(torch.nn.ParameterList([weight]))
    numbers: list[int] = []
    synced: list[int] = []
    seen: list[int] = []
    for _ in range(2):
        bar = tqdm(ahead.handed_out(batches), total=len(batches), disable=True)
        assert bar.total == PASS
        for batch in bar:
            with accelerator.accumulate(model):
                numbers.append(int(batch["number"]))
                if accelerator.sync_gradients:
                    synced.append(ahead.step)
            if ahead.step == PASS + 3:
                break  # an early stop
        for at, batch in enumerate(other.handed_out(validation), 1):
            seen.append(int(batch["number"]))
            if at == 2:
                break
    assert numbers == WHOLE[: PASS + 3]
    assert synced == [4, PASS], "at the end of an epoch too, which it knows from reading ahead"
    assert seen == [0, 1] * 2
    assert following(ahead.state_dict(), 2, appliance) == WHOLE[PASS + 3 : PASS + 5]


# ---- Hugging Face's Trainer


class Constant(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.train_numbers: list[int] = []
        self.eval_numbers: list[int] = []

    def forward(self, x: torch.Tensor, number: torch.Tensor) -> dict[str, torch.Tensor]:
        (self.train_numbers if self.training else self.eval_numbers).append(int(number))
        return {"loss": self.weight * x.float().mean()}


def test_trainer(appliance: Appliance, tmp_path: Path) -> None:
    """Evaluation twice an epoch, accumulation over three, an early stop in the second epoch, and its bar."""
    from transformers import EarlyStoppingCallback, ProgressCallback, Trainer, TrainingArguments

    from penstock.client.integrations.transformers import LoaderState

    ahead, other = ahead_of(appliance), validation_of(appliance)
    totals: list[int] = []

    class Bar(ProgressCallback):  # type: ignore[misc]
        def on_step_end(self, *arguments: Any, **named: Any) -> None:
            super().on_step_end(*arguments, **named)
            totals.append(self.training_bar.total)

    class Fed(Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            return ahead

        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            return other

    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        num_train_epochs=3,
        gradient_accumulation_steps=3,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        metric_for_best_model="eval_loss",
        greater_is_better=True,  # so that a constant one is no progress
        load_best_model_at_end=True,
        learning_rate=0.0,
        ignore_data_skip=True,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,  # its own bar
        logging_strategy="no",
        prediction_loss_only=True,
        label_names=["number"],  # it evaluates a loss only for batches with labels
    )
    model = Constant()
    trainer = Fed(
        model,
        arguments,
        eval_dataset=[0],
        callbacks=[LoaderState(), EarlyStoppingCallback(2), Bar()],
    )
    trainer.train()
    assert model.train_numbers == WHOLE[: PASS + 3]
    assert model.eval_numbers == [*range(PASS)] * 3
    assert set(totals) == {3 * PASS // 3}, "optimizer steps of all epochs, by the length"
    assert trainer.state.global_step == 3
    assert following(ahead.state_dict(), 2, appliance) == WHOLE[PASS + 3 : PASS + 5]


# ---- a len() that is too small


EPOCH = [1, 1001, 2, 1002]
"""As many batches of lengths.too_short(3) as its len() says."""


def too_short(appliance: Appliance) -> Lookahead:
    return Lookahead(DataLoader(lengths.too_short, PASS // 2), appliance=appliance)


def test_lightning_drops_what_is_beyond_len(appliance: Appliance, tmp_path: Path) -> None:
    """Also where training goes on from the end of an epoch."""
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning_fits import Module

    from penstock.client.integrations.lightning import LoaderState

    def fit(checkpoint: Path | None = None) -> list[int]:
        ahead = too_short(appliance)
        module = Module(ahead, ahead._loader)
        module.on_train_batch_end = LightningModule.on_train_batch_end.__get__(module)  # type: ignore[method-assign]
        ends = ModelCheckpoint(tmp_path, "end-{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
        trainer = Trainer(**quiet, max_epochs=2, callbacks=[LoaderState(ahead), ends], enable_progress_bar=False)
        trainer.fit(module, ahead, ckpt_path=checkpoint)
        ahead._loader.close()
        return module.numbers

    assert fit() == 2 * EPOCH
    assert fit(tmp_path / "end-epoch=0.ckpt") == EPOCH


@pytest.mark.filterwarnings("ignore:Length of IterableDataset")  # torch's, of the batch that it reads ahead
def test_accelerate_drops_what_is_beyond_len(appliance: Appliance) -> None:
    from accelerate.data_loader import prepare_data_loader

    ahead, numbers = too_short(appliance), []
    loader: Any = torch.utils.data.DataLoader(ahead, batch_size=None)
    loader = prepare_data_loader(loader, num_processes=1, process_index=0, put_on_device=True, dispatch_batches=False)
    for _ in range(2):
        for at, batch in enumerate(ahead.handed_out(loader), 1):
            numbers.append(int(batch["number"]))
            if at == len(loader):
                break
    assert numbers == 2 * EPOCH
    ahead._loader.close()


def test_trainer_drops_what_is_beyond_len(appliance: Appliance, tmp_path: Path) -> None:
    """Also where training goes on from the end of an epoch."""
    from transformers import Trainer, TrainingArguments

    from penstock.client.integrations.transformers import LoaderState

    def train(checkpoint: Path | None = None) -> list[int]:
        ahead = too_short(appliance)

        class Fed(Trainer):  # type: ignore[misc]
            def get_train_dataloader(self) -> Any:
                return ahead

        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            num_train_epochs=2,
            save_strategy="epoch",
            learning_rate=0.0,
            ignore_data_skip=True,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            logging_strategy="no",
        )
        model = Constant()
        Fed(model, arguments, callbacks=[LoaderState()]).train(resume_from_checkpoint=checkpoint)
        ahead._loader.close()
        return model.train_numbers

    assert train() == 2 * EPOCH
    assert train(tmp_path / f"checkpoint-{len(EPOCH)}") == EPOCH


# ---- without a framework


def test_bars_and_lengths_of_a_plain_loop(appliance: Appliance) -> None:
    from tqdm import tqdm

    from penstock.client import DataExecutor

    loader = DataLoader(streams.counter, PASS // 2)
    executor = DataExecutor(loader, num_steps=4, appliance=appliance)
    assert tqdm(executor, disable=True).total == 4
    assert tqdm(loader, disable=True).total == PASS
    unsized = DataLoader(streams.unsized, PASS // 2)
    assert tqdm(Lookahead(unsized, appliance=appliance), disable=True).total is None
    assert len(list(tqdm(executor, disable=True))) == 4
