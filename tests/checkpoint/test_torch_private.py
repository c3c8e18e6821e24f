"""Private parts of torch that are used behave as expected."""

from __future__ import annotations

import inspect
import io
import zipfile

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.utils.serialization import config

from penstock.client.checkpoint.values import torch_private
from penstock.client.checkpoint.values.torch_frames import ALIGNMENT, frame_of, saved_bytes


def names(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)  # type: ignore[arg-type]


def test_functions_take_what_we_give_them() -> None:
    assert names(torch_private.flatten_state_dict) == ["state_dict"]
    assert names(torch_private.set_element) == ["root_dict", "path", "value"]
    assert names(torch_private.find_state_dict_object) == ["state_dict", "index"]
    assert names(torch_private.write_item) == [
        *("transforms", "stream", "data", "write_item", "storage_key", "serialization_format")
    ]
    assert names(torch_private.StorageInfo)[:3] == ["relative_path", "offset", "length"]
    assert SerializationFormat.TORCH_SAVE.value == "torch_save"


def test_classes_hold_what_we_read() -> None:
    assert names(WriteItem)[:4] == ["index", "type", "bytes_io_data", "tensor_data"]
    assert {kind.name for kind in WriteItemType} == {"TENSOR", "SHARD", "BYTE_IO"}
    assert names(MetadataIndex)[:3] == ["fqn", "offset", "index"]
    assert {"items", "storage_data", "planner_data"} <= set(names(SavePlan))
    assert {"state_dict_metadata", "planner_data", "storage_data", "storage_meta"} <= set(names(Metadata))
    StorageMeta()  # needs nothing
    found = set(vars(FileSystemWriter("unused")))
    assert {"transforms", "sync_files"} <= found
    assert "use_collectives" not in found or "rank" in found  # torch 2.9 and newer


def test_flattening_names_and_paths() -> None:
    values, paths = torch_private.flatten_state_dict({"a": {"b.c": 1, "l": [{"x": 2}, 3], "m": [4, 5], "e": {}}})
    assert values == {"a.b.c": 1, "a.l.0.x": 2, "a.l.1": 3, "a.m": [4, 5]}
    assert paths["a.l.0.x"] == ("a", "l", 0, "x")
    root: dict[str, object] = {}
    for name, path in paths.items():
        torch_private.set_element(root, path, values[name])
    assert root == {"a": {"b.c": 1, "l": [{"x": 2}, 3], "m": [4, 5]}}


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.int64, torch.bool]


@given(st.sampled_from(DTYPES), st.lists(st.integers(0, 7), max_size=4))
def test_frames_and_values_equal_torch_save(dtype: torch.dtype, shape: list[int]) -> None:
    """Bytes are equal except the CRC32, which torch.load ignores; values lie where torch puts them."""
    tensor = torch.randint(0, 2, shape).to(dtype)
    frame = frame_of(dtype, tuple(shape))
    values = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    assert frame.nbytes == len(values)
    data = frame.before + values + frame.behind
    assert frame.length == len(data)
    assert not values or len(frame.before) % ALIGNMENT == 0
    assert torch.equal(torch.load(io.BytesIO(data), weights_only=True), tensor)
    ours, theirs = (zipfile.ZipFile(io.BytesIO(one)).infolist() for one in (data, saved_bytes(tensor)))
    assert [(one.filename, one.file_size, one.header_offset) for one in ours] == [
        (one.filename, one.file_size, one.header_offset) for one in theirs
    ]
    assert {one.CRC for one in ours} == {0}


def test_torchs_setting_for_crc32_is_as_it_was() -> None:
    assert config.save.compute_crc32 is True
    with torch_private.without_crc32():
        assert config.save.compute_crc32 is False
    assert config.save.compute_crc32 is True
