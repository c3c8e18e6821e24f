"""A checkpoint -> the objects of a training job, on as many ranks as it has now.

What is loaded follows from what was saved, and not from what the objects happen to hold: an optimizer that has made no
step has no state to be filled, and a loader's state has other parts than it had. Each rank reads what it needs, by
itself; DTensors take their part of what is there, whoever wrote it.

Reading unpickles nothing but what a checkpoint is made of: torch's index through a list of allowed classes, tensors and
objects by torch.load with weights_only, unless the caller vouches for the files.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Mapping, MutableMapping
from enum import EnumType
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load

from penstock.client.checkpoint.collect import OURS, names_of, unwrapped, with_containers
from penstock.client.checkpoint.loaders import Loader, load_loader, names_for
from penstock.client.checkpoint.torch_private import flatten_state_dict, set_element
from penstock.proto.checkpoints import METADATA, Found, checkpoints, damage, locked, put_back
from penstock.proto.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    InvalidArgumentError,
    PenstockError,
)

__all__ = ["choose", "restore"]

ALLOWED = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
}
"""Module -> classes that torch's index is made of."""

KeyPath = tuple[Any, ...]


def choose(folder: Path, step: int | None, timeout_s: float, verify: bool) -> Found | None:
    """Which checkpoint to restore; see AsyncCheckpointer.restore. Waits for a save that somebody else is making."""
    _settle(folder, timeout_s)
    found = checkpoints(folder)
    if step is None:
        if not found:
            return None
        chosen = found[0]
    else:
        matching = [one for one in found if one.step == step]
        if not matching:
            there = ", ".join(str(one.step) for one in found) or "none"
            raise CheckpointNotFoundError(f"{folder} has no checkpoint of step {step}; it has: {there}")
        chosen = matching[0]
    wrong = chosen.damage
    if not wrong and verify:
        assert chosen.manifest is not None
        wrong = "; ".join(damage(chosen.path, chosen.manifest, contents=True))
    if wrong:
        raise CheckpointCorruptError(f"the checkpoint {chosen.path} is damaged: {wrong}.{_offer(found, chosen)}")
    return chosen


def _settle(folder: Path, timeout_s: float) -> None:
    """Undo what a stopped save left half done, once nobody is saving any more."""
    try:
        with locked(folder, timeout_s):
            put_back(folder)
    except PenstockError:
        raise
    except OSError:
        pass  # no folder yet, or one that can only be read


def _offer(found: list[Found], chosen: Found) -> str:
    good = [one.step for one in found if one is not chosen and not one.damage]
    if not good:
        return " There is no other"
    return f" The newest good one is of step {good[0]}: restore(state, step={good[0]}) goes on from there"


def restore(path: Path, state: Mapping[str, Any], rank: int, allow_unsafe_types: bool) -> None:
    """Load the checkpoint at `path` into `state`; see AsyncCheckpointer.restore."""
    if not isinstance(state, Mapping):
        raise InvalidArgumentError(f"restore into a {type(state).__name__}: give a dict, as for save")
    checkpoint = _Checkpoint(path, allow_unsafe_types)
    entries = [_Entry(key, value, state, checkpoint, rank) for key, value in state.items()]
    values: dict[str, Any] = dict.fromkeys(checkpoint.tables)
    for entry in entries:
        values.update(entry.targets())
    checkpoint.load(values)
    containers = {place: was for name in checkpoint.tables for place, was in values[name].items()}
    for entry in entries:
        try:
            entry.put(values, containers)
        except PenstockError:
            raise
        except Exception as error:
            raise CheckpointError(f"{entry.key!r} of {path} does not fit: {error}") from error


class _Checkpoint:
    """One that is read from."""

    def __init__(self, path: Path, allow_unsafe_types: bool) -> None:
        self.path = path
        self._unsafe = allow_unsafe_types
        self._reader = _Reader(path)
        self.metadata = self._reader.read_metadata()
        paths: dict[str, KeyPath] = dict(self.metadata.planner_data)
        self.tables = [name for name, path in paths.items() if path[0] == OURS]
        """Names of what says how dicts were, by rank."""
        self.paths = {name: path for name, path in paths.items() if path[0] != OURS}

    def under(self, key: str) -> dict[str, KeyPath]:
        """Name -> path behind the key, of all that was saved under it."""
        found = {name: path[1:] for name, path in self.paths.items() if path[0] == key}
        if not found:
            there = ", ".join(sorted({repr(path[0]) for path in self.paths.values()}))
            raise CheckpointError(f"{self.path} holds nothing under {key!r}; it holds {there}")
        return found

    def empty(self, name: str, like: torch.Tensor | None = None) -> Any:
        """What to load `name` into: memory for a tensor, laid out like `like` if of that size; None for an object."""
        saved = self.metadata.state_dict_metadata[name]
        if not isinstance(saved, TensorStorageMetadata):
            return None
        if like is not None and like.shape == saved.size:
            return torch.empty_like(like, dtype=saved.properties.dtype, requires_grad=False)
        return torch.empty(saved.size, dtype=saved.properties.dtype, device="cpu")

    def load(self, values: dict[str, Any]) -> None:
        """Fill tensors, and put objects in the place of what stands for them."""
        try:
            with warnings.catch_warnings():
                # Each rank reads by itself: whether all could is exchanged afterwards.
                warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
                load(values, storage_reader=self._reader, planner=_Planner(self.path, self._unsafe), no_dist=True)
        except CheckpointException as error:  # no Exception: nothing that catches errors would catch it
            causes = [failure[0] for failure in error.failures.values()]
            ours = next((cause for cause in causes if isinstance(cause, PenstockError)), None)
            if ours is not None:
                raise ours from None
            told = "; ".join(f"{type(cause).__name__}: {cause}" for cause in causes)
            raise CheckpointError(f"{self.path} could not be loaded: {told}") from error


class _Entry:
    """One key of the state that is restored."""

    def __init__(self, key: str, value: Any, state: Mapping[str, Any], checkpoint: _Checkpoint, rank: int) -> None:
        self.key = key
        self._value = unwrapped(value)
        self._state = state
        self._checkpoint = checkpoint
        self._saved = checkpoint.under(key)
        if isinstance(value, Loader):
            under = {str(path[0]): name for name, path in self._saved.items()}
            chosen = under[names_for(value, rank, set(under), key)]
            self._saved = {chosen: ()}

    def targets(self) -> dict[str, Any]:
        """Name -> tensor to be filled, or None for an object."""
        value, checkpoint = self._value, self._checkpoint
        if isinstance(value, torch.optim.Optimizer):
            names = names_of(value, self._state)
            tensors = dict(zip(names, (one for group in value.param_groups for one in group["params"]), strict=True))
            self._check_names(set(names))
            return {
                name: checkpoint.empty(name, tensors.get(str(path[1])) if path[0] == "state" and path[1:] else None)
                for name, path in self._saved.items()
            }
        if isinstance(value, Loader):
            return dict.fromkeys(self._saved)
        stateful = hasattr(value, "load_state_dict")
        current, _ = flatten_state_dict({self.key: value.state_dict() if stateful else value})
        if isinstance(value, nn.Module) or not stateful:
            self._check_keys(set(current))
        if not stateful and value != {}:  # an empty dict takes whatever there is
            self._saved = {name: path for name, path in self._saved.items() if name in current}
            self._check_objects(current)
        return {
            name: current[name]
            if isinstance(current.get(name), torch.Tensor) and self._fits(name, current[name])
            else checkpoint.empty(name)
            for name in self._saved
        }

    def _fits(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether to load into the tensor that is there. A module's must fit, and torch says so if it does not."""
        saved = self._checkpoint.metadata.state_dict_metadata[name]
        same = isinstance(saved, TensorStorageMetadata) and saved.size == tensor.shape
        return same or isinstance(self._value, nn.Module) or not hasattr(self._value, "load_state_dict")

    def _check_keys(self, current: set[str]) -> None:
        missing = sorted(current - set(self._saved))
        unexpected = sorted(set(self._saved) - current) if isinstance(self._value, nn.Module) else []
        if missing or unexpected:
            parts = [f"it lacks {_some(missing)}"] if missing else []
            parts += [f"it holds {_some(unexpected)}, which the module does not have"] if unexpected else []
            raise CheckpointError(f"{self.key!r} of {self._checkpoint.path} does not fit: {'; '.join(parts)}")

    def _check_objects(self, current: dict[str, Any]) -> None:
        """A tensor is filled in place, so it must be one that was saved."""
        saved = self._checkpoint.metadata.state_dict_metadata
        wrong = [
            name
            for name in self._saved
            if isinstance(current[name], torch.Tensor) and not isinstance(saved[name], TensorStorageMetadata)
        ]
        if wrong:
            raise CheckpointError(
                f"{self.key!r} of {self._checkpoint.path} does not fit: {_some(wrong)} was saved as an object, and is "
                "a tensor here"
            )

    def _check_names(self, current: set[str]) -> None:
        saved = {str(path[1]) for path in self._saved.values() if path[0] == "state" and len(path) > 1}
        if strange := sorted(saved - current):
            raise CheckpointError(
                f"{self.key!r} of {self._checkpoint.path} holds states of the parameters {_some(strange)}, and the "
                f"optimizer has {_some(sorted(current))}. Parameters go by their module's names if the module is saved "
                "and restored with the optimizer, and else by their numbers"
            )

    def put(self, values: dict[str, Any], containers: dict[str, dict[str, Any]]) -> None:
        """Hand over what was loaded. containers: see `with_containers`."""
        value = self._value
        if isinstance(value, Loader):
            load_loader(value, values[next(iter(self._saved))])
            return
        root: dict[str, Any] = {}
        for name, path in self._saved.items():
            set_element(root, (self.key, *path), values[name])
        loaded = with_containers(root, containers)[self.key]
        if isinstance(value, torch.optim.Optimizer):
            value.load_state_dict(_numbered(loaded, names_of(value, self._state)))
        elif hasattr(value, "load_state_dict"):
            value.load_state_dict(loaded)
        elif isinstance(value, MutableMapping):
            _replace(value, loaded)
        elif isinstance(self._state, MutableMapping):
            self._state[self.key] = loaded


def _replace(target: MutableMapping[str, Any], loaded: Mapping[str, Any]) -> None:
    """Put loaded values in the place of those that are no tensors: these are filled already."""
    for key, value in loaded.items():
        if isinstance(target.get(key), MutableMapping) and isinstance(value, Mapping):
            _replace(target[key], value)
        elif not isinstance(target.get(key), torch.Tensor):
            target[key] = value


def _numbered(loaded: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """An optimizer's state_dict with numbers in the place of names."""
    numbers = {name: number for number, name in enumerate(names)}
    return {
        **loaded,
        "state": {numbers.get(name, name): value for name, value in loaded.get("state", {}).items()},
        "param_groups": [
            {**group, "params": [numbers[name] for name in group["params"]]} for group in loaded["param_groups"]
        ],
    }


def _some(names: list[str]) -> str:
    return ", ".join(repr(name) for name in names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


class _Reader(FileSystemReader):
    """torch's, but for the index, which runs nothing."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        where = Path(self.path) / METADATA
        try:
            with where.open("rb") as file:
                metadata = _Index(file).load()
        except (OSError, EOFError, pickle.UnpicklingError, AttributeError, TypeError, ValueError) as error:
            raise CheckpointCorruptError(f"{where} cannot be read: {error}") from error
        if not isinstance(metadata, Metadata):
            raise CheckpointCorruptError(f"{where} holds a {type(metadata).__name__} and no index")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Index(pickle.Unpickler):
    """Of torch's index, which is a pickle: makes objects of the classes that it is made of, and no others."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member  # by which some versions of Python write the members of an enum
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if name not in ALLOWED.get(module, ()) and not is_dtype:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no index needs")
        return super().find_class(module, name)


def _member(kind: Any, name: Any) -> Any:
    """getattr of anything else would be a way to whatever there is."""
    if not isinstance(kind, EnumType) or name not in kind.__members__:
        raise pickle.UnpicklingError(f"it asks for {name!r} of {kind!r}, which no index needs")
    return kind[name]


class _Planner(DefaultLoadPlanner):
    """torch's, but that objects are loaded without running what is in them."""

    def __init__(self, path: Path, unsafe: bool) -> None:
        super().__init__()
        self._path = path
        self._unsafe = unsafe

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        try:
            loaded = torch.load(value, map_location="cpu", weights_only=not self._unsafe)
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"{name!r} of {self._path} is an object of a class that is not loaded unasked: restore(..., "
                f"allow_unsafe_types=True) does, if nobody else can have written this checkpoint ({error})"
            ) from error
        set_element(self.original_state_dict, self.mappings[name], loaded)
