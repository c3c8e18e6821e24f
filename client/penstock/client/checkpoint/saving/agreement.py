"""Agreement of the ranks before each save: on the step, and on the values that each rank writes, with their sizes.

It is one exchange of a few hundred bytes, unless a state has another structure than at the last save. Every rank
decides from the same data of all ranks, so either all continue or all raise an error. Items, archives and plans:
planning.py."""

from __future__ import annotations

import logging
import secrets
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch.distributed.tensor import DTensor

from penstock.client.checkpoint.saving.collect import CollectedState, collect, object_bytes
from penstock.client.checkpoint.saving.planning import GlobalPlan, Key, LocalItem, agree, decode_items, encode_items
from penstock.client.checkpoint.saving.ranks import Ranks
from penstock.client.checkpoint.values.objects import load_object, unknown_classes
from penstock.client.checkpoint.values.plain_values import PLAIN, value_digest
from penstock.client.checkpoint.values.torch_private import find_state_dict_object
from penstock.proto.errors import CheckpointError, InvalidArgumentError
from penstock.proto.tracebacks import warn_user

_log = logging.getLogger("penstock.checkpoint")

SAMPLES = 16
WHOLE = 16 << 10
"""Largest size in bytes of a tensor that is compared whole."""
OBJECT, TENSOR = "object", "tensor"


@dataclass(frozen=True)
class AgreedSave:
    save: str
    plan: GlobalPlan
    lengths: list[dict[Key, int]]
    """Bytes of each unframed item (see LocalItem.frame), one dict for each rank."""
    collected: CollectedState
    objects: dict[Key, bytes]
    in_flight: list[str]
    """Earlier saves that at least one rank has not finished writing."""


class Agreement:
    def __init__(self, ranks: Ranks, threads: int, hint: str | None, check_replicas: bool) -> None:
        self._ranks = ranks
        self._threads, self._hint = threads, hint
        self._checked = check_replicas and ranks.size > 1
        self._signature: list[Any] | None = None
        self._items: list[LocalItem] = []
        self._by_rank: list[list[LocalItem]] = []
        self._plan: GlobalPlan | None = None
        self._warned: set[str] = set()
        self._tried: set[str] = set()
        """Names of objects and tensors that were read once, to find out whether a restore can load them."""

    def agree_on_save(
        self, step: int, folder: str, state: Mapping[str, Any], earlier: list[CheckpointError], in_flight: list[str]
    ) -> AgreedSave:
        """Agree on a save, or raise on all ranks. `earlier`: this rank's unraised errors, emptied when raised."""
        collected: CollectedState | None = None
        objects: dict[Key, bytes] = {}
        known: dict[Key, tuple[str, str]] = {}

        def part() -> dict[str, Any]:
            nonlocal collected, objects, known
            if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 10**18:
                raise InvalidArgumentError(f"step of save() must be an int from 0 to 10**18 - 1, got {step!r}")
            collected = collect(state, self._ranks.rank, self._ranks.size)
            if collected.signature != self._signature:
                self._plan, self._items, self._signature = None, collected.items(), collected.signature
            objects = object_bytes(collected, self._items)
            self._try(collected, objects)
            if self._checked and self._plan is not None:
                known = digests(collected, self._items, objects, self._plan.shared)
            return {
                "step": step,
                "folder": folder,
                "save": secrets.token_hex(4),
                "earlier": [error.message for error in earlier],
                "in_flight": in_flight,
                "loaders": collected.loaders,
                "planned": self._plan is not None,
                "lengths": [len(objects[one.key]) for one in self._items if one.frame is None],
                "replicas": summary(known),
            }

        answers = self._ranks.together("save", f"step {step} was not saved", part)
        assert collected is not None
        if failures := sorted({message for answer in answers for message in answer["earlier"]}):
            earlier.clear()
            raise CheckpointError("; ".join(failures))
        _check(answers)
        if not all(answer["planned"] for answer in answers):
            plan = self._replan(collected)
            if self._checked:
                self._compare(digests(collected, self._items, objects, plan.shared))
        elif self._checked and len({answer["replicas"] for answer in answers}) > 1:
            self._compare(known)
        lengths = [
            dict(zip((one.key for one in items if one.frame is None), answer["lengths"], strict=True))
            for items, answer in zip(self._by_rank, answers, strict=True)
        ]
        assert self._plan is not None
        everywhere = sorted({save for answer in answers for save in answer["in_flight"]})
        return AgreedSave(answers[0]["save"], self._plan, lengths, collected, objects, everywhere)

    def _try(self, collected: CollectedState, objects: dict[Key, bytes]) -> None:
        """Warn of objects that need `allow_unsafe_types`. Raise InvalidArgumentError for a tensor of a class that no
        restore could load."""
        for (name, offset), data in objects.items():
            if name in self._tried or (offset is None and name not in collected.opaque):
                continue
            if offset is not None and (classes := unknown_classes(data)):
                raise InvalidArgumentError(
                    f"{name!r} of the state to save is a tensor of a class that torch.load does not know, "
                    f"{', '.join(classes)}: pass it to torch.serialization.add_safe_globals, here and before a restore"
                )
            self._tried.add(name)
            if offset is not None:
                continue
            try:
                load_object(data, name, "", unsafe=False)
            except CheckpointError:
                kind = collected.opaque[name]
                _log.warning("%r of the state contains %s: it needs restore(..., allow_unsafe_types=True)", name, kind)

    def _replan(self, collected: CollectedState) -> GlobalPlan:
        self._plan = None
        by_rank = [(self._items, collected.paths)]
        if self._ranks.size > 1:
            described = self._ranks.exchange(encode_items(self._items, collected.paths))
            by_rank = [decode_items(value) for value in described]
        self._plan = agree(by_rank, self._threads, self._hint)
        self._by_rank = [items for items, _ in by_rank]
        return self._plan

    def _compare(self, known: dict[Key, tuple[str, str]]) -> None:
        objects, tensors = compare(self._ranks.exchange({"digests": [[*key, *one] for key, one in known.items()]}))
        if objects:
            raise CheckpointError(
                "the ranks must have equal values under one name, of which a checkpoint keeps one, got different ones: "
                f"{'; '.join(objects)}. Put the rank into the name, or pass check_replicas=False"
            )
        new = [text for name, text in tensors.items() if name not in self._warned]
        self._warned.update(tensors)
        if new:
            warn_user(
                f"ranks have different values in {len(new)} tensors under one name, of which the checkpoint keeps one: "
                f"{'; '.join(new[:3])}{' ...' if len(new) > 3 else ''}. Put the rank into the name",
            )


def _check(answers: list[dict[str, Any]]) -> None:
    for what in ("step", "folder"):
        if any(answer[what] != answers[0][what] for answer in answers):
            values = ", ".join(f"rank {rank}: {answer[what]!r}" for rank, answer in enumerate(answers))
            raise InvalidArgumentError(f"all ranks must save with the same {what}, got {values}")
    for key, (_, num_boxes) in (pair for answer in answers for pair in answer["loaders"].items()):
        boxes = sorted(answer["loaders"][key][0] for answer in answers if key in answer["loaders"])
        if num_boxes > 1 and len(answers) > 1 and 0 not in boxes:
            raise InvalidArgumentError(
                f"{key!r} is a loader of {num_boxes} boxes, which box 0 saves for all, got only the boxes {boxes}"
            )


# ---- values that several ranks have under one name
#
# torch.distributed.checkpoint assumes that such values are equal and keeps the copy of any rank, so a random state or a
# counter that differs by rank is lost silently. Here objects are compared whole, by value, and so are small tensors,
# such as a generator's state. Of larger tensors 16 values are compared, spread over the tensor: weights that have
# drifted apart differ nearly everywhere, and a comparison of all values would take as long as a save.


def digests(
    collected: CollectedState, items: Sequence[LocalItem], objects: dict[Key, bytes], shared: dict[Key, list[int]]
) -> dict[Key, tuple[str, str]]:
    """Return (kind, digest) of each item of this rank that other ranks have too."""
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
    """Digest an object's value, not its pickle, which differs between equal values with one str object or two."""
    name = one.name
    value = collected.values.get(name)
    if isinstance(value, torch.Tensor) or type(value) in PLAIN:
        return xxhash.xxh3_64_hexdigest(objects[one.key])
    return value_digest((value, collected.recipes.get(name)))


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Return all, or `SAMPLES`, values, flat, in the order of indices, not strides: the same for equal tensors."""
    if tensor.nbytes <= WHOLE:
        return tensor.reshape(-1)
    step = tensor.numel() // SAMPLES
    if tensor.is_contiguous():
        return tensor.view(-1)[::step][:SAMPLES]
    indexes = torch.arange(SAMPLES, device=tensor.device) * step
    return tensor[torch.unravel_index(indexes, tensor.shape)]


def summary(known: dict[Key, tuple[str, str]]) -> str:
    hasher = xxhash.xxh3_64()
    for key in sorted(known, key=str):
        hasher.update(f"{key}{known[key]}".encode())
    return hasher.hexdigest()


def compare(answers: list[dict[str, Any]]) -> tuple[list[str], dict[str, str]]:
    """Return texts for the values that differ between ranks: a list for objects, a dict by name for tensors."""
    first: dict[tuple[str, str], tuple[int, str, str]] = {}
    objects: dict[str, str] = {}
    tensors: dict[str, str] = {}
    for rank, answer in enumerate(answers):
        for name, offset, kind, digest in answer["digests"]:
            known = first.setdefault((name, str(offset)), (rank, kind, digest))
            if known[2] != digest:
                (objects if kind == OBJECT else tensors).setdefault(name, f"{name!r} on ranks {known[0]} and {rank}")
    return list(objects.values()), tensors
