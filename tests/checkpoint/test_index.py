"""torch's index, made without torch of what the training process described: is it what torch would have written?"""

from __future__ import annotations

import io
import json
import pickle
import pickletools
from typing import Any

import torch
from hypothesis import given, settings
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

from penstock.client.checkpoint.restoring import metadata_reader
from penstock.client.checkpoint.restoring.index import read_index
from penstock.client.checkpoint.saving.collect import collect
from penstock.client.checkpoint.saving.planning import described
from penstock.client.checkpoint.values.torch_private import StorageInfo, flatten_state_dict
from penstock.proto.state.checkpoint_index import IndexPickle

NAMES = st.text(st.characters(exclude_categories=()), max_size=8)
PATHS = st.lists(NAMES | st.integers(-(1 << 70), 1 << 70), min_size=1, max_size=5).map(tuple)
NUMBERS = st.integers(0, 300) | st.integers(0, 1 << 60)
SHAPES = st.lists(st.integers(1, 300), max_size=3)
FILES = ["a", "b"]

Index = tuple[Metadata, dict[str, list[Any]]]


@st.composite
def tensors(draw: st.DrawFn) -> TensorStorageMetadata:
    dtype, shape = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64])), draw(SHAPES)
    properties, begin = TensorProperties(dtype=dtype, requires_grad=draw(st.booleans())), [0] * len(shape)
    chunks = [(begin, shape)]
    if shape and shape[0] > 1:
        cut = draw(st.integers(1, shape[0] - 1))
        chunks = [(begin, [cut, *shape[1:]]), ([cut, *begin[1:]], [shape[0] - cut, *shape[1:]])]
    found = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in chunks]
    return TensorStorageMetadata(properties, torch.Size(shape), found)


@st.composite
def indexes(draw: st.DrawFn) -> Index:
    names = draw(st.lists(NAMES, unique=True, max_size=12))
    kinds = [BytesStorageMetadata(), *draw(st.lists(tensors(), max_size=4))]  # several values have one kind
    metadata = index_of({name: draw(st.sampled_from(kinds)) for name in names}, {name: draw(PATHS) for name in names})
    files: dict[str, list[Any]] = {file: [] for file in FILES}
    for name, kind in metadata.state_dict_metadata.items():
        places = list(enumerate(chunk.offsets for chunk in kind.chunks)) if hasattr(kind, "chunks") else [(None, None)]
        for number, offset in places:
            file, begin, length = draw(st.sampled_from(FILES)), draw(NUMBERS), draw(NUMBERS)
            files[file].append(((name, offset), number, begin, length))
            metadata.storage_data[MetadataIndex(name, offset, number)] = StorageInfo(file, begin, length)
    return metadata, files


def index_of(stored: dict[str, Any], paths: dict[str, Any]) -> Metadata:
    metadata = Metadata(stored, paths, {}, StorageMeta())
    metadata.version = "1.0.0"  # no parameter of torch 2.8
    return metadata


@settings(max_examples=40)
@given(indexes())
def test_the_writers_index_is_torchs(made: Index) -> None:
    metadata, files = made
    _, data = IndexPickle.files(described(metadata, files.items()))
    pickletools.dis(data, io.StringIO())  # memo and stack are right all the way
    found = pickle.loads(data)
    assert found == metadata
    hints = {key: key.index for key in metadata.storage_data}
    assert {key: key.index for key in found.storage_data} == hints
    assert all(type(key.offset) in (torch.Size, type(None)) for key in found.storage_data)


@settings(max_examples=30)
@given(indexes())
def test_both_indexes_are_read_alike(made: Index) -> None:
    metadata, files = made
    ours, torchs = IndexPickle.files(described(metadata, files.items()))
    converted = json.dumps(metadata_reader.index_of(metadata_reader.Reader(io.BytesIO(torchs)).load())).encode()
    values, again = (read_index(data, "x", dict.fromkeys(FILES, 1 << 62)) for data in (ours, converted))
    assert list(values.items()) == list(again.items())
    assert list(values) == list(metadata.state_dict_metadata)
    for name, (tensor, path, archives) in values.items():
        known: Any = metadata.state_dict_metadata[name]
        assert path == metadata.planner_data[name]
        assert (tensor is None) == isinstance(known, BytesStorageMetadata)
        if tensor is not None:
            assert (tensor.size, tensor.chunks) == (known.size, known.chunks)
            assert tensor.properties.dtype == known.properties.dtype
        offsets = [chunk.offsets for chunk in tensor.chunks] if tensor else [None]
        for archive, offset in zip(archives, offsets, strict=True):
            info = metadata.storage_data[MetadataIndex(name, offset)]
            assert archive[1:] == (info.relative_path, info.offset, info.length)


TREES = st.recursive(
    st.integers() | st.builds(torch.zeros, st.just(2)) | st.tuples(st.integers()),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", min_size=1, max_size=2), inner, max_size=3)
    ),
    max_leaves=12,
)


@settings(max_examples=50)
@given(st.dictionaries(st.text("ab", min_size=1, max_size=2), TREES, max_size=4))
def test_names_are_those_of_torchs_flattening(state: dict[str, Any]) -> None:
    values, paths = flatten_state_dict(state)
    found = collect(state, 0, 1)
    ours = {name for name in found.values if name.startswith("__penstock__")}
    empty = {name for name, value in found.values.items() if value == {} and name not in values}
    assert list(values) == [name for name in found.values if name not in ours | empty]
    assert all(found.paths[name] == path for name, path in paths.items())
