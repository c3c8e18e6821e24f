"""Decoding of PNG files by kornia-rs, where its pixels equal Pillow's: modes L, P, RGB and RGBA with 8 bits for each
channel, and I;16, interlaced or not. Pillow decodes all others, also files with chunks after the pixels, where it reads
texts. kornia-rs holds the GIL: it takes less than half of Pillow's time, and threads do not make it faster.

Import this module only where there are PNG files: it imports Pillow.
"""

from __future__ import annotations

import functools
import importlib
import struct
import zlib
from io import BytesIO
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image
from PIL.PngImagePlugin import PngImageFile

from penstock.data.formats.media.fast_images import FastImage, Pixels, fits

_BEGIN = b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR"
_END = b"\0\0\0\0IEND\xaeB`\x82"
"""Last chunk of a PNG file, with its checksum."""
_HEAD = struct.Struct(">IIBBBBB")
"""First chunk: width, height, bits of a channel, color type, compression, filter, interlace."""
_CHUNK = struct.Struct(">I4s")
_KINDS = {(8, 0): "mono", (16, 0): "mono", (8, 2): "rgb", (8, 3): "mono", (8, 6): "rgba"}
"""kornia-rs's mode, by (bits of a channel, color type). Indexes into a palette are decoded as gray."""
_HARMLESS = {b"gAMA": 4, b"pHYs": 9, b"sRGB": 1, b"cHRM": 32}
"""Size in bytes of chunks that do not change the pixels, and in which Pillow finds no error."""


@functools.cache
def _kornia() -> Any:
    try:
        return importlib.import_module("kornia_rs").io
    except ImportError:
        return None


class Layout(NamedTuple):
    height: int
    width: int
    bits: int
    """Of a channel of one pixel."""
    kind: str
    """kornia-rs's name of the mode: "mono", "rgb" or "rgba"."""
    plain: bool
    """True if Pillow certainly opens the file: chunks have correct checksums, and are known or in _HARMLESS."""


def layout_of(file: bytes) -> Layout | None:
    """Return None for a file that only Pillow can decode."""
    if not file.startswith(_BEGIN) or not file.endswith(_END):
        return None
    begin = len(_BEGIN)
    width, height, bits, color, compression, filtering, interlace = _HEAD.unpack_from(file, begin)
    kind = _KINDS.get((bits, color))
    if kind is None or compression or filtering or interlace > 1:
        return None
    plain, last = True, len(file) - len(_END)
    at, pixels = begin - 8, False
    while at < last:
        size, name = _CHUNK.unpack_from(file, at)
        end = at + 12 + size
        if end > last or name == b"acTL" or (pixels and name != b"IDAT"):
            return None
        if name == b"IDAT":
            pixels = True
        else:
            harmless = _HARMLESS.get(name) == size or name == b"IHDR" or (name == b"PLTE" and color == 3)
            whole = zlib.crc32(file[at + 4 : end - 4]) == int.from_bytes(file[end - 4 : end], "big")
            plain = plain and harmless and whole
        at = end
    return Layout(height, width, bits, kind, plain) if pixels and at == last else None


def open_image(file: bytes) -> Any:
    """Return an image whose pixels are decoded on first use. Raises PIL.UnidentifiedImageError, or
    PIL.Image.DecompressionBombError for more pixels than Pillow opens."""
    # Without `formats`, Pillow would try dozens of formats, and start a program for one of them.
    image = Image.open(BytesIO(file), formats=("PNG",))
    if type(image) is PngImageFile and _kornia() is not None and layout_of(file):
        return PngImage.of(image, file)
    return image


def decode_array(file: bytes) -> npt.NDArray[Any]:
    """Return a writable array, as `numpy.asarray(open_image(file))`. Raises as `open_image`, and OSError."""
    layout = layout_of(file) if _kornia() is not None else None
    if layout is not None and layout.plain and fits(layout.height, layout.width):
        pixels = decode_pixels(file, layout)
        if pixels is not None:
            return pixels
    return np.array(open_image(file))


def decode_pixels(file: bytes, layout: Layout) -> Pixels | None:
    """Return uint8 or uint16 pixels of shape (height, width, channels), or (height, width) for one channel; None if
    kornia-rs, which must be installed, raises an error for the file."""
    library = _kornia()
    decode = library.decode_image_png_u8 if layout.bits == 8 else library.decode_image_png_u16
    try:
        pixels = decode(file, (layout.height, layout.width), layout.kind)
    except Exception:  # kornia-rs has no error class of its own
        return None
    return pixels[..., 0] if layout.kind == "mono" else pixels  # type: ignore[no-any-return]


class PngImage(FastImage, PngImageFile):
    plain = PngImageFile

    def _decode(self, file: bytes) -> Pixels | None:
        layout = layout_of(file)
        return None if layout is None else decode_pixels(file, layout)

    def _finish(self) -> None:
        if self.png is not None:
            self._text = self.png.im_text
            self.png.close()
            self.png = None
