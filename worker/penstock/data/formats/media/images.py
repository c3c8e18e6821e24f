"""Encodings of images in MDS columns: raw pixels, image files, and lists of either. PIL is imported for the first
image. A decoder compares the sizes in the data with the bytes that are there, before it allocates memory: a raw image
of twelve bytes can claim to have gigabytes."""

from __future__ import annotations

import contextlib
import importlib
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from io import BytesIO
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.proto.errors import DatasetError

Decode = Callable[[bytes, int, int], Any]
Encode = Callable[[Any], bytes]

_HEAD = struct.Struct("=III")
_COUNT = struct.Struct("=I")
_PIXEL = {"1": 0, "L": 1, "P": 1, "LA": 2, "La": 2, "PA": 2, "RGB": 3, "YCbCr": 3, "LAB": 3, "HSV": 3}
_PIXEL |= {"RGBA": 4, "RGBa": 4, "RGBX": 4, "CMYK": 4, "I": 4, "F": 4, "I;16": 2, "I;16B": 2, "I;16L": 2, "I;16N": 2}
"""Bytes of a pixel by PIL's mode; "1" has 8 pixels in a byte."""
LONGEST_EMPTY_SIDE = 1 << 16
"""Largest width or height, in pixels, of an image whose other side is 0."""
_BYTES = (bytes, bytearray, memoryview)
_FAST = {b"\xff\xd8\xff": "jpeg", b"\x89PNG\r\n\x1a\n": "png"}
"""Beginning of a file -> module with its fast decoder."""
_OTHERS = ("WEBP", "AVIF", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "JPEG", "PNG")
"""Pillow's formats of other files. Without a list it would try dozens, and start a program for one of them."""


@cache
def _pil() -> Any:
    try:
        return importlib.import_module("PIL.Image")
    except ImportError as error:
        raise DatasetError(
            "columns with images need the package pillow. Run pip install 'penstock[streaming]'"
        ) from error


def decode_raw(sample: bytes, begin: int, end: int) -> Any:
    """Decode a raw image: [width: 4] [height: 4] [length of mode: 4] [mode] [pixels]."""
    image = _pil()
    if end - begin < _HEAD.size:
        raise ValueError(f"a raw image must have a header of {_HEAD.size} bytes, got {end - begin} bytes in all")
    width, height, length = _HEAD.unpack_from(sample, begin)
    pixels = begin + _HEAD.size + length
    if length > 16 or pixels > end:
        raise ValueError(
            f"the mode's name in a raw image must have at most {min(16, end - begin - _HEAD.size)} bytes, got {length}"
        )
    mode = sample[begin + _HEAD.size : pixels].decode()
    if mode not in _PIXEL:
        raise ValueError(f"the mode of a raw image must be one of {', '.join(_PIXEL)}, got {mode!r}")
    size = (width * _PIXEL[mode] or (width + 7) // 8) * height
    # PIL keeps a pointer for each row, even of an image without columns.
    if size != end - pixels or (not size and max(width, height) > LONGEST_EMPTY_SIDE):
        raise ValueError(
            f"the size of a raw image must fit its {end - pixels} bytes, got {width} x {height} of mode {mode}"
        )
    return image.frombytes(mode, (width, height), sample[pixels:end])


def encode_raw(value: Any) -> bytes:
    _check(value)
    mode: bytes = value.mode.encode()
    pixels: bytes = value.tobytes()
    return _HEAD.pack(*value.size, len(mode)) + mode + pixels


def decode_image(sample: bytes, begin: int, end: int) -> Any:
    """Return an image file as an image of Pillow whose pixels are decoded on first use. Its first bytes say what it is,
    and not its name: crawls have WebP under .jpg. Raises PIL.UnidentifiedImageError for a file that is no image."""
    file = sample[begin:end]
    library = _library_for(file)
    with _named(file):
        return _open_other(file) if library is None else library.open_image(file)


def decode_image_array(sample: bytes, begin: int, end: int) -> npt.NDArray[Any]:
    """Return the pixels of an image file, in a writable array, equal to `numpy.asarray` of its image."""
    file = sample[begin:end]
    library = _library_for(file)
    with _named(file):
        if library is None:
            return np.array(_open_other(file))
        return library.decode_array(file)  # type: ignore[no-any-return]


def _library_for(file: bytes) -> Any:
    _pil()
    for begin, name in _FAST.items():
        if file.startswith(begin):
            return _library(name)
    return None


def _open_other(file: bytes) -> Any:
    library = _pil()
    library.init()  # loads Pillow's decoders, once
    return library.open(BytesIO(file), formats=[name for name in _OTHERS if name in library.OPEN])


@contextlib.contextmanager
def _named(file: bytes) -> Iterator[None]:
    """Let Pillow's UnidentifiedImageError name a file's first bytes: it names an object in memory."""
    try:
        yield
    except OSError as error:
        if type(error).__name__ != "UnidentifiedImageError":
            raise
        raise type(error)(f"the file must be an image, got {len(file)} bytes that begin with {file[:16]!r}") from None


def load_images(sample: Mapping[str, Any]) -> None:
    """Decode the pixels of all images in a sample. Raises ImageError."""
    library = sys.modules.get("PIL.Image")
    if library is None:
        return
    for column, value in sample.items():
        for image in value if isinstance(value, list) else [value]:
            if isinstance(image, library.Image):
                try:
                    image.load()
                except MemoryError:
                    raise
                except Exception as error:
                    raise ImageError(f"column {column!r} cannot be decoded: {type(error).__name__}: {error}") from error


class ImageError(ValueError):
    """Error for an image whose pixels cannot be decoded; it names the column."""


@cache
def _library(name: str) -> Any:
    return importlib.import_module(f"penstock.data.formats.media.{name}")


def array_decoder(decode: Decode) -> Decode:
    """Return a function that decodes to writable arrays. `decode`: to images of Pillow."""

    def decoder(sample: bytes, begin: int, end: int) -> npt.NDArray[Any]:
        return np.array(decode(sample, begin, end))

    return decoder


def encode_jpeg(value: Any) -> bytes:
    """Return a JPEG file: the one that the image was opened from, if it was not edited since, without loss."""
    _check(value)
    if value.format == "JPEG" and getattr(value, "filename", None):
        file = _source_file(value)
        if file is not None:
            return file
    return _saved(value, "JPEG")


def _source_file(value: Any) -> bytes | None:
    """Return the image's file; None if it is gone, or the image edited since (in place, it keeps the file's name)."""
    try:
        with open(value.filename, "rb") as file:
            data = file.read()
        with _pil().open(BytesIO(data)) as fresh:
            if (fresh.format, fresh.mode, fresh.size) != (value.format, value.mode, value.size):
                return None
            # Pixels that were never loaded cannot have been edited. Otherwise the file is decoded again, to compare the
            # pixels.
            return data if value.tile or fresh.tobytes() == value.tobytes() else None
    except OSError:  # the file was removed or replaced: encode the image's pixels instead
        return None


def encode_png(value: Any) -> bytes:
    _check(value)
    return _saved(value, "PNG")


def raw_to_png(sample: bytes, begin: int, end: int) -> bytes:
    """Return a raw image as a PNG file, or as a TIFF file if PNG lacks the image's mode."""
    image = decode_raw(sample, begin, end)
    return _saved(image, "PNG" if image.mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16") else "TIFF")


def file_list_decoder(decode: Decode) -> Decode:
    """Return the decoder of the encoding "jpeg_array": [count: 4] [length: 4] * count [file] * count. `decode`: of one
    file."""

    def decoder(sample: bytes, begin: int, end: int) -> list[Any]:
        images = _decode_list(decode, sample, begin, end)
        if not images:
            raise ValueError("an array of images must not be empty")
        return images

    return decoder


def encode_files(value: Any) -> bytes:
    if not isinstance(value, list | tuple) or not value or not all(isinstance(file, _BYTES) for file in value):
        got = f"a list of {len(value)}" if isinstance(value, list | tuple) else type(value).__name__
        raise TypeError(f"the value must be a list of JPEG files, all as bytes and at least one, got {got}")
    return _joined(list(map(bytes, value)))


def list_decoder(decode: Decode) -> Decode:
    """Return the decoder of "list[...]": four unused bytes, then the layout of `file_list_decoder`."""

    def decoder(sample: bytes, begin: int, end: int) -> list[Any]:
        return _decode_list(decode, sample, begin + 4, end)

    return decoder


def list_encoder(encode: Encode) -> Encode:
    def encoder(value: Any) -> bytes:
        if not isinstance(value, list):
            raise TypeError(f"the value must be a list, got {type(value).__name__}")
        return bytes(4) + _joined([encode(element) for element in value])

    return encoder


def _decode_list(decode: Decode, sample: bytes, begin: int, end: int) -> list[Any]:
    first = begin + _COUNT.size
    if first > end:
        raise ValueError(f"a list must begin with its length, {_COUNT.size} bytes, got {end - begin} bytes in all")
    count = _COUNT.unpack_from(sample, begin)[0]
    at = first + 4 * count
    sizes = struct.unpack_from(f"={count}I", sample, first)
    if at + sum(sizes) != end:
        raise ValueError(f"the list's {count} elements must have {sum(sizes)} bytes, got {end - at}")
    values = []
    for size in sizes:
        values.append(decode(sample, at, at + size))
        at += size
    return values


def _joined(parts: list[bytes]) -> bytes:
    return b"".join([struct.pack(f"={len(parts) + 1}I", len(parts), *map(len, parts)), *parts])


def _check(value: Any) -> None:
    if not isinstance(value, _pil().Image):
        raise TypeError(f"the value must be a PIL image, got {type(value).__name__}")


def _saved(value: Any, form: str) -> bytes:
    out = BytesIO()
    value.save(out, format=form)
    return out.getvalue()
