"""The list of the checkpoints in a bucket, where no folder can be renamed and no file locked.

    s3://BUCKET/RUN/
        step-100-4f2a9c01/          files of the save 4f2a9c01 of step 100, as in a folder (checkpoint_files.py)
        catalog-000000000012.json   the list; the one with the highest number counts

A checkpoint exists if the list has it, so one request commits a save: the next list is written under the next number,
on the condition that this name is free. Whatever the list does not have is left over from a stopped save.

**One job at a time.** A checkpointer's first save writes a list that names it as the owner. From then on a job that
began earlier cannot commit: the number that it takes as free is not, and the list there names another owner. So what an
earlier job has left may be deleted although that job may still run. A list is deleted only after a later one was
written, so an earlier job may find its number free again: readers do not look at that list, and the job then looks
whether the newest list has its save."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from penstock.proto.errors import CheckpointCorruptError
from penstock.proto.state.checkpoint_files import surplus

FORMAT = 1
BEGUN = "begun.json"
"""Object in a save's folder by which rank 0 lets the other ranks begin, and by which a restore sees that it runs."""
FORMER = 1000
_NAME = re.compile(r"catalog-([0-9]{12})\.json")
_FOLDER = re.compile(r"step-(0|[1-9][0-9]{0,18})-([0-9a-f]+)")


def folder_name(step: int, save: str) -> str:
    """Name of the folder with a save's files, in the bucket and on the local disk."""
    return f"step-{step}-{save}"


def save_of(name: str) -> str | None:
    """Return the id of the save whose folder, or file within it, has this name; None for another name."""
    match = _FOLDER.fullmatch(name.partition("/")[0])
    return match[2] if match else None


def catalog_name(number: int) -> str:
    return f"catalog-{number:012}.json"


def catalog_number(name: str) -> int:
    """Return the number of a list's name; -1 for another name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else -1


@dataclass(frozen=True)
class ListedCheckpoint:
    step: int
    save: str
    sequence: int
    """Number of the list that had it first: the larger, the later it was saved."""
    saved_s: int
    """Time of the save in seconds since 1970, by its machine's clock, for people."""

    @property
    def folder(self) -> str:
        return folder_name(self.step, self.save)


@dataclass(frozen=True)
class Catalog:
    number: int = 0
    owner: str = ""
    """Id of the checkpointer that may commit."""
    former: tuple[str, ...] = ()
    """Ids of those that may not any more, the last one first; at most FORMER."""
    checkpoints: tuple[ListedCheckpoint, ...] = ()
    """The newest first."""

    @property
    def name(self) -> str:
        return catalog_name(self.number)

    def claimed(self, owner: str) -> Catalog:
        former = (self.owner, *self.former)[:FORMER] if self.owner else ()
        return replace(self, number=self.number + 1, owner=owner, former=former)

    def with_save(self, step: int, save: str, keep_last: int | None, keep_every: int | None) -> Catalog:
        """Return the next list: with a save, without others of its step, and without surplus ones."""
        new = ListedCheckpoint(step, save, self.number + 1, int(time.time()))
        kept = (new, *(one for one in self.checkpoints if one.step != step))
        gone = surplus([one.step for one in kept], keep_last, keep_every)
        return replace(self, number=new.sequence, checkpoints=tuple(one for one in kept if one.step not in gone))

    def encode(self) -> bytes:
        body = {
            "format": FORMAT,
            "number": self.number,
            "owner": self.owner,
            "former": self.former,
            "checkpoints": [[one.step, one.save, one.sequence, one.saved_s] for one in self.checkpoints],
        }
        return json.dumps(body).encode()

    @classmethod
    def decode(cls, data: bytes, where: str) -> Catalog:
        """`where`: for messages. Raises CheckpointCorruptError for damage or a newer format."""
        try:
            body: dict[str, Any] = json.loads(data)
            if body["format"] > FORMAT:
                raise CheckpointCorruptError(f"{where} is in format {body['format']} of a newer Penstock: upgrade it")
            found = tuple(
                ListedCheckpoint(_count(step), str(save), _count(at), _count(saved_s))
                for step, save, at, saved_s in body["checkpoints"]
            )
            if not all(_FOLDER.fullmatch(one.folder) for one in found):
                raise ValueError("its checkpoints must have steps and hexadecimal ids")
            former = tuple(map(str, body["former"]))
            return cls(_count(body["number"]), str(body["owner"]), former, found)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointCorruptError(
                f"{where} is damaged: {error}. Delete it, so that the list before it counts, if there is one"
            ) from error


def newest_number(names: Iterable[str]) -> int:
    """Return the highest number among the names of lists; -1 if there is none."""
    return max(map(catalog_number, names), default=-1)


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= 10**19:
        raise ValueError(f"it must have whole numbers from 0, got {value!r:.100}")
    return value


def is_bucket(place: str) -> bool:
    return place.startswith("s3://")
