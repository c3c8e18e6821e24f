"""Asynchronous, atomic checkpoints of model and data position; a storage writer for torch.distributed.checkpoint.

Each name is imported when first used: the writer process does not need torch."""

from typing import TYPE_CHECKING

from penstock.runtime.lazy_names import lazy_names

if TYPE_CHECKING:
    from penstock.client.checkpoint.checkpointer import AsyncCheckpointer, Progress
    from penstock.client.checkpoint.storage import AsyncFileSystemWriter

__all__ = ["AsyncCheckpointer", "AsyncFileSystemWriter", "Progress"]

_BY_MODULE = {".checkpointer": ["AsyncCheckpointer", "Progress"], ".storage": ["AsyncFileSystemWriter"]}

if not TYPE_CHECKING:  # type checkers would take any name for one of this package
    __getattr__, __dir__ = lazy_names(globals(), _BY_MODULE)
