"""Datasets of the benchmark of streaming datasets, and the work done with each sample, the same for all readers.

The values of a sample follow from its number, so that each library writes the same values in its own format. The module
runs in the Python environments of other libraries (peers) too, so it imports numpy, torch and Pillow only.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from typing import Any

import numpy as np
import torch
from PIL import Image

__all__ = ["BATCH", "KINDS", "TINY", "Kind", "collate", "look_at", "value_checksum"]

BATCH = 32
"""Number of samples of a batch."""


@dataclass(frozen=True)
class Kind:
    """Kind of dataset: size, number and content of its samples. `column`: name of the column with a sample's value;
    another column has the sample's number."""

    name: str
    column: str
    encoding: str
    samples: int
    nbytes: int
    """Approximate size of a sample's value in bytes."""
    shard_bytes: int
    value: Callable[[int], Any]

    @property
    def columns(self) -> dict[str, str]:
        """MDS encoding of each column, by the column's name."""
        return {"number": "int", **({self.column: self.encoding} if self.column else {})}

    def sample(self, number: int) -> dict[str, Any]:
        return {"number": number, **({self.column: self.value(number)} if self.column else {})}

    def fewer(self, times: int) -> Kind:
        """Return the same kind with `times` times fewer samples, for a short run."""
        return Kind(**{**vars(self), "samples": max(2 * BATCH, self.samples // times)})


_NOISE = np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8).tobytes()


def _noise(size: int) -> Callable[[int], bytes]:
    def value(number: int) -> bytes:
        begin = number * 7919 % (len(_NOISE) - size)
        return _NOISE[begin : begin + size]

    return value


def _tokens(number: int) -> Any:
    return np.frombuffer(_noise(4 * 2049)(number), np.int32)


def _image(number: int, size: int = 64) -> Any:
    """Return the image of a sample, read from a JPEG in memory. The image is smooth, because noise takes three times as
    long to decode as a photograph."""
    small = np.random.default_rng(number).integers(0, 256, (size // 8, size // 8, 3), np.uint8)
    out = BytesIO()
    Image.fromarray(small).resize((size, size), Image.Resampling.BICUBIC).save(out, "JPEG")
    return Image.open(out)


KINDS = {
    kind.name: kind
    for kind in (
        Kind("1 KiB", "data", "bytes", 50_000, 1 << 10, 16 << 20, _noise(1 << 10)),
        Kind("64 KiB", "data", "bytes", 2_000, 64 << 10, 16 << 20, _noise(64 << 10)),
        Kind("tokens", "tokens", "ndarray:int32:2049", 16_000, 4 * 2049, 16 << 20, _tokens),
        Kind("JPEG", "image", "jpeg", 8_000, 1_200, 1 << 20, _image),
        Kind("JPEG of 256", "image", "jpeg", 2_000, 9_000, 16 << 20, partial(_image, size=256)),
        # Read from a server: 50 shards.
        Kind("cold", "data", "bytes", 50_000, 1 << 10, 1 << 20, _noise(1 << 10)),
    )
}

TINY = Kind("tiny", "", "", 1_000_000, 8, 4 + 4 * 1001 + 8 * 1000 + 400, lambda number: number)
"""Dataset of 1,000 shards with about 1,000 samples each, in which epochs are resumed to measure a start."""


def look_at(sample: dict[str, Any]) -> None:
    """Read the pixels of a sample's image, which decodes the image. All other values are decoded already."""
    np.asarray(sample["image"])


def collate(samples: list[dict[str, Any]]) -> Any:
    """Collate samples to a batch. Images are converted to arrays first, because torch's own function does not accept
    them."""
    pixels = torch.from_numpy(np.stack([np.asarray(sample["image"]) for sample in samples]))
    return {"number": torch.tensor([sample["number"] for sample in samples]), "image": pixels}


def value_checksum(samples: Iterable[dict[str, Any]]) -> tuple[int, int]:
    """Return the number of samples, and a checksum of all bytes of their values, which does not depend on the order of
    samples."""
    count = total = 0
    for sample in samples:
        check = zlib.crc32(int(sample["number"]).to_bytes(8, "little"))
        for name, value in sample.items():
            if name != "number":
                check = zlib.crc32(value if isinstance(value, bytes) else np.ascontiguousarray(value).tobytes(), check)
        count, total = count + 1, (total + check) % (1 << 64)
    return count, total
