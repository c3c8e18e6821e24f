"""Comparison of values that several ranks have under one name, because a checkpoint keeps only one copy.

torch.distributed.checkpoint assumes that such values are equal and keeps the copy of any rank, so a random state or a
counter that differs by rank is lost silently. Here objects are compared whole, by value, and so are small tensors, such
as a generator's state. Of larger tensors 16 values are compared, spread over the tensor. Weights that have drifted
apart differ nearly everywhere, and a comparison of all values would take as long as a save.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import xxhash
from torch.distributed.tensor import DTensor

from penstock.client.checkpoint.saving.collect import CollectedState
from penstock.client.checkpoint.saving.planning import Key, LocalItem
from penstock.client.checkpoint.values.plain_values import PLAIN, value_digest
from penstock.client.checkpoint.values.torch_private import find_state_dict_object

__all__ = ["compare", "digests", "summary"]

SAMPLES = 16
WHOLE = 16 << 10
"""Largest size in bytes of a tensor that is compared whole. Of a larger tensor only samples are compared."""
OBJECT, TENSOR = "object", "tensor"


def digests(
    collected: CollectedState, items: Sequence[LocalItem], objects: dict[Key, bytes], shared: dict[Key, list[int]]
) -> dict[Key, tuple[str, str]]:
    """Return a digest for each item of this rank that other ranks have too, as (kind, digest) by the item's key.
    `objects`: bytes of the unframed items. `shared`: ranks that have the item."""
    found: dict[Key, tuple[str, str]] = {}
    groups: dict[tuple[torch.device, torch.dtype], list[tuple[Key, torch.Tensor]]] = defaultdict(list)
    for one in items:
        if one.key not in shared:
            continue
        if one.frame is None:
            found[one.key] = OBJECT, _object_digest(collected, one, objects)
            continue
        tensor = find_state_dict_object(collected.values, one.torch_index).detach()
        tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if tensor.numel():
            groups[tensor.device, tensor.dtype].append((one.key, _sample(tensor)))
    for group in groups.values():  # all samples of one dtype are copied from the device together
        values = torch.cat([sample for _, sample in group]).cpu()
        data = values.view(torch.uint8).numpy().tobytes()
        begin = 0
        for key, sample in group:
            end = begin + sample.numel() * sample.element_size()
            found[key] = TENSOR, xxhash.xxh3_64_hexdigest(data[begin:end])
            begin = end
    return found


def _object_digest(collected: CollectedState, one: LocalItem, objects: dict[Key, bytes]) -> str:
    """Return the digest of an object's value, not of its pickle. Pickles of equal values may differ: if a value has the
    same string twice, its pickle depends on whether that is one str object or two."""
    name = one.name
    value = collected.values.get(name)
    if isinstance(value, torch.Tensor) or type(value) in PLAIN:
        return xxhash.xxh3_64_hexdigest(objects[one.key])
    return value_digest((value, collected.recipes.get(name)))


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Return a flat tensor with all values of a small tensor, or with `SAMPLES` values of a large one. The order
    follows the indices, not the strides, so it is the same for equal tensors."""
    if tensor.nbytes <= WHOLE:
        return tensor.reshape(-1)
    step = tensor.numel() // SAMPLES
    if tensor.is_contiguous():
        return tensor.view(-1)[::step][:SAMPLES]
    indexes = torch.arange(SAMPLES, device=tensor.device) * step
    return tensor[torch.unravel_index(indexes, tensor.shape)]


def summary(known: dict[Key, tuple[str, str]]) -> str:
    """Return one digest over all digests that a rank has computed. If all ranks have the same one, their values are
    equal."""
    hasher = xxhash.xxh3_64()
    for key in sorted(known, key=str):
        hasher.update(f"{key}{known[key]}".encode())
    return hasher.hexdigest()


def compare(answers: list[dict[str, Any]]) -> tuple[list[str], dict[str, str]]:
    """Return texts that describe the values that differ between ranks: a list for objects, and a dict by name for
    tensors. `answers`: one dict for each rank, with rows of (name, offset, kind, digest).
    """
    first: dict[tuple[str, str], tuple[int, str, str]] = {}
    objects: dict[str, str] = {}
    tensors: dict[str, str] = {}
    for rank, answer in enumerate(answers):
        for name, offset, kind, digest in answer["digests"]:
            known = first.setdefault((name, str(offset)), (rank, kind, digest))
            if known[2] != digest:
                (objects if kind == OBJECT else tensors).setdefault(name, f"{name!r} on ranks {known[0]} and {rank}")
    return list(objects.values()), tensors
