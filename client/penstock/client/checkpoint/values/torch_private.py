"""Private parts of torch that checkpoints need. tests/checkpoint/test_torch_private.py checks each function's
parameters and results, so that a changed torch fails there, before a save fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import _wrap_exception as wrap_exception
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.filesystem import _StoragePrefix as StoragePrefix
from torch.distributed.checkpoint.filesystem import _write_item as write_item
from torch.distributed.checkpoint.utils import find_state_dict_object
from torch.utils.serialization import config

__all__ = [
    "StorageInfo",
    "StoragePrefix",
    "copy_all",
    "find_state_dict_object",
    "flatten_state_dict",
    "set_element",
    "without_crc32",
    "wrap_exception",
    "write_item",
]


@contextmanager
def without_crc32() -> Iterator[None]:
    """Let torch.save compute no CRC32. The setting is the whole process's, so keep the block short."""
    before = config.save.compute_crc32
    config.save.compute_crc32 = False
    try:
        yield
    finally:
        config.save.compute_crc32 = before


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor], *, non_blocking: bool = False) -> None:
    """Copy tensors in one call for thousands of small ones."""
    torch._foreach_copy_(targets, sources, non_blocking)
