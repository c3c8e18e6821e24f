"""Puts our checkpoint manager and dataloader into torchtitan's unit tests."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed.checkpoint as dcp
import torchtitan.components.checkpoint
import torchtitan.components.checkpointer.dcp
from put_in_place import LEFT_OUT, used
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torchtitan.components import checkpointer
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.hf_datasets.text_datasets import InterleavedHuggingFaceTextDataLoader

from penstock.client.integrations.torchtitan import PenstockCheckpointManager, PenstockDataLoader
from penstock.proto.state.checkpoint_files import MANIFEST
from penstock.worker import current_assignment

pytest_plugins = ["put_in_place"]
os.environ["PENSTOCK_NUM_WORKERS_PER_BOX"] = "0"

_listing = (
    "it compares the listing of the folder, which has `latest` and `.lock` too (run_torchtitan_parts.py tests it)"
)
_futures = "a save returns when all is copied, so that there are no futures of dcp.async_save"
_long = "minutes of batches in its own datasets, of which another test has the same kind"
LEFT_OUT |= {
    "test_save_and_purge_keeps_last_k_checkpoints": _listing,
    "test_nonzero_rank_does_not_purge_or_save": _listing,
    "test_async_save_with_pinned_mem_assigns_staging_future": _futures,
    "test_async_save_calls_maybe_wait_for_saving": _futures,
    "test_legacy_config_only_adds_dcp_specific_fields": "the configuration has two settings more",
    "test_c4_resumption": _long,
    "test_interleaved_resumption": _long,
    "test_map_style_shuffle_on_reloop": "private parts of its dataset, of which we replace none",
}


class Manager(PenstockCheckpointManager):
    """Tells the mocks of dcp.save and dcp.load, by which the tests count, what it does, and writes the file that they
    read."""

    def dcp_save(self, state_dict: Any, checkpoint_id: str, *options: Any, **named: Any) -> Any:
        result = super().dcp_save(state_dict, checkpoint_id, *options, **named)
        if checkpointer.DATALOADER in state_dict:
            used("save")
            assert self._checkpointer is not None
            self._checkpointer.wait()
            dcp_to_torch_save(checkpoint_id, Path(checkpoint_id, "state_dict.pt"))
            _tell("save", state_dict, checkpoint_id)
        return result

    def dcp_load(self, state_dict: Any, checkpoint_id: str, *options: Any, **named: Any) -> None:
        super().dcp_load(state_dict, checkpoint_id, *options, **named)
        if Path(checkpoint_id, MANIFEST).is_file():
            used("load")
            _tell("load", state_dict, checkpoint_id)


def _tell(name: str, state: Any, checkpoint_id: str) -> None:
    function = getattr(dcp, name)
    if isinstance(function, mock.Mock):
        effect, function.side_effect = function.side_effect, None
        function(state, checkpoint_id=checkpoint_id)
        function.side_effect = effect


for module in (checkpointer, torchtitan.components.checkpointer.dcp, torchtitan.components.checkpoint):
    vars(module)["CheckpointManager"] = Manager


def their_rows(tokenizer_path: str, seq_len: int, global_batch_size: int, config: Any, **_: Any) -> Any:
    place = current_assignment()
    return InterleavedHuggingFaceTextDataLoader(
        config,
        dp_world_size=place.num_boxes,
        dp_rank=place.box,
        tokenizer=HuggingFaceTokenizer.Config().build(tokenizer_path=tokenizer_path),
        seq_len=seq_len,
        local_batch_size=global_batch_size // place.num_boxes,
    )


def build(config: Any, **arguments: Any) -> PenstockDataLoader:
    used("loader")
    ours = PenstockDataLoader.Config(input_fn=their_rows, arguments={"config": config})
    made: PenstockDataLoader = ours.build(**arguments)
    return made


InterleavedHuggingFaceTextDataLoader.Config.build = build
