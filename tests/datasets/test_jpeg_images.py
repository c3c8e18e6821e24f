"""JPEG files decode to Pillow's pixels, images and errors, whichever library decodes them."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_uses import USES
from PIL import Image, ImageFile
from PIL.JpegImagePlugin import JpegImageFile

from penstock.data import MDSWriter, StreamingDataset, StreamingLoader
from penstock.data.formats.media import jpeg_images
from penstock.data.formats.media.images import decode_jpeg, decode_jpeg_array
from penstock.proto.errors import InvalidArgumentError, ShardCorruptError

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


def _drafted(image: Any) -> Any:
    image.draft("L", (8, 8))
    return image


def _as_ycbcr(image: Any) -> Any:
    image.draft("YCbCr", (64, 48))
    return image


@pytest.mark.parametrize("use", [*USES, _drafted, _as_ycbcr])
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A dataset with images of all encodings, in sizes and modes that alternate."""
    made = tmp_path_factory.mktemp("images") / "all"
    columns = {
        "jpeg": "jpeg",
        "png": "png",
        "pil": "pil",
        "list": "list[jpeg]",
        "pngs": "list[png]",
        "files": "jpeg_array",
    }
    with MDSWriter(made, columns) as shards:
        for number in range(12):
            file = jpeg(("RGB", "L", "CMYK")[number % 3], SIZES[number % 5])
            image = pillow(file)
            plain = image.convert(("RGBA", "LA", "P", "1", "I;16")[number % 5])
            shards.write(
                {
                    "jpeg": image,
                    "png": plain,
                    "pil": image,
                    "list": [image] * (number % 3),
                    "pngs": [plain],
                    "files": [file],
                }
            )
    return str(made)


def test_arrays_are_those_of_the_images(folder: str) -> None:
    as_images, as_arrays = StreamingDataset(folder), StreamingDataset(folder, images="array")
    for images, arrays in ((as_images[number], as_arrays[number]) for number in range(len(as_images))):
        for name, value in arrays.items():
            pairs = zip(value, images[name], strict=True) if isinstance(value, list) else [(value, images[name])]
            for array, image in pairs:
                expected = np.asarray(image)
                assert (type(array), array.dtype, array.shape) == (np.ndarray, expected.dtype, expected.shape)
                assert np.array_equal(array, expected)
                assert array.flags.writeable


def test_arrays_come_in_order_from_threads(folder: str) -> None:
    def read(**settings: Any) -> list[Any]:
        loader = StreamingLoader(
            StreamingDataset(folder, images="array"), batch_size=1, shuffle=True, seed=3, **settings
        )
        return [batch["jpeg"].tolist() for batch in loader]

    assert read(fetch_threads=2) == read()


@pytest.mark.parametrize("file", [jpeg()[:-200], b"no image", jpeg()[:20]])
def test_damaged_array_names_its_sample(file: bytes, tmp_path: Path) -> None:
    with MDSWriter(tmp_path / "bytes", {"jpeg": "bytes"}) as shards:
        shards.write({"jpeg": file})
    index = tmp_path / "bytes" / "index.json"
    index.write_text(index.read_text().replace('"bytes"]', '"jpeg"]'))
    with pytest.raises(ShardCorruptError, match=r"shard.00000.mds.*sample 0, column 'jpeg'"):
        StreamingDataset(tmp_path / "bytes", images="array")[0]


def test_huge_image_is_refused_as_by_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(Image.DecompressionBombError):
        decode_jpeg_array(jpeg(), 0, len(jpeg()))


def test_kind_of_images_is_checked(folder: str) -> None:
    with pytest.raises(InvalidArgumentError, match='images must be "pil" or "array", got \'tensor\''):
        StreamingDataset(folder, images="tensor")  # type: ignore[arg-type]


def test_simplejpeg_decodes_where_it_is_installed() -> None:
    image = ours(jpeg())
    np.asarray(image)
    assert image.tile, "Pillow has decoded it"
    assert ours(jpeg("CMYK")).__class__ is not jpeg_images.JpegImage


def test_pillow_decodes_without_simplejpeg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jpeg_images, "_simplejpeg", lambda: None)
    assert type(ours(jpeg())) is JpegImageFile
    assert np.array_equal(np.asarray(ours(jpeg())), np.asarray(pillow(jpeg())))
