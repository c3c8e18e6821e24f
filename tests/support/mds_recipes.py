"""Datasets that mosaicml-streaming and our own writers both write: the same samples with the same settings.

Imported by tests and, with mosaicml-streaming beside it, by tests/data/mds/make.py. Everything random is drawn from
hashes, so that it is the same with every version of numpy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image

__all__ = ["RECIPES", "Recipe"]

Sample = dict[str, Any]


@dataclass(frozen=True)
class Recipe:
    writer: str
    """MDSWriter, JSONWriter, CSVWriter, TSVWriter or XSVWriter: the same names on both sides."""
    columns: dict[str, str]
    samples: Callable[[], Iterator[Sample]]
    settings: dict[str, Any] = field(default_factory=dict)
    """Keywords of the writer."""


def noise(seed: str, size: int) -> bytes:
    return hashlib.shake_128(seed.encode()).digest(size)


def picture(seed: str, mode: str, width: int, height: int) -> Image.Image:
    empty = Image.new(mode, (width, height))
    return Image.frombytes(mode, (width, height), noise(seed, len(empty.tobytes())))


def jpeg(seed: str) -> bytes:
    out = BytesIO()
    picture(seed, "RGB", 9, 8).save(out, format="JPEG")
    return out.getvalue()


def array(seed: str, dtype: str, *shape: int) -> np.ndarray[Any, Any]:
    kind = np.dtype(dtype)
    size = int(np.prod(shape)) * kind.itemsize
    return np.frombuffer(noise(seed, size), kind).reshape(shape)


INTEGERS = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")
FLOATS = ("float16", "float32", "float64")
EVERY_ENCODING = {
    **{name: name for name in ("bytes", "str", "int", *INTEGERS, *FLOATS)},
    **{name: name for name in ("str_int", "str_float", "str_decimal", "json", "pil", "jpeg", "png")},
    **{name: name for name in ("jpeg_array", "jpegarray", "list[pil]", "list[jpeg]", "list[png]")},
    "array of any kind": "ndarray",
    "array of int16": "ndarray:int16",
    "array of 2 x 3 float32": "ndarray:float32:2,3",
    "ärray of 5 uint8": "ndarray:uint8:5",
}


def every_encoding() -> Iterator[Sample]:
    dtypes = (*INTEGERS, *FLOATS)
    modes = ("L", "RGB", "RGBA", "1", "P", "CMYK", "YCbCr", "I", "F", "LA", "I;16", "HSV")
    for i in range(12):
        seed = f"every encoding {i}"
        numbers = {name: np.iinfo(name).max if i % 2 else np.iinfo(name).min + i for name in INTEGERS}
        fractions = {name: (1.5 * i, -0.0, float("inf"), float("-inf"), 1e-7, 65504.0)[i % 6] for name in FLOATS}
        yield {
            **numbers,
            **fractions,
            "bytes": noise(seed, i * 9),
            "str": "wasser 水 🌊 \0"[: i + 1] * i,
            "int": (-1) ** i * (2**63 - 1) // (i + 1),
            "str_int": (-7) ** (40 * i),
            "str_float": (0.1, float("inf"), -1e300)[i % 3],
            "str_decimal": Decimal(f"{i}.{10**30 + i}") if i else Decimal("NaN"),
            "json": [None, {"a": [1, 2.5, "ü", True]}, [], "text", 3, {"deep": [[[[]]]]}][i % 6],
            "pil": picture(seed, modes[i], 5 + i, 3),
            "jpeg": picture(seed, ("RGB", "L", "CMYK")[i % 3], 16, 8),
            "png": picture(seed, ("RGB", "L", "RGBA", "LA")[i % 4], 8, 9),
            "jpeg_array": [jpeg(f"{seed} {j}") for j in range(1 + i % 2)],
            "jpegarray": [jpeg(seed)],
            "list[pil]": [picture(seed, modes[j], 3, 2) for j in range(i % 4)],
            "list[jpeg]": [picture(seed, "L", 8, 8)] * (i % 2),
            "list[png]": [picture(seed, "L", 4, 4)] * (i % 3),
            "array of any kind": array(seed, dtypes[i % 11], *((1, 300) if i == 4 else (2,) * (1 + i % 5))),
            "array of int16": array(seed, "int16", *(3, 2, 1, 4)[: 1 + i % 4]),
            "array of 2 x 3 float32": array(seed, "float32", 2, 3),
            "ärray of 5 uint8": array(seed, "uint8", 5),
        }


def pickles() -> Iterator[Sample]:
    for i in range(3):
        yield {"any": {"i": i, "of": (1, "two", [3.0], None)}, "i": i}


def numbered(count: int) -> Callable[[], Iterator[Sample]]:
    def samples() -> Iterator[Sample]:
        for i in range(count):
            yield {"i": i, "text": f"sample {i} " * (i % 7), "x": i / 8}

    return samples


def large_ones() -> Iterator[Sample]:
    for i in range(3):
        yield {"data": noise(f"large {i}", 200)}


def just_fitting() -> Iterator[Sample]:
    for i in range(40):
        yield {"data": noise(f"fitting {i}", 7 * (i % 5))}


NUMBERED = {"i": "int", "text": "str", "x": "float64"}
TABLE = {"i": "int", "text": "str", "x": "float"}
SOME = ["blake2s", "sha1", "xxh64"]
EVERY_HASH = [
    *("blake2b", "blake2s", "md5", "sha1", "sha224", "sha256", "sha384"),
    *("sha3_224", "sha3_256", "sha3_384", "sha3_512", "sha512"),
    *("xxh128", "xxh32", "xxh3_128", "xxh3_64", "xxh64"),
]
COMPRESSIONS = ("br", "br:3", "bz2", "bz2:1", "gz", "gz:2", "snappy", "zstd", "zstd:12")


def _mds(columns: dict[str, str], samples: Callable[[], Iterator[Sample]], **settings: Any) -> Recipe:
    return Recipe("MDSWriter", columns, samples, settings)


RECIPES: dict[str, Recipe] = {
    "encodings": _mds(EVERY_ENCODING, every_encoding, size_limit=30_000),
    "pickles": _mds({"any": "pkl", "i": "int"}, pickles),
    "shards": _mds(NUMBERED, numbered(100), size_limit=1200),
    "fitting": _mds({"data": "bytes"}, just_fitting, size_limit=400),
    "large": _mds({"data": "bytes"}, large_ones, size_limit=100),
    "one": _mds(NUMBERED, numbered(5), size_limit=None),
    "none": _mds(NUMBERED, numbered(0)),
    "hashes": _mds(NUMBERED, numbered(9), hashes=EVERY_HASH),
    **{
        f"packed-{name.replace(':', '-')}": _mds(NUMBERED, numbered(30), compression=name, hashes=SOME, size_limit=1000)
        for name in COMPRESSIONS
    },
    "json": Recipe("JSONWriter", TABLE, numbered(30), {"size_limit": 800}),
    "json-packed": Recipe("JSONWriter", TABLE, numbered(30), {"compression": "zstd", "hashes": SOME}),
    "csv": Recipe("CSVWriter", TABLE, numbered(30), {"size_limit": 500}),
    "csv-packed": Recipe("CSVWriter", TABLE, numbered(30), {"compression": "br", "hashes": SOME}),
    "tsv": Recipe("TSVWriter", TABLE, numbered(30), {"size_limit": 500, "hashes": ["md5"]}),
    "xsv": Recipe("XSVWriter", TABLE, numbered(30), {"separator": "::", "newline": "\r\n"}),
    # Two parts of a dataset, merged into one by its merge_index.
    "merged/one": _mds(NUMBERED, numbered(12), size_limit=700),
    "merged/two": _mds(NUMBERED, numbered(7), compression="zstd", hashes=SOME),
}
"""Folder -> what is in it."""
