"""Content of a batch, as a digest of all of it, and as a short text for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from xxhash import xxh3_128

__all__ = ["brief", "fingerprint"]


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        yield value.detach().contiguous().numpy()
    elif isinstance(value, np.ndarray):
        yield f"array {value.dtype} {value.shape}".encode()
        yield np.ascontiguousarray(value)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield f"key {key!r}".encode()
            yield from _parts(item)
    elif isinstance(value, list | tuple):
        yield f"{type(value).__name__} of {len(value)}".encode()
        for item in value:
            yield from _parts(item)
    else:
        yield repr(value).encode()


def fingerprint(batch: Any) -> str:
    """Return a digest of every byte of a batch, the same in every process."""
    digest = xxh3_128()
    for part in _parts(batch):
        digest.update(part)
        digest.update(b"\0")
    return digest.hexdigest()


def brief(batch: Any) -> str:
    """Return its small leaves."""
    if isinstance(batch, dict):
        return ", ".join(text for item in batch.values() if (text := brief(item)))
    if isinstance(batch, list | tuple):
        return "; ".join(text for item in batch if (text := brief(item)))
    if isinstance(batch, torch.Tensor | np.ndarray):
        few = batch.reshape(-1)[:20].tolist()
        return " ".join(f"{number:.6g}" for number in few) if len(few) < 20 else ""
    return str(batch)
