"""Puts our loader under Accelerate's tests, as the page says: a Lookahead in a torch DataLoader, whose batches are
counted, and which is registered for the checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from accelerate import Accelerator, data_loader
from put_in_place import LEFT_OUT, ahead_of

from penstock.client import Lookahead

pytest_plugins = ["put_in_place"]

_order = "a batch sampler of the user's own, whose order only an input_fn can give"
_of_torch = "it is about the classes or the state_dict of torch's and torchdata's loaders"
LEFT_OUT |= {
    "test_set_epoch_in_batch_sampler": _order,
    "test_skip_first_batches_does_not_reset_sampler_epoch": _order,
    "test_skip_first_batches_preserves_iteration": _order,
    "test_can_pickle_dataloader_0": _order,
    "test_can_pickle_dataloader_1": _order,
    "test_dataloader_inheritance": _of_torch,
    "test_skip_data_loader": _of_torch,
    "test_free_memory_dereferences_prepared_components": "it compares the machine's free memory",
}
for workers in (0, 2):
    for kind in ("stateful", "decoupled_stateful"):
        name = f"test_{kind}_dataloader_adapter_equivalent_to_torchdata_stateful_dataloader_num_workers_{workers}"
        LEFT_OUT[name] = _of_torch


class Counted:
    """Accelerate's loader over a Lookahead, for a loop that knows nothing of it."""

    _is_accelerate_prepared = True

    def __init__(self, ahead: Lookahead, batches: Any, *, saved: bool) -> None:
        self.ahead, self.batches, self.use_stateful_dataloader = ahead, batches, saved
        self.state_dict, self.load_state_dict = ahead.state_dict, ahead.load_state_dict

    def __iter__(self) -> Iterator[Any]:
        return self.ahead.handed_out(self.batches)

    def __len__(self) -> int:
        return len(self.ahead)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["batches"], name)


def prepare_data_loader(self: Any, loader: Any, *_: Any, **__: Any) -> Counted:
    ahead = ahead_of(loader)
    batches = data_loader.prepare_data_loader(
        torch.utils.data.DataLoader(ahead, batch_size=None),
        device=self.device,
        num_processes=1,
        process_index=0,
        put_on_device=True,
        dispatch_batches=False,
    )
    self.register_for_checkpointing(ahead)
    self._dataloaders.append(counted := Counted(ahead, batches, saved=False))
    return counted


def counted(kind: Any) -> Callable[..., Counted]:
    def make(dataset: Any, batch_size: int = 1, **_: Any) -> Counted:
        ahead = ahead_of(torch.utils.data.DataLoader(dataset, batch_size))
        return Counted(ahead, kind(ahead, batch_size=None), saved=True)

    return make


Accelerator.prepare_data_loader = prepare_data_loader


@pytest.fixture(autouse=True)
def ours(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    module = request.module
    for name in ("DataLoaderShard", "DataLoaderDispatcher"):
        if hasattr(module, name) and module.__name__.endswith("test_data_loader"):
            monkeypatch.setattr(module, name, counted(getattr(data_loader, name)))
    if hasattr(module, "StatefulDataLoader"):
        monkeypatch.setattr(module, "StatefulDataLoader", Counted)
