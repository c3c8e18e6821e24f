"""Encodings of MDS columns: what comes back, what is refused, and that pickles are opened only for who asks for it."""

from __future__ import annotations

import io
import struct
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mds_recipes import RECIPES
from PIL import Image, UnidentifiedImageError

from penstock.data.formats.encodings import check_encoding, encoding_of
from penstock.data.formats.index import INDEX, read_index
from penstock.data.formats.mds import columns_of
from penstock.data.formats.readers import open_shard
from penstock.data.formats.shards import ReadOptions
from penstock.proto.errors import DatasetError, InvalidArgumentError

MDS = Path(__file__).parents[1] / "data" / "mds"
SAMPLES = list(RECIPES["encodings"].samples())
COLUMNS = RECIPES["encodings"].columns


ENDS_ANYWHERE = ("bytes", "str", "str_int", "str_float", "str_decimal", "jpeg", "png")
"""Values of these may end anywhere: what they are is said nowhere, or in an image's head, which is all that is read."""


@pytest.mark.parametrize("column", [column for column in COLUMNS if column not in ENDS_ANYWHERE])
def test_value_of_another_length_is_found(column: str) -> None:
    encoding = encoding_of(COLUMNS[column])
    data = encoding.encode(SAMPLES[5][column])
    for end in range(0, len(data), 1 + len(data) // 50):
        for behind in (b"", bytes(100)):  # what stands behind is another's, and must not count
            with pytest.raises((ValueError, LookupError, OSError, struct.error)):
                encoding.decode(data[:end] + behind, 0, end)
    with pytest.raises((ValueError, LookupError, OSError, struct.error)):
        encoding.decode(data + b"\0", 0, len(data) + 1)


def test_arrays_are_the_callers_own() -> None:
    for name in ("ndarray", "ndarray:int32", "ndarray:int32:2,2"):
        encoding = encoding_of(name)
        data = encoding.encode(np.arange(4, dtype=np.int32).reshape(2, 2))
        array = encoding.decode(data, 0, len(data))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            tensor = torch.from_numpy(array)
        tensor += 1
        assert array.tolist() == [[1, 2], [3, 4]]
        assert encoding.decode(data, 0, len(data)).tolist() == [[0, 1], [2, 3]]
        assert array.base is None


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("pil", np.array([60_000, 60_000, 3], np.uint32).tobytes() + b"RGB" + bytes(100)),
        ("pil", np.array([4, 4, 2**32 - 1], np.uint32).tobytes() + bytes(100)),
        ("pil", np.array([0, 2**31, 1], np.uint32).tobytes() + b"L"),
        ("ndarray", bytes([66, 3 << 2 | 3]) + np.array([2**40, 2**40, 2**40], np.uint64).tobytes()),
        ("ndarray", bytes([66, 2 << 2 | 3]) + np.array([2**63, 2], np.uint64).tobytes()),
        ("ndarray:uint8", bytes([63 << 2 | 3]) + bytes(8 * 62)),
        ("jpegarray", np.array([2**32 - 1], np.uint32).tobytes()),
        ("list[png]", np.array([0, 2, 2**32 - 1, 2**32 - 1], np.uint32).tobytes()),
        ("ndarray", bytes([7])),
        ("json", b"[" * 200_000),
        ("str_int", b"9" * 10_000),
    ],
)
def test_claims_beyond_the_bytes_are_refused(name: str, data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises((ValueError, LookupError, RecursionError, OSError, struct.error)):
            encoding_of(name).decode(data, 0, len(data))
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bytes", "text"),
        ("str", 3),
        ("int", 2**63),
        ("int", 1.5),
        ("uint8", 256),
        ("uint8", 1.5),
        ("uint8", np.int64(300)),
        ("int64", np.uint64(2**63)),
        ("str_int", 1.0),
        ("str_int", True),
        ("str_float", 1),
        ("str_decimal", 1.0),
        ("json", {1, 2}),
        ("ndarray", [1, 2]),
        ("ndarray", np.array(3)),
        ("ndarray", np.empty((2, 0))),
        ("ndarray", np.array([1 + 2j])),
        ("ndarray", np.array([True])),
        ("ndarray:int8", np.array([1])),
        ("ndarray:int64:3", np.array([1])),
        ("ndarray", np.array([1, 2], ">i4")),
        ("pil", 3),
        ("png", np.zeros((2, 2))),
        ("list[png]", Image.new("L", (1, 1))),
        ("list[png]", [3]),
        ("jpegarray", []),
        ("jpegarray", [3]),
        ("float64", None),
        ("float16", 7e4),
    ],
)
def test_values_that_would_change_are_refused(name: str, value: Any) -> None:
    with pytest.raises((TypeError, ValueError, OverflowError)):
        encoding_of(name).encode(value)


@pytest.mark.parametrize(
    "name",
    ["", "int8:", "INT", "list[int]", "ndarray:bool", "ndarray:int8:", "ndarray:int8:2,-1", "ndarray:int8:3:4"],
)
def test_unknown_encodings_are_named(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match="encoding"):
        check_encoding(name)
    with pytest.raises(InvalidArgumentError, match="encoding"):
        encoding_of(name)


def test_jpeg_from_a_file_is_stored_as_it(tmp_path: Path) -> None:
    path = tmp_path / "image.jpg"
    Image.effect_noise((16, 16), 50).save(path, quality=3)
    with Image.open(path) as image:
        image.load()
        assert encoding_of("jpeg").encode(image) == path.read_bytes()
        data = path.read_bytes()
        path.unlink()
        again = encoding_of("jpeg").encode(image)
    assert again != data
    assert again.startswith(b"\xff\xd8")


def thumbnail(image: Image.Image) -> None:
    image.thumbnail((8, 8))


def draft(image: Image.Image) -> None:
    """Make an image draft: smaller, and not loaded."""
    image.draft("L", (8, 8))


@pytest.mark.parametrize("edit", [thumbnail, draft])
def test_edited_jpeg_is_stored_by_its_pixels(tmp_path: Path, edit: Callable[[Image.Image], None]) -> None:
    path = tmp_path / "image.jpg"
    Image.effect_noise((16, 16), 50).convert("RGB").save(path)
    with Image.open(path) as image:
        edit(image)
        encoding = encoding_of("jpeg")
        data = encoding.encode(image)
        assert path.read_bytes() != data
        found = encoding.decode(data, 0, len(data))
        assert (found.mode, found.size) == (image.mode, image.size)
        assert np.abs(np.asarray(found, np.int64) - np.asarray(image)).mean() < 20, "but for the loss of JPEG"


def test_jpeg_with_a_replaced_file_uses_pixels(tmp_path: Path) -> None:
    path = tmp_path / "image.jpg"
    Image.effect_noise((16, 16), 50).save(path)
    with Image.open(path) as image:
        image.load()
        Image.new("L", (16, 16), 7).save(path)
        data = encoding_of("jpeg").encode(image)
    assert data.startswith(b"\xff\xd8")
    assert data != path.read_bytes()


def test_pickles_are_opened_only_for_who_asks() -> None:
    folder = MDS / "pickles"
    (shard,) = read_index((folder / INDEX).read_bytes(), "pickles")
    with pytest.raises(DatasetError, match=r"column 'any': .*allow_unsafe_types=True"):
        open_shard(shard, [folder / shard.name])
    with pytest.raises(DatasetError, match=r"column 'any': .*allow_unsafe_types=True"):
        columns_of(shard)
    with pytest.raises(DatasetError, match="allow_unsafe_types=True"):
        encoding_of("pkl", allow_unsafe_types=False)
    reader = open_shard(shard, [folder / shard.name], ReadOptions(allow_unsafe_types=True))
    assert reader[2]["any"] == {"i": 2, "of": (1, "two", [3.0], None)}
    reader.close()


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000"])
@pytest.mark.parametrize("name", ["jpeg", "png"])
def test_an_image_is_what_its_bytes_are(name: str, form: str) -> None:
    file = io.BytesIO()
    Image.linear_gradient("L").convert("RGB").save(file, form)
    image = encoding_of(name).decode(file.getvalue(), 0, len(file.getvalue()))
    assert image.format == form
    decode = encoding_of(name).decode_array
    assert decode is not None
    assert np.array_equal(decode(file.getvalue(), 0, len(file.getvalue())), np.asarray(Image.open(file)))


def test_image_of_a_dangerous_format_is_not_opened() -> None:
    """PIL would start Ghostscript."""
    file = io.BytesIO()
    Image.new("RGB", (4, 4)).save(file, "EPS")
    with pytest.raises(
        UnidentifiedImageError, match=r"must be an image, got \d+ bytes that begin with b'%!PS-Adobe-3.0"
    ):
        encoding_of("jpeg").decode(file.getvalue(), 0, len(file.getvalue()))
