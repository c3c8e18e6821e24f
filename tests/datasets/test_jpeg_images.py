"""JPEG files decode to Pillow's pixels, images and errors, whichever library decodes them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFile
from PIL.JpegImagePlugin import JpegImageFile

from penstock.data.formats.media import jpeg_images
from penstock.data.formats.media.images import decode_jpeg

SIZES = [(1, 1), (17, 33), (64, 64), (63, 65), (2, 300)]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"progressive": True},
    {"subsampling": 0},
    {"subsampling": 1},
    {"quality": 100},
    {"quality": 5},
    {"restart_marker_rows": 1},
    {"keep_rgb": True},
]


def jpeg(mode: str = "RGB", size: tuple[int, int] = (64, 48), **options: Any) -> bytes:
    """Return a JPEG file of smooth noise."""
    width, height = size
    noise = np.random.default_rng(width).integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), np.uint8)
    file = BytesIO()
    Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC).convert(mode).save(file, "JPEG", **options)
    return file.getvalue()


def ours(file: bytes) -> Any:
    return decode_jpeg(file, 0, len(file))


def pillow(file: bytes) -> Any:
    return Image.open(BytesIO(file))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK", "YCbCr"])
def test_pixels_are_those_of_pillow(mode: str, options: dict[str, Any]) -> None:
    for size in SIZES:
        file = jpeg(mode, size, **options)
        assert np.array_equal(np.asarray(ours(file)), np.asarray(pillow(file)))
        assert ours(file) == pillow(file)
        assert pillow(file) == ours(file)
        assert ours(file).tobytes() == pillow(file).tobytes()
        assert ours(file).resize((9, 7)).tobytes() == pillow(file).resize((9, 7)).tobytes()


def _changed(image: Any) -> Any:
    np.asarray(image)
    image.putpixel((1, 1), (1, 2, 3))
    return image


def _drafted(image: Any) -> Any:
    image.draft("L", (8, 8))
    return image


def _as_ycbcr(image: Any) -> Any:
    image.draft("YCbCr", (64, 48))
    return image


def _turned(image: Any) -> Any:
    return image.rotate(90)


def _shrunk(image: Any) -> Any:
    image.thumbnail((8, 8))
    return image


@pytest.mark.parametrize("use", [_changed, _drafted, _as_ycbcr, _shrunk, _turned, copy.copy, copy.deepcopy])
def test_image_is_used_like_one_of_pillow(use: Callable[[Any], Any]) -> None:
    file = jpeg()
    assert np.array_equal(np.asarray(use(ours(file))), np.asarray(use(pillow(file))))


def test_pickled_image_is_one_of_pillow() -> None:
    image = pickle.loads(pickle.dumps(ours(jpeg())))
    assert type(image) is JpegImageFile
    assert image == pillow(jpeg())


def test_array_cannot_change_the_image() -> None:
    image = ours(jpeg())
    array = np.asarray(image)
    with pytest.raises(ValueError, match="read-only"):
        array[:] = 0
    image.load()
    assert np.array_equal(array, np.asarray(image))


def _outcome(opened: Callable[[bytes], Any], file: bytes) -> str | bytes:
    try:
        return np.asarray(opened(file)).tobytes()
    except Exception as error:
        return f"{type(error).__name__}: {error}".split("<")[0]  # not the address of a file object


def test_damaged_file_gives_the_result_of_pillow() -> None:
    whole = jpeg(size=(128, 128))
    random = np.random.default_rng(1)
    outcomes = set()
    for _ in range(400):
        damaged = bytearray(whole[: random.integers(10, len(whole))] if random.random() < 0.3 else whole)
        for at in random.integers(0, len(damaged), random.integers(0, 4)):
            damaged[at] = random.integers(0, 256)
        expected = _outcome(pillow, bytes(damaged))
        assert _outcome(ours, bytes(damaged)) == expected
        outcomes.add(type(expected))
    assert outcomes == {str, bytes}


def test_truncated_file_is_read_where_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    half = jpeg()[:-200]
    with pytest.raises(OSError, match="truncated"):
        np.asarray(ours(half))
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    assert np.array_equal(np.asarray(ours(half)), np.asarray(pillow(half)))


def test_simplejpeg_decodes_where_it_is_installed() -> None:
    image = ours(jpeg())
    np.asarray(image)
    assert image.tile, "Pillow has decoded it"
    assert ours(jpeg("CMYK")).__class__ is not jpeg_images.JpegImage


def test_pillow_decodes_without_simplejpeg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jpeg_images, "_simplejpeg", lambda: None)
    assert type(ours(jpeg())) is JpegImageFile
    assert np.array_equal(np.asarray(ours(jpeg())), np.asarray(pillow(jpeg())))
