"""Number of rows of a batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from penstock.proto.batch.structure import Structure
from penstock.proto.errors import InvalidArgumentError
from penstock.proto.tracebacks import warn_user


def infer_batch_size(data: Any, batch_size: int | None = None) -> int | None:
    """Return the number of rows of a batch: the first dimension that all its tensors share; without dimensions 1.

    Args:
        data: nested dicts, lists, tuples and dataclasses of tensors. Other values are ignored.
        batch_size: number of rows of earlier batches; None: not known. Another number gives a UserWarning.

    Returns None, with a UserWarning, if the numbers of rows differ. Raises InvalidArgumentError for data without a
    tensor."""
    sizes = {tensor.shape[0] if tensor.ndim else 1 for tensor in _tensors(data)}
    if not sizes:
        raise InvalidArgumentError(
            f"data must contain a tensor, in dicts, lists, tuples or dataclasses, got a {type(data).__qualname__}"
        )
    if len(sizes) > 1:
        warn_user(f"the tensors of a batch must have the same number of rows, got {sorted(sizes)}: pass the batch size")
        return None
    (size,) = sizes
    if batch_size is not None and size != batch_size:
        warn_user(
            f"the batch must have {batch_size} rows, like earlier batches, got {size}: use drop_last for equal ones"
        )
    return size


def batch_size_of(structure: Structure, shapes: Sequence[int]) -> int | None:
    """Do as infer_batch_size, with None for a batch without tensors. `shapes`: dimensions of all leaves in a row."""
    sizes, dims = set(), 0
    for leaf in structure.leaves:
        if leaf.kind == "t":
            sizes.add(shapes[dims] if leaf.rank else 1)
        dims += leaf.dims
    return sizes.pop() if len(sizes) == 1 else None


def _tensors(data: Any) -> Iterator[torch.Tensor]:
    if isinstance(data, torch.Tensor):
        yield data
    elif isinstance(data, Mapping):
        for value in data.values():
            yield from _tensors(value)
    elif isinstance(data, list | tuple):
        for value in data:
            yield from _tensors(value)
    elif is_dataclass(data) and not isinstance(data, type):
        for field in fields(data):
            yield from _tensors(getattr(data, field.name))
