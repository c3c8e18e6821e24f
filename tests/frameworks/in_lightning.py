"""Puts our loader under Lightning's tests: every training on one torch DataLoader has a Lookahead and its callback."""

from __future__ import annotations

import functools
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos import boring_classes
from lightning.pytorch.loops import fetchers
from lightning.pytorch.utilities.model_helpers import is_overridden
from put_in_place import LEFT_OUT, ahead_of

from penstock.client import Lookahead
from penstock.client.integrations.lightning import LoaderState
from penstock.proto.errors import InvalidArgumentError

pytest_plugins = ["put_in_place"]

_once = "it counts calls of train_dataloader, which this plug-in calls once for each training"
_of_torch = "it is about torch's DataLoader: its workers, its sampler, or the object itself"
LEFT_OUT |= {
    "test_dataloaders_load_only_once": _once,
    "test_dataloaders_load_every_n_epochs_infrequent_val": _once,
    "test_dataloaders_load_every_n_epochs_frequent_val": _once,
    "test_dataloaders_load_every_epoch_no_sanity_check": _once,
    "test_train_dataloader_passed_to_fit": _of_torch,
    "test_dataloaders_reset_and_attach": _of_torch,
    "test_warning_with_few_workers": _of_torch,
    "test_evaluation_loop_sampler_set_epoch_called": _of_torch,
    "test_dataloader_persistent_workers_performance_warning": "it spawns ranks, into which no Appliance goes",
    "test_restarting_mid_epoch_raises_warning": "it expects a warning that the loader has no state",
    "test_training_starts_with_seed": "the order goes by Appliance(seed=), not by torch's seed",
    "test_resume_training_with": "its dataset holds a multiprocessing.Queue, which goes to no worker",
    "test_iterable_dataset_stop_iteration_at_epoch_beginning": "its dataset has no batch, which is an error here",
}
for name in ("test_restart_parity", "test_restart_with_val_parity", "test_restart_from_last_parity"):
    LEFT_OUT[name] = "it compares whole checkpoints, in which a loader's state says from which step the launch began"
LEFT_OUT["test_restart_from_last_with_val_parity"] = LEFT_OUT["test_restart_parity"]

_fit = Trainer.fit
_made_rows = boring_classes.RandomDataset.__init__
_next_of_step = fetchers._DataFetcherWrapper.__next__
_aheads: list[Lookahead] = []


@functools.wraps(_fit)
def fit(self: Any, model: Any, train_dataloaders: Any = None, *arguments: Any, **named: Any) -> None:
    loader = train_dataloaders
    from_hook = loader is None and not arguments[1:] and named.get("datamodule") is None
    if from_hook and is_overridden("train_dataloader", model):
        loader = model.train_dataloader()
    if type(loader) is torch.utils.data.DataLoader:
        try:
            train_dataloaders = ahead_of(loader)
        except InvalidArgumentError:  # an order of the user's own, which only an input_fn can give
            pass
        else:
            _aheads[:] = [train_dataloaders]
            others = (callback for callback in self.callbacks if not isinstance(callback, LoaderState))
            self.callbacks = [LoaderState(train_dataloaders), *others]
    _fit(self, model, train_dataloaders, *arguments, **named)


def make_rows(self: Any, size: int, length: int) -> None:
    """Make the same random rows for a training and for one that resumes it: we refuse others."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        _made_rows(self, size, length)


def next_of_step(self: Any) -> Any:
    """Count what a training_step(dataloader_iter) takes, as it has to do itself."""
    taken = _next_of_step(self)
    if self.data_fetcher.combined_loader.iterables in _aheads:
        _aheads[0].took()
    return taken


for kind, method, ours in (
    (Trainer, _fit, fit),
    (boring_classes.RandomDataset, _made_rows, make_rows),
    (fetchers._DataFetcherWrapper, _next_of_step, next_of_step),
):
    setattr(kind, method.__name__, ours)
