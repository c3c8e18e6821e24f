"""Asynchronous, atomic checkpoints of model and data position; a storage writer for torch.distributed.checkpoint."""

from penstock.client.checkpoint.checkpointer import AsyncCheckpointer, Progress
from penstock.client.checkpoint.storage import AsyncFileSystemWriter

__all__ = ["AsyncCheckpointer", "AsyncFileSystemWriter", "Progress"]
