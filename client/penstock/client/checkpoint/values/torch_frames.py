"""Frames of torch.save around a tensor: the bytes before its values and after them.

torch.distributed.checkpoint stores each tensor as a separate zip archive. Archives of one dtype and shape differ only
in the values, so torch.save runs once, and later tensors' values are copied into the kept frame. Frames have no CRC32:
torch.load ignores it, and it took 0.45 s for 1 GiB. The manifest's checksums take 0.13 s outside the training
process."""

from __future__ import annotations

import io
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from penstock.client.checkpoint.values.torch_private import without_crc32
from penstock.proto.errors import CheckpointError

ALIGNMENT = 64
"""Alignment in bytes of values in torch.save's archives, and of archives in Penstock's files."""


@dataclass(frozen=True)
class TorchFrame:
    before: bytes
    nbytes: int
    behind: bytes

    @property
    def length(self) -> int:
        return len(self.before) + self.nbytes + len(self.behind)


def is_plain(tensor: torch.Tensor) -> bool:
    """True if what torch.save writes depends only on values, dtype and shape, so that the tensor has a frame."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_meta
    )


@lru_cache(maxsize=65536)
def frame_of(dtype: torch.dtype, shape: tuple[int, ...]) -> TorchFrame:
    tensor = torch.empty(shape, dtype=dtype, device="cpu")  # uninitialised memory, whose values are never read
    recorder = _Recorder(tensor)
    with without_crc32():
        torch.save(tensor, recorder)  # type: ignore[arg-type]
    before, behind = recorder.parts
    if len(before) % ALIGNMENT and tensor.nbytes:
        raise CheckpointError(
            f"this torch ({torch.__version__}) saves tensor values at byte {len(before)}: use a supported version"
        )
    return TorchFrame(bytes(before), tensor.nbytes, bytes(behind))


def compact(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the CPU without the rest of a storage that it views, which torch.save would write too."""
    tensor = tensor.detach().cpu()
    is_view = tensor.layout is torch.strided and tensor.untyped_storage().nbytes() != tensor.nbytes
    return tensor.clone() if is_view else tensor


def saved_bytes(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


class _Recorder:
    """File object for torch.save. `parts`: the bytes before and after the values of `tensor`."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._values = (tensor.data_ptr(), tensor.nbytes)
        self.parts = [bytearray()]

    def write(self, data: memoryview) -> int:
        nbytes = len(data)
        if nbytes and (_address(data), nbytes) == self._values:
            self.parts.append(bytearray())
        else:
            self.parts[-1] += data
        return nbytes

    def flush(self) -> None:
        if not self._values[1] and len(self.parts) == 1:
            self.parts.append(bytearray())  # the tensor has no values: everything comes before them


def _address(data: memoryview) -> int:
    return int(np.frombuffer(data, np.uint8).ctypes.data)
