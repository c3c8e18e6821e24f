"""Agreement of the ranks before each save: on the step, on the values that each rank writes, and on the number of bytes
of these values. planning.py explains items, archives and plans.

The agreement is one exchange of a few hundred bytes, unless a rank's state has another structure than at the last save.
Every rank decides by itself from the same data of all ranks, so either all ranks continue or all raise an error.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.client.checkpoint.saving.collect import CollectedState, collect, object_bytes
from penstock.client.checkpoint.saving.planning import GlobalPlan, Key, LocalItem, agree, decode_items, encode_items
from penstock.client.checkpoint.saving.ranks import Ranks
from penstock.client.checkpoint.saving.replicas import compare, digests, summary
from penstock.client.checkpoint.values.objects import load_object
from penstock.proto.errors import CheckpointError, InvalidArgumentError
from penstock.proto.tracebacks import warn_user

__all__ = ["AgreedSave", "Agreement"]


_log = logging.getLogger("penstock.checkpoint")


@dataclass(frozen=True)
class AgreedSave:
    """Save on which all ranks have agreed."""

    save: str
    """Random id of the save, hexadecimal, the same on all ranks."""
    plan: GlobalPlan
    lengths: list[dict[Key, int]]
    """Number of bytes of each unframed item (an object, or a tensor that is not plain; see LocalItem.frame), by its
    key: one dict for each rank."""
    collected: CollectedState
    objects: dict[Key, bytes]
    """Bytes of this rank's unframed items, by their keys."""
    in_flight: list[str]
    """Ids of the earlier saves that at least one rank has not finished writing."""


class Agreement:
    """Agreement of the ranks on a plan of what each rank saves. The plan is made at the first save, and made again when
    the structure of the state has changed.

    Args:
        threads: number of threads of a rank that write. Each writes one file.
        hint: prefix of the names of values that go into separate files; None: all values share the files. See `assign`.
        check_replicas: True to compare values that several ranks have under one name, see AsyncCheckpointer.
    """

    def __init__(self, ranks: Ranks, threads: int, hint: str | None, check_replicas: bool) -> None:
        self._ranks = ranks
        self._threads, self._hint = threads, hint
        self._checked = check_replicas and ranks.size > 1
        self._signature: list[Any] | None = None
        self._items: list[LocalItem] = []
        """Items that this rank has. The plan may choose another rank to save an item that several ranks have."""
        self._by_rank: list[list[LocalItem]] = []
        self._plan: GlobalPlan | None = None
        self._warned: set[str] = set()
        self._tried: set[str] = set()
        """Names of objects that were loaded once after they were pickled, to find out whether a restore can load
        them."""

    def agree_on_save(
        self, step: int, folder: Path, state: Mapping[str, Any], earlier: list[CheckpointError], in_flight: list[str]
    ) -> AgreedSave:
        """Agree with the other ranks on a save, and return it.

        Args:
            earlier: errors of this rank's earlier saves that no call has raised yet. The list is emptied when they are
                raised.
            in_flight: ids of the saves that this rank has not finished writing.

        Raises the errors of AsyncCheckpointer.save, on all ranks.
        """
        collected: CollectedState | None = None
        objects: dict[Key, bytes] = {}
        known: dict[Key, tuple[str, str]] = {}

        def part() -> dict[str, Any]:
            nonlocal collected, objects, known
            if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 10**18:
                raise InvalidArgumentError(
                    f"step of save() must be an int from 0 to 10**18 - 1, got {step!r}: pass the number of the "
                    "training step"
                )
            collected = collect(state, self._ranks.rank, self._ranks.size)
            if collected.signature != self._signature:
                self._plan, self._items, self._signature = None, collected.items(), collected.signature
            objects = object_bytes(collected, self._items)
            self._warn_of_opaque(collected, objects)
            if self._checked and self._plan is not None:
                known = digests(collected, self._items, objects, self._plan.shared)
            return {
                "step": step,
                "folder": str(folder),
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

    def _warn_of_opaque(self, collected: CollectedState, objects: dict[Key, bytes]) -> None:
        """Log a warning for each object that restore() loads only with allow_unsafe_types, once for each name."""
        for name, kind in collected.opaque.items():
            if name in self._tried or (name, None) not in objects:
                continue
            self._tried.add(name)
            try:
                load_object(objects[name, None], name, "", unsafe=False)
            except CheckpointError:
                _log.warning(
                    "%r of the state to save contains %s: a restore of this value needs restore(..., "
                    "allow_unsafe_types=True)",
                    name,
                    kind,
                )

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
                "the ranks must have equal values under one name, because a checkpoint keeps one value for each name, "
                f"got different ones: {'; '.join(objects)}. Put the rank into the name, or pass "
                "AsyncCheckpointer(check_replicas=False) to save the value of one rank"
            )
        new = [text for name, text in tensors.items() if name not in self._warned]
        self._warned.update(tensors)
        if new:
            warn_user(
                f"ranks have different values in {len(new)} tensors that they save under one name, and the checkpoint "
                f"keeps the values of one rank: {'; '.join(new[:3])}{' ...' if len(new) > 3 else ''}. Put the rank "
                "into the name of tensors that must differ",
            )


def _check(answers: list[dict[str, Any]]) -> None:
    for what, same, remedy in (
        ("step", "the same step", "Call save() with the same step on all ranks"),
        ("folder", "into the same folder", "Create the AsyncCheckpointer with the same folder on all ranks"),
    ):
        if any(answer[what] != answers[0][what] for answer in answers):
            values = ", ".join(f"rank {rank}: {answer[what]!r}" for rank, answer in enumerate(answers))
            raise InvalidArgumentError(f"all ranks must save {same}, got {values}. {remedy}")
    for key, (_, num_boxes) in (pair for answer in answers for pair in answer["loaders"].items()):
        boxes = sorted(answer["loaders"][key][0] for answer in answers if key in answer["loaders"])
        if num_boxes > 1 and len(answers) > 1 and 0 not in boxes:
            raise InvalidArgumentError(
                f"{key!r} is a loader of {num_boxes} boxes (data-parallel ranks), but the ranks that save it have only "
                f"the boxes {boxes}. Let the rank with box 0 save too, because it fetches the state of all boxes"
            )
