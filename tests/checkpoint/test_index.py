"""torch's index, made without torch of what the training process described: is it what torch would have written?"""

from __future__ import annotations

import io
import pickle
import pickletools
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from penstock.client.checkpoint.saving.collect import collect
from penstock.client.checkpoint.saving.index_description import described
from penstock.client.checkpoint.values.pickles import bounded
from penstock.client.checkpoint.values.torch_private import StorageInfo, flatten_state_dict
from penstock.proto.state.checkpoint_index import DescribedIndex

NAMES = st.text(st.characters(exclude_categories=()), max_size=8)
PATHS = st.lists(NAMES | st.integers(-(1 << 70), 1 << 70), min_size=1, max_size=5).map(tuple)
NUMBERS = st.integers(0, 300) | st.integers(0, 1 << 60)
PARTS = st.lists(st.integers(0, 5), max_size=3)


@st.composite
def saved(draw: st.DrawFn, shared: dict[Any, Any]) -> tuple[Any, Any, Any]:
    """Draw a value saved under a name, and offset and hint of its one entry. shared: what others of the index may be
    too."""
    if draw(st.booleans()):
        return shared.setdefault("object", BytesStorageMetadata()), None, draw(st.none() | st.integers(0, 3))
    dtype, sizes = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64])), draw(PARTS)
    properties = TensorProperties(dtype=dtype, requires_grad=draw(st.booleans()))
    offset, size = torch.Size([0] * len(sizes)), torch.Size(sizes)
    stored = TensorStorageMetadata(properties, size, [ChunkStorageMetadata(offset, size)] * draw(st.integers(1, 2)))
    if draw(st.booleans()):
        stored = shared.setdefault((dtype, size), stored)
    return stored, offset, draw(st.none() | st.integers(0, 300))


def index_of(stored: dict[str, Any], paths: dict[str, Any]) -> Metadata:
    metadata = Metadata(stored, paths, {}, StorageMeta())
    metadata.version = "1.0.0"  # as the writer does: it is no parameter of torch 2.8
    return metadata


@st.composite
def indexes(draw: st.DrawFn) -> tuple[Metadata, dict[str, list[Any]]]:
    names = draw(st.lists(NAMES, unique=True, max_size=12))
    shared: dict[Any, Any] = {}
    metadata = index_of({}, {})
    files: dict[str, list[Any]] = {"a": [], "b": []}
    for name in names:
        stored, offset, hint = draw(saved(shared))
        metadata.state_dict_metadata[name], metadata.planner_data[name] = stored, draw(PATHS)
        file, begin, length = draw(st.sampled_from(["a", "b"])), draw(NUMBERS), draw(NUMBERS)
        files[file].append(((name, offset), hint, begin, length))
    for file, entries in files.items():
        for key, hint, begin, length in entries:
            metadata.storage_data[MetadataIndex(key[0], key[1], hint)] = StorageInfo(file, begin, length)
    return metadata, files


@given(indexes())
def test_the_writers_index_is_torchs(made: tuple[Metadata, dict[str, list[Any]]]) -> None:
    metadata, files = made
    data = DescribedIndex.decode(described(metadata, files.items())).pickle()
    pickletools.dis(bounded(data), io.StringIO())  # memo and stack are right all the way
    found = pickle.loads(data)
    assert found == metadata
    assert list(found.storage_data) == list(metadata.storage_data)
    assert [vars(key) for key in found.storage_data] == [vars(key) for key in metadata.storage_data]
    assert all(type(key.offset) in (torch.Size, type(None)) for key in found.storage_data)


def test_names_of_every_length() -> None:
    names = ["x" * length for length in (0, 1, 255, 256, 70_000)]
    stored = BytesStorageMetadata()
    metadata = index_of(dict.fromkeys(names, stored), {name: (name,) for name in names})
    data = DescribedIndex.decode(described(metadata, [])).pickle()
    assert pickle.loads(data) == metadata


TREES = st.recursive(
    st.integers() | st.builds(torch.zeros, st.just(2)) | st.tuples(st.integers()),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", min_size=1, max_size=2), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.text("ab", min_size=1, max_size=2), TREES, max_size=4))
def test_names_are_those_of_torchs_flattening(state: dict[str, Any]) -> None:
    values, paths = flatten_state_dict(state)
    found = collect(state, 0, 1)
    ours = {name for name in found.values if name.startswith("__penstock__")}
    empty = {name for name, value in found.values.items() if value == {} and name not in values}
    assert list(values) == [name for name in found.values if name not in ours | empty]
    assert all(found.paths[name] == path for name, path in paths.items())
