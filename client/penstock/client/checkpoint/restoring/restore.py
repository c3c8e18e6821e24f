"""Restore of a checkpoint into the objects of a training job, on any number of ranks.

What was saved decides what is loaded, not the present state: an optimizer that has made no step has no state yet. All
values are read, hashed and compared before any is loaded, so a checkpoint that is damaged or deleted meanwhile leaves
all objects unchanged. torch.load runs with weights_only, unless the caller trusts the files (objects.py)."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from penstock.client.checkpoint.restoring.entries import RestoreContext, SavedEntries, StateEntry, entry_for
from penstock.client.checkpoint.restoring.index import SavedValue, converted, read_index
from penstock.client.checkpoint.restoring.places import PinnedCheckpoint, Place
from penstock.client.checkpoint.restoring.reading import FillRequest, read
from penstock.client.checkpoint.restoring.sources import Source
from penstock.client.checkpoint.saving.collect import OPTIMIZERS, OURS, RECIPES, VERSIONS
from penstock.client.checkpoint.values.objects import load_object
from penstock.client.checkpoint.values.plain_values import decode
from penstock.proto.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    InvalidArgumentError,
)
from penstock.proto.state.checkpoint_files import INDEX, METADATA, CheckpointFile, Manifest

_log = logging.getLogger("penstock.checkpoint")

TRIES = 20
"""Attempts to choose a checkpoint: another process may delete it before it is pinned."""


@contextmanager
def chosen(place: Place, step: int | None, verify: bool) -> Iterator[PinnedCheckpoint | None]:
    """Choose the checkpoint to restore, pinned in the `with`; wait for a save that another process is making."""
    place.settle()
    for turn in range(TRIES):
        found = place.choose(step)
        if found is None:
            yield None
            return
        try:
            with place.open(found.address) as (source, manifest):
                if verify and (wrong := "; ".join(source.damage(manifest, contents=True))):
                    raise place.damaged(found.address, wrong)
                yield found._replace(save=manifest.save)
                return
        except CheckpointNotFoundError:
            if turn == TRIES - 1:
                raise


def _saved_by(value: SavedValue) -> int:
    return int(value.archives[0].file.rpartition("__")[2].partition("_")[0])


@dataclass
class LoadedCheckpoint:
    """Values that were read and checked, in the order in which they are loaded: code of the user's, which may raise,
    after all other, and what cannot be undone last."""

    _entries: list[StateEntry]
    _fills: list[FillRequest]

    def __post_init__(self) -> None:
        self._entries.sort(key=lambda entry: (entry.comes_last, entry.can_raise))
        self._is_held = False

    @property
    def can_raise(self) -> bool:
        return any(entry.can_raise for entry in self._entries)

    def hold(self) -> None:
        """Keep what the values have now for `undo`, if that is not kept yet."""
        if not self._is_held:
            self._is_held = True
            for entry in self._entries:
                if not entry.comes_last:
                    with entry.named_errors():
                        entry.hold()

    def put(self, *, keep: bool) -> None:
        """Load the values, but not those that cannot be undone. `keep`: keep what they replace for `undo`."""
        if keep:
            self.hold()
        FillRequest.all_of(self._fills, keep=keep)
        for entry in self._entries:
            if not entry.comes_last:
                with entry.named_errors():
                    entry.put()

    def finish(self) -> None:
        for entry in self._entries:
            if entry.comes_last:
                entry.put()

    def undo(self) -> None:
        """Give all values back what they had before `put`, also if a signal's handler raises meanwhile. The keys of
        those whose own code refuses that are logged."""
        FillRequest.undo(self._fills)
        for entry in reversed(self._entries):
            try:
                entry.undo()
            except BaseException:
                _log.warning("%r refuses the state that it had before the restore: make it anew", entry.key)


def load(
    place: Place, found: PinnedCheckpoint, state: Mapping[str, Any], rank: int, threads: int, allow_unsafe_types: bool
) -> LoadedCheckpoint | None:
    """Read and check the values for `state`. Return None if the checkpoint is gone, or another save replaced it."""
    if not isinstance(state, Mapping):
        raise InvalidArgumentError(
            f'restore: state must be a dict of names and values, such as {{"model": model}}, got {type(state).__name__}'
        )
    try:
        with place.open(found.address) as (source, manifest):
            if manifest.save != found.save:
                return None
            return _load(source, found.address, manifest, state, rank, threads, allow_unsafe_types)
    except CheckpointNotFoundError:
        return None
    except CheckpointCorruptError as error:
        raise place.damaged(found.address, error.message) from error


def _load(
    source: Source,
    path: str,
    manifest: Manifest,
    state: Mapping[str, Any],
    rank: int,
    threads: int,
    unsafe: bool,
) -> LoadedCheckpoint:
    files = {file.name: file for file in manifest.files}
    index = read_saved_index(source, path, files)
    tables = [name for name, value in index.items() if value.path[0] == OURS]
    saved = SavedEntries(path, index, {name: one.path for name, one in index.items() if one.path[0] != OURS})
    entries = [entry_for(key, value, state, saved, rank) for key, value in state.items()]
    wanted = {name: saved.empty(name) for name in tables}
    for entry in entries:
        wanted.update(entry.wanted())

    def as_object(name: str, value: bytes) -> Any:
        return load_object(value, name, path, unsafe=unsafe)

    values, fills = read(source, files, index, wanted, as_object, threads)
    around = RestoreContext()
    for table in tables:
        kind, _, number = str(index[table].path[1]).rpartition("-")
        if kind == RECIPES:
            own = {name for name in values[table] if name in values and _saved_by(index[name]) == int(number)}
            values.update({name: _decoded(name, values[name], values[table][name]) for name in own})
        elif kind == OPTIMIZERS:
            for key, noted in values[table].items():
                around.shared.setdefault(key, []).extend(noted.get("shared", ()))
        elif kind == VERSIONS:
            around.versions.update(values[table])
        else:
            around.containers.update(values[table])
    for entry in sorted(entries, key=lambda one: not one.comes_first):
        with entry.named_errors():
            entry.fit(values, around)
    return LoadedCheckpoint(entries, fills)


def _decoded(name: str, value: Any, recipe: Any) -> Any:
    try:
        return decode(value, recipe)
    except CheckpointError as error:
        raise CheckpointError(f"{name!r}: {error.message}") from None


def read_saved_index(source: Source, path: str, files: Mapping[str, CheckpointFile]) -> dict[str, SavedValue]:
    name = INDEX if INDEX in files else METADATA  # torch, and an earlier Penstock, wrote no other
    if name not in files:
        raise CheckpointCorruptError(f"the checkpoint's manifest must list its index {INDEX}, got a list without it")
    data, where = source.read_file(files[name]), f"{path}/{name}"
    index = data if name == INDEX else converted(data, where)
    return read_index(index, where, {file.name: file.nbytes for file in files.values()})
