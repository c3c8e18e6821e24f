"""Images of Pillow whose pixels another library (a fast decoder) decodes, where they equal Pillow's: Pillow reads line
by line, and copies the pixels twice to make an array. Pillow decodes what a fast decoder refuses or warns about, so a
damaged file gives Pillow's result or error. Import this module only where there are images: it imports Pillow."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageFile

Pixels = npt.NDArray[Any]


def fits(height: int, width: int) -> bool:
    """Return True if an image of this size, in pixels, may be decoded without asking Pillow, which warns of or refuses
    more pixels, because a file of a few bytes can claim gigabytes. False if its limit is off, or it reads truncated
    files."""
    return height * width <= (Image.MAX_IMAGE_PIXELS or 0) and not ImageFile.LOAD_TRUNCATED_IMAGES


class FastImage(ImageFile.ImageFile):
    """Image of Pillow of which `numpy.asarray(image)` takes the decoder's pixels, without a copy. Equal to and pickled
    as Pillow's image. A subclass is for one format, and also derives from Pillow's class for it."""

    plain: ClassVar[type[ImageFile.ImageFile]]
    _file = b""
    _decoded: Pixels | None = None

    @classmethod
    def of(cls, image: Any, file: bytes) -> Any:
        """Change the class of an image that Pillow has opened to this class, and return the image."""
        image.__class__ = cls
        image._file = file
        return image

    def _decode(self, file: bytes) -> Pixels | None:
        """Return the pixels as `numpy.asarray` of Pillow's image would; None if the fast decoder refuses the file."""
        raise NotImplementedError

    def _finish(self) -> None:
        """Set the image's attributes to the values that they have after Pillow's own decoding."""

    def _pixels(self) -> Pixels | None:
        """Return the pixels, if the image was neither loaded nor changed before; None if Pillow must decode it."""
        if len(self.tile) != 1 or self.decoderconfig or ImageFile.LOAD_TRUNCATED_IMAGES:
            return None
        if self._decoded is None and self._file:
            pixels = self._decode(self._file)
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
        return {
            "version": 3,
            "shape": pixels.shape,
            "typestr": pixels.dtype.str,
            "data": pixels.data.toreadonly(),
        }

    def load(self) -> Any:
        pixels = self._pixels()
        if pixels is not None:
            self.im = Image.frombytes(self.mode, self.size, np.ascontiguousarray(pixels)).im
            self.tile, self.readonly, self.fp, self._decoded = [], 0, None, None
            self._finish()
        return super().load()

    def __eq__(self, other: object) -> bool:
        if type(other) is self.plain:  # Pillow compares the classes first
            fields = slice(5)  # info, mode, size, palette, pixels
            return bool(self.__getstate__()[fields] == other.__getstate__()[fields])
        return super().__eq__(other)

    __hash__ = None  # type: ignore[assignment]  # as Pillow's images

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = self.plain.__new__(self.plain)
        plain.__setstate__(self.__getstate__())
        return plain.__reduce_ex__(1)  # from protocol 2 on, pickle refuses to store another class than this one
