"""Puts AsyncCheckpointer between Lightning and its files: what is written is what came back from a save of ours."""

from __future__ import annotations

import tempfile
from typing import Any

from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from put_in_place import LEFT_OUT, used

from penstock.client.checkpoint import AsyncCheckpointer

pytest_plugins = ["put_in_place"]

_mock = "it replaces torch.save, which ours calls too, by a mock"
LEFT_OUT |= {"test_default_checkpoint_freq": _mock, "test_top_k": _mock}

_save = TorchCheckpointIO.save_checkpoint


def save_checkpoint(self: Any, checkpoint: dict[str, Any], *arguments: Any, **named: Any) -> None:
    used("save")
    state: dict[str, Any] = {"checkpoint": {}}
    with tempfile.TemporaryDirectory() as folder, AsyncCheckpointer(folder) as checkpointer:
        checkpointer.save(1, {"checkpoint": checkpoint})
        checkpointer.restore(state, allow_unsafe_types=True)
    _save(self, state["checkpoint"], *arguments, **named)


setattr(TorchCheckpointIO, _save.__name__, save_checkpoint)
