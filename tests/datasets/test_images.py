"""JPEG and PNG files decode to Pillow's pixels, images and errors, whichever library decodes them."""

from __future__ import annotations

import copy
import pickle
import struct
import zlib
from collections.abc import Callable, Iterator
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFile, UnidentifiedImageError
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile

from penstock.data import MDSWriter, StreamingDataset
from penstock.data.formats.media import jpeg as jpeg_images
from penstock.data.formats.media import png as png_images
from penstock.data.formats.media.images import decode_image, decode_image_array

CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
"""Samples of a pixel, by color type."""
KINDS = [*((bits, 0) for bits in (1, 2, 4, 8, 16)), *((bits, 3) for bits in (1, 2, 4, 8))]
KINDS += [(bits, color) for color in (2, 4, 6) for bits in (8, 16)]
FAST = {(8, 0), (16, 0), (8, 2), (8, 3), (8, 6)}
SIZES = [(1, 1), (17, 33), (64, 5), (3, 300)]
ADAM7 = [(0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)]
"""(first column, first row, step of columns, step of rows) of each pass of an interlaced file."""


def chunk(name: bytes, data: bytes = b"") -> bytes:
    return struct.pack(">I", len(data)) + name + data + zlib.crc32(name + data).to_bytes(4, "big")


def png(
    bits: int = 8,
    color: int = 2,
    size: tuple[int, int] = (64, 48),
    *,
    interlace: bool = False,
    before: bytes = b"",
    after: bytes = b"",
    piece: int = 1000,
    seed: int = 1,
) -> bytes:
    """Return a PNG file of noise, with lines of all five filters. `before`, `after`: chunks around the pixels; `piece`:
    bytes of each chunk of pixels."""
    random, (width, height) = np.random.default_rng(seed), size
    lines = []
    for left, top, right, down in ADAM7 if interlace else [(0, 0, 1, 1)]:
        columns, rows = -(-(width - left) // right), -(-(height - top) // down)
        length = -(-columns * bits * CHANNELS[color] // 8)
        for _ in range(rows if columns > 0 else 0):
            lines.append(bytes([random.integers(0, 5)]) + random.integers(0, 256, length, np.uint8).tobytes())
    data = zlib.compress(b"".join(lines), 1)
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, color, 0, 0, interlace))
    palette = chunk(b"PLTE", random.integers(0, 256, 3 << bits, np.uint8).tobytes()) if color == 3 else b""
    pixels = [chunk(b"IDAT", data[at : at + piece]) for at in range(0, len(data), piece)]
    return b"".join([b"\x89PNG\r\n\x1a\n", head, palette, before, *pixels, after, chunk(b"IEND")])


def jpeg(mode: str = "RGB", size: tuple[int, int] = (64, 48), **options: Any) -> bytes:
    """Return a JPEG file of smooth noise."""
    width, height = size
    noise = np.random.default_rng(width).integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), np.uint8)
    file = BytesIO()
    Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC).convert(mode).save(file, "JPEG", **options)
    return file.getvalue()


MADE: dict[str, Callable[[], bytes]] = {"jpeg": jpeg, "png": png}
both = pytest.mark.parametrize("kind", MADE)


def ours(file: bytes) -> Any:
    return decode_image(file, 0, len(file))


def array(file: bytes) -> Any:
    return decode_image_array(file, 0, len(file))


def pillow(file: bytes) -> Any:
    return Image.open(BytesIO(file))


def assert_same(file: bytes) -> None:
    expected = np.asarray(pillow(file))
    for found in (np.asarray(ours(file)), array(file)):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert np.array_equal(found, expected)
    assert array(file).flags.writeable
    image, known = ours(file), pillow(file)
    image.load(), known.load()
    assert np.array_equal(np.asarray(image), expected)
    assert ours(file) == pillow(file)
    assert pillow(file) == ours(file)
    assert ours(file).tobytes() == known.tobytes()
    assert image.info == known.info
    if isinstance(known, PngImageFile):
        assert (image.text, image.getpalette()) == (known.text, known.getpalette())


@pytest.mark.parametrize("interlace", [False, True], ids=["", "interlaced"])
@pytest.mark.parametrize(("bits", "color"), KINDS)
def test_pixels_are_those_of_pillow(bits: int, color: int, interlace: bool) -> None:
    for size in SIZES:
        assert_same(png(bits, color, size, interlace=interlace))
    assert (type(ours(png(bits, color))) is png_images.PngImage) == ((bits, color) in FAST)


OPTIONS: list[dict[str, Any]] = [{}, {"progressive": True}, {"subsampling": 1}, {"quality": 5}, {"keep_rgb": True}]
JPEG_SIZES = [(1, 1), (17, 33), (64, 64), (63, 65), (2, 300)]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK", "YCbCr"])
def test_jpeg_pixels_are_those_of_pillow(mode: str, options: dict[str, Any]) -> None:
    for size in JPEG_SIZES:
        file = jpeg(mode, size, **options)
        assert_same(file)
        assert ours(file).resize((9, 7)).tobytes() == pillow(file).resize((9, 7)).tobytes()


TEXT = chunk(b"tEXt", b"Title\0of it")


@pytest.mark.parametrize(
    "extra",
    [
        {"before": chunk(b"gAMA", bytes(2)) + TEXT},
        {"before": chunk(b"tRNS", b"\0\1\0\2\0\3")},
        {"before": TEXT[:-1] + b"?"},
        {"before": chunk(b"prVt", b"private")},
        {"after": TEXT},
        {"after": chunk(b"IDAT", b"more")},
        {"piece": 1},
    ],
)
def test_other_chunks_are_those_of_pillow(extra: dict[str, Any]) -> None:
    file = png(size=(9, 9), **extra)
    if outcome(pillow, file)[0] == "error":
        assert outcome(array, file) == outcome(ours, file) == outcome(pillow, file)
    else:
        assert_same(file)


def changed(image: Any) -> Any:
    np.asarray(image)
    image.putpixel((1, 1), (1, 2, 3))
    return image


def drafted(image: Any) -> Any:
    image.draft("L", (8, 8))
    return image


@both
@pytest.mark.parametrize("use", [changed, copy.deepcopy, drafted])
def test_image_is_used_like_one_of_pillow(kind: str, use: Callable[[Any], Any]) -> None:
    file = MADE[kind]()
    assert np.array_equal(np.asarray(use(ours(file))), np.asarray(use(pillow(file))))


@both
def test_pickled_image_is_one_of_pillow(kind: str) -> None:
    file = MADE[kind]()
    image = pickle.loads(pickle.dumps(ours(file)))
    assert type(image) is type(pillow(file))
    assert image == pillow(file)


def outcome(opened: Callable[[bytes], Any], file: bytes) -> tuple[str, str | bytes]:
    try:
        return "pixels", np.asarray(opened(file)).tobytes()
    except UnidentifiedImageError:
        return "error", "unidentified"  # Pillow names an object in memory, we the file's first bytes
    except Exception as error:
        return "error", f"{type(error).__name__}: {error}"


def damaged(whole: bytes, count: int) -> Iterator[bytes]:
    random = np.random.default_rng(1)
    for _ in range(count):
        file = bytearray(whole[: random.integers(10, len(whole))] if random.random() < 0.3 else whole)
        for at in random.integers(0, len(file), random.integers(0, 4)):
            file[at] = random.integers(0, 256)
        yield bytes(file)


@pytest.mark.parametrize(
    "whole", [jpeg(size=(128, 128)), *(png(*kind, size=(24, 24), piece=300) for kind in sorted(FAST))], ids=range(6)
)
@pytest.mark.filterwarnings("ignore")  # of Pillow, about animations
def test_damaged_file_gives_the_result_of_pillow(whole: bytes) -> None:
    found = set()
    for file in damaged(whole, 80 if whole[1:4] == b"PNG" else 200):
        expected = outcome(pillow, file)
        assert outcome(ours, file) == expected
        if whole[1:4] == b"PNG":
            assert outcome(array, file) == expected
        found.add(expected[0])
    assert found == {"pixels", "error"}


def test_checksum_of_zlib_is_not_compared() -> None:
    """docs/formats.md says so. Pillow, which decodes where kornia-rs is not installed, refuses the file."""
    whole = png(size=(4, 4))
    begin, end = whole.index(b"IDAT") + 4, len(whole) - 16
    file = whole[: begin - 8] + chunk(b"IDAT", whole[begin : end - 1] + b"?") + chunk(b"IEND")
    assert outcome(pillow, file)[0] == "error"
    assert np.array_equal(array(file), array(whole))


@both
def test_truncated_file_is_read_where_allowed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    half = MADE[kind]()[:-200]
    with pytest.raises(OSError, match="truncated"):
        np.asarray(ours(half))
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    assert np.array_equal(np.asarray(ours(half)), np.asarray(pillow(half)))


@both
def test_huge_image_is_refused_as_by_pillow(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(Image.DecompressionBombError):
        array(MADE[kind]())


@pytest.mark.parametrize(
    ("kind", "module", "library", "known"),
    [("png", png_images, "_kornia", PngImageFile), ("jpeg", jpeg_images, "_simplejpeg", JpegImageFile)],
)
def test_pillow_decodes_without_the_library(
    kind: str, module: Any, library: str, known: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, library, lambda: None)
    assert type(ours(MADE[kind]())) is known
    assert_same(MADE[kind]())


# ---- of a dataset


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A dataset with images of all encodings, in sizes and modes that alternate."""
    made = tmp_path_factory.mktemp("images") / "all"
    columns = {name: name for name in ("jpeg", "png", "pil")}
    columns |= {"list": "list[jpeg]", "pngs": "list[png]", "files": "jpeg_array"}
    with MDSWriter(made, columns) as shards:
        for number in range(12):
            file = jpeg(("RGB", "L", "CMYK")[number % 3], JPEG_SIZES[number % 5])
            image = pillow(file)
            plain = image.convert(("RGBA", "LA", "P", "1", "I;16")[number % 5])
            sample = {"jpeg": image, "png": plain, "pil": image}
            shards.write({**sample, "list": [image] * (number % 3), "pngs": [plain], "files": [file]})
    return str(made)


def test_arrays_are_those_of_the_images(folder: str) -> None:
    as_images, as_arrays = StreamingDataset(folder), StreamingDataset(folder, images="array")
    for images, arrays in ((as_images[number], as_arrays[number]) for number in range(len(as_images))):
        for name, value in arrays.items():
            pairs = zip(value, images[name], strict=True) if isinstance(value, list) else [(value, images[name])]
            for pixels, image in pairs:
                expected = np.asarray(image)
                assert (type(pixels), pixels.dtype, pixels.shape) == (np.ndarray, expected.dtype, expected.shape)
                assert np.array_equal(pixels, expected)
                assert pixels.flags.writeable
