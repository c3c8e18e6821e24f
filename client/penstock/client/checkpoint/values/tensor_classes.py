"""Tensors of classes of their own, such as quantised ones: torch.save writes each whole, and so it comes back.

Of one that is split over ranks, each rank has its rows. On another number of ranks these are cut and joined in the
plain tensors within (`__tensor_flatten__`). The class does not say which of those have rows, and which belong to the
whole, such as a table of levels. So each choice is tried, and only one that gives exactly the saved values counts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.tensor import DTensor

from penstock.proto.errors import CheckpointError


class Part(NamedTuple):
    tensor: torch.Tensor
    item: ReadItem | None
    """torch's ranges in this tensor and in the wanted one; None: all of it."""


class _Rows(NamedTuple):
    place: int
    """Number of the first of them in the wanted tensor."""
    tensor: torch.Tensor
    begin: int
    length: int


def joined(name: str, target: torch.Tensor, parts: list[Part]) -> torch.Tensor:
    """Return a tensor of the class of `parts`, with the device and the split of `target`. Raises CheckpointError."""
    local = target.to_local() if isinstance(target, DTensor) else target
    made = next(_made(local.shape, parts), None)
    if made is None:
        raise CheckpointError(
            f"{name!r} is a {type(parts[0].tensor).__name__}, which cannot be split otherwise than at the save: "
            "restore on as many ranks, or save the plain tensors in it"
        )
    made = made.to(local.device)
    if not isinstance(target, DTensor):
        return made
    return DTensor.from_local(
        made, target.device_mesh, target.placements, run_check=False, shape=target.shape, stride=target.stride()
    )


def _made(shape: torch.Size, parts: list[Part]) -> Iterator[torch.Tensor]:
    if len(parts) == 1 and parts[0].tensor.shape == shape:
        yield parts[0].tensor
    ranges = sorted(_rows(parts), key=lambda one: one.place)
    if len(ranges) < len(parts) or not hasattr(parts[0].tensor, "__tensor_flatten__"):
        return
    try:
        values = torch.cat([one.tensor.dequantize()[one.begin : one.begin + one.length] for one in ranges])
    except Exception:  # a class whose values cannot be compared
        return
    names, _ = parts[0].tensor.__tensor_flatten__()
    for choice in itertools.product((True, False), repeat=len(names)):
        try:
            made = _assembled(shape, ranges, dict(zip(names, choice, strict=True)))
            fits = torch.equal(made.dequantize(), values)
        except Exception:  # the class's own code, which refuses such parts
            continue
        if fits:
            yield made


def _rows(parts: list[Part]) -> Iterator[_Rows]:
    """Yield the rows of each part; not of one that is split in another dimension than the first."""
    for tensor, item in parts:
        if item is None:
            yield _Rows(0, tensor, 0, tensor.shape[0])
        elif not any(item.storage_offsets[1:]) and item.lengths[1:] == tensor.shape[1:]:
            yield _Rows(item.dest_offsets[0], tensor, item.storage_offsets[0], item.lengths[0])


def _assembled(shape: torch.Size, ranges: list[_Rows], has_rows: dict[str, bool]) -> torch.Tensor:
    inner = {}
    for name, split in has_rows.items():
        pieces = [_inner(name, one) if split else getattr(one.tensor, name) for one in ranges]
        assert split or all(torch.equal(pieces[0], piece) for piece in pieces)
        inner[name] = torch.cat(pieces) if split else pieces[0]
    first: Any = ranges[0].tensor
    _, context = first.__tensor_flatten__()
    if isinstance(context, list | tuple):
        context = type(context)(shape if part == first.shape else part for part in context)
    made: torch.Tensor = type(first).__tensor_unflatten__(
        inner, context, shape, torch.empty(shape, device="meta").stride()
    )
    assert made.shape == shape
    return made


def _inner(name: str, rows: _Rows) -> torch.Tensor:
    part: torch.Tensor = getattr(rows.tensor, name)
    begin, rest = divmod(part.shape[0] * rows.begin, rows.tensor.shape[0])
    count, more = divmod(part.shape[0] * rows.length, rows.tensor.shape[0])
    assert rest == more == 0
    return part.narrow(0, begin, count)
