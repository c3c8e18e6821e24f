"""A whole checkpoint, without the objects of a training job: for `penstock checkpoint show` and `export`."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

from penstock.client.checkpoint.restoring.index import SavedValue
from penstock.client.checkpoint.restoring.places import PinnedCheckpoint, Place
from penstock.client.checkpoint.restoring.restore import load, read_saved_index
from penstock.client.checkpoint.saving.collect import OURS
from penstock.client.checkpoint.values.loader_states import LENGTH, SHARED
from penstock.proto.errors import CheckpointNotFoundError
from penstock.proto.state.codec import decode_state
from penstock.proto.state.envelope import MAGIC

THREADS = 4


class ListedValue(NamedTuple):
    name: str
    dtype: str
    """"object" for what is no tensor."""
    shape: list[int] | None
    nbytes: int


def list_values(place: Place, path: str) -> list[ListedValue]:
    """`path`: address of a checkpoint in that place."""
    return [_listed(name, value) for name, value in _index(place, path).items()]


def read_state(place: Place, path: str, key: str | None = None) -> dict[str, Any]:
    """Return the nested state as it was saved, with all tensors on the CPU. The states of data loaders are those of
    `DataLoader.state_dict`, or one of them for each rank. `key`: read only what was saved under this name."""
    index = _index(place, path)
    keys = {str(value.path[0]): None for value in index.values()}
    if key is not None and key not in keys:
        raise CheckpointNotFoundError(f"{path} has no value {key!r}; its values are {', '.join(map(repr, keys))}")
    state: dict[str, Any] = {name: None for name in keys if key in (None, name)}
    with place.open(path) as (_, manifest), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* knows parameters by their order")  # advice for a training job
        pinned = PinnedCheckpoint(manifest.step, path, manifest.save)
        loaded = load(place, pinned, state, 0, THREADS, allow_unsafe_types=False)
    if loaded is None:
        raise CheckpointNotFoundError(f"{path} was deleted or replaced meanwhile: name it again")
    loaded.put(keep=False)
    return {name: _loader_state(value) for name, value in state.items()}


def _index(place: Place, path: str) -> dict[str, SavedValue]:
    with place.open(path) as (source, manifest):
        index = read_saved_index(source, path, {file.name: file for file in manifest.files})
    return {name: value for name, value in index.items() if value.path[0] != OURS}


def _listed(name: str, value: SavedValue) -> ListedValue:
    if value.tensor is None:
        return ListedValue(name, "object", None, sum(archive.length for archive in value.archives))
    dtype, size = value.tensor.properties.dtype, value.tensor.size
    return ListedValue(name, str(dtype).removeprefix("torch."), list(size), size.numel() * dtype.itemsize)


def _loader_state(value: Any) -> Any:
    """Return what `DataLoader.state_dict` returned at the save, or that of each rank by its key, for the value under a
    loader's key; another value as it is."""
    if not isinstance(value, dict) or not value:
        return value
    states = {rank: _unpadded(data) for rank, data in value.items() if type(data) is bytes}
    if len(states) < len(value) or not all(data.startswith(MAGIC) for data in states.values()):
        return value
    decoded = {rank: decode_state(data) for rank, data in states.items()}
    return decoded.get(SHARED, decoded)


def _unpadded(data: bytes) -> bytes:
    return data[LENGTH:][: int.from_bytes(data[:LENGTH])]
