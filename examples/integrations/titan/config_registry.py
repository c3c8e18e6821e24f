"""Configurations for torchtitan's own launcher, with Penstock's dataloader and checkpoint manager.

    PYTHONPATH=examples torchrun --nproc-per-node 8 -m torchtitan.train --module integrations.titan \
        --config llama3_debugmodel --hf_assets_path TOKENIZER_FOLDER --dataloader.dataset_path CORPUS_FOLDER

All other options are torchtitan's. Its own checkpoint manager works too: leave the third assignment out.
"""

from __future__ import annotations

from integrations.titan.corpus import input_fn
from torchtitan.models.llama3 import config_registry as llama3
from torchtitan.trainer import Trainer

from penstock.client.integrations.torchtitan import PenstockCheckpointManager, PenstockDataLoader

__all__ = ["llama3_debugmodel"]


def llama3_debugmodel() -> Trainer.Config:
    """Return torchtitan's configuration of its smallest Llama 3, with packed rows of text from Penstock."""
    config = llama3.llama3_debugmodel()
    config.dataloader = PenstockDataLoader.Config(input_fn=input_fn, num_workers=2)
    config.checkpoint = PenstockCheckpointManager.Config(enable=True, interval=500, last_save_model_only=False)
    return config
