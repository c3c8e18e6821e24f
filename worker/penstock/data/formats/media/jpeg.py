"""Decoding of JPEG files by simplejpeg, in RGB and grayscale, where its pixels equal Pillow's: both use libjpeg-turbo.
Import this module only where there are JPEG files: it imports Pillow."""

from __future__ import annotations

import functools
import importlib
from io import BytesIO
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile

from penstock.data.formats.media.fast_images import FastImage, Pixels, fits

_COLORSPACES = {"RGB": "RGB", "L": "GRAY"}
_MODES = {"YCbCr": "RGB", "RGB": "RGB", "Gray": "L"}
"""Pillow's name of a mode, by simplejpeg's name of the color space that a file has."""


@functools.cache
def _simplejpeg() -> Any:
    try:
        return importlib.import_module("simplejpeg")
    except ImportError:
        return None


def open_image(file: bytes) -> Any:
    """Return an image whose pixels are decoded on first use. Raises PIL.UnidentifiedImageError, or
    PIL.Image.DecompressionBombError for more pixels than Pillow opens."""
    # Without `formats`, Pillow would try dozens of formats, and start a program for one of them.
    image = Image.open(BytesIO(file), formats=("JPEG",))
    if type(image) is JpegImageFile and image.mode in _COLORSPACES and _simplejpeg() is not None:
        return JpegImage.of(image, file)
    return image


def decode_array(file: bytes) -> npt.NDArray[Any]:
    """Return the pixels, as `numpy.asarray(open_image(file))`, in a writable array of uint8, (height, width) or
    (height, width, channels). Raises as `open_image`, and OSError."""
    library = _simplejpeg()
    if library is not None:
        try:
            height, width, colorspace, _ = library.decode_jpeg_header(file)
        except ValueError:
            colorspace = ""
        if colorspace in _MODES and fits(height, width):
            pixels = decode_pixels(file, _MODES[colorspace])
            if pixels is not None:
                return pixels
    return np.array(open_image(file))


def decode_pixels(file: bytes, mode: str) -> Pixels | None:
    """Return uint8 pixels of shape (height, width, 3) for "RGB", (height, width) for "L"; None if simplejpeg is not
    installed or raises an error for the file."""
    library = _simplejpeg()
    if library is None:
        return None
    try:
        # Without these two arguments, colors and frequencies are computed faster, and differ from Pillow's.
        pixels = library.decode_jpeg(file, colorspace=_COLORSPACES[mode], fastdct=False, fastupsample=False)
    except ValueError:
        return None
    return pixels if mode == "RGB" else pixels[..., 0]  # type: ignore[no-any-return]


class JpegImage(FastImage, JpegImageFile):
    plain = JpegImageFile

    def _decode(self, file: bytes) -> Pixels | None:
        return decode_pixels(file, self.mode)
