"""Decoding of JPEG files by simplejpeg, wherever its pixels equal Pillow's.

simplejpeg and Pillow both use libjpeg-turbo. Pillow reads a file in pieces, line by line, into pixels of four bytes,
and copies them twice to make an array; simplejpeg decodes into the array, and is used for RGB and grayscale. Pillow
decodes every file that simplejpeg refuses or warns about, so a damaged file gives Pillow's result or error.

Import this module only where there are JPEG files: it imports Pillow.
"""

from __future__ import annotations

import functools
import importlib
from io import BytesIO
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageFile
from PIL.JpegImagePlugin import JpegImageFile

__all__ = ["JpegImage", "decode_array", "decode_pixels", "open_jpeg"]

_COLORSPACES = {"RGB": "RGB", "L": "GRAY"}
"""simplejpeg's name of a color space, by Pillow's mode."""
_MODES = {"YCbCr": "RGB", "RGB": "RGB", "Gray": "L"}
"""Pillow's mode, by simplejpeg's name of the color space that a file has."""

Pixels = npt.NDArray[np.uint8]


@functools.cache
def _simplejpeg() -> Any:
    """Return the module simplejpeg; None if it is not installed."""
    try:
        return importlib.import_module("simplejpeg")
    except ImportError:
        return None


def open_jpeg(file: bytes) -> Any:
    """Return the image of a whole JPEG file as an image of Pillow. The head of the file is read now, and the pixels are
    decoded on first use. Raises PIL.UnidentifiedImageError."""
    # Without `formats`, Pillow would try dozens of formats, and start a program for one of them.
    image = Image.open(BytesIO(file), formats=("JPEG",))
    if type(image) is JpegImageFile and image.mode in _COLORSPACES and _simplejpeg() is not None:
        image.__class__ = JpegImage
        image._file = file  # type: ignore[attr-defined]  # it is a JpegImage now
    return image


def decode_array(file: bytes) -> npt.NDArray[Any]:
    """Return the pixels of a whole JPEG file, as `numpy.asarray(open_jpeg(file))` gives them, in a writable array.

    Raises PIL.UnidentifiedImageError, OSError, and PIL.Image.DecompressionBombError for more pixels than Pillow opens.
    """
    library = _simplejpeg()
    if library is not None and not ImageFile.LOAD_TRUNCATED_IMAGES:
        try:
            height, width, colorspace, _ = library.decode_jpeg_header(file)
        except ValueError:
            colorspace = ""
        # Pillow warns of or refuses an image above the limit: a few bytes can claim gigabytes.
        if colorspace in _MODES and height * width <= (Image.MAX_IMAGE_PIXELS or 0):
            pixels = decode_pixels(file, _MODES[colorspace])
            if pixels is not None:
                return pixels
    return np.array(open_jpeg(file))


def decode_pixels(file: bytes, mode: str) -> Pixels | None:
    """Decode a whole JPEG file with simplejpeg. `mode`: "RGB" or "L", as Pillow reports it for this file.

    Returns an array of uint8 with shape (height, width, 3) for "RGB" and (height, width) for "L". Returns None if
    simplejpeg is not installed or objects to anything in the file.
    """
    library = _simplejpeg()
    if library is None:
        return None
    try:
        # Without these two arguments, colors and frequencies are computed faster, and differ from Pillow's.
        pixels = library.decode_jpeg(file, colorspace=_COLORSPACES[mode], fastdct=False, fastupsample=False)
    except ValueError:
        return None
    return pixels if mode == "RGB" else pixels[..., 0]  # type: ignore[no-any-return]


class JpegImage(JpegImageFile):
    """Pillow image that simplejpeg decodes: `numpy.asarray(image)` takes the pixels from simplejpeg, without a copy.
    The object equals the image that Pillow opens, and is pickled as a Pillow image."""

    _file = b""
    _decoded: Pixels | None = None

    def _pixels(self) -> Pixels | None:
        """Return the pixels, if the image was neither loaded nor changed before; None if Pillow must decode the
        image."""
        if len(self.tile) != 1 or self.decoderconfig or ImageFile.LOAD_TRUNCATED_IMAGES:
            return None
        if self._decoded is None and self._file:
            pixels = decode_pixels(self._file, self.mode)
            if pixels is not None and pixels.shape[:2] == (self.height, self.width):
                self._decoded = pixels
            self._file = b""
        return self._decoded

    @property
    def __array_interface__(self) -> dict[str, Any]:
        pixels = self._pixels()
        if pixels is None:
            return super().__array_interface__
        # Read-only, as Pillow's, because this image keeps the pixels.
        return {"version": 3, "shape": pixels.shape, "typestr": "|u1", "data": pixels.data.toreadonly()}

    def load(self) -> Any:
        pixels = self._pixels()
        if pixels is not None:
            self.im = Image.frombytes(self.mode, self.size, np.ascontiguousarray(pixels)).im
            self.tile, self.readonly, self.fp, self._decoded = [], 0, None, None
        return super().load()

    def __eq__(self, other: object) -> bool:
        if type(other) is JpegImageFile:  # Pillow compares the classes first
            fields = slice(5)  # info, mode, size, palette, pixels
            return bool(self.__getstate__()[fields] == other.__getstate__()[fields])
        return super().__eq__(other)

    __hash__ = None  # type: ignore[assignment]  # as Pillow's images

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = JpegImageFile.__new__(JpegImageFile)
        plain.__setstate__(self.__getstate__())
        return plain.__reduce_ex__(1)  # from protocol 2 on, pickle refuses to store another class than this one
