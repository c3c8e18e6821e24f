"""Uses of an image, each a function from an image to what comes of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["USES"]


def changed(image: Any) -> Any:
    np.asarray(image)
    image.putpixel((1, 1), (1, 2, 3))
    return image


def turned(image: Any) -> Any:
    return image.rotate(90)


def shrunk(image: Any) -> Any:
    image.thumbnail((8, 8))
    return image


USES: list[Callable[[Any], Any]] = [changed, turned, shrunk, copy.copy, copy.deepcopy]
