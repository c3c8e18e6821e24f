"""Private parts of torch that checkpoints need, in one place.

tests/checkpoint/test_torch_private.py checks the parameters and results of each function. With a torch version that has
changed a function, that test fails and names the function, before a save fails.
"""

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
    """Let torch.save compute no CRC32. The setting is that of the whole process, so keep the block short."""
    before = config.save.compute_crc32
    config.save.compute_crc32 = False
    try:
        yield
    finally:
        config.save.compute_crc32 = before


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor], *, non_blocking: bool = False) -> None:
    """Copy each source tensor to the target tensor with the same index, in one call for thousands of small tensors."""
    torch._foreach_copy_(targets, sources, non_blocking)
