"""Private parts of torch that are used behave as expected."""

from __future__ import annotations

import io
import zipfile

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.serialization import config

from penstock.client.checkpoint.values import torch_private
from penstock.client.checkpoint.values.torch_frames import ALIGNMENT, frame_of, saved_bytes

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
