"""Function that the image datasets of mosaicml-streaming import."""

from __future__ import annotations

from torch import as_tensor as to_tensor

__all__ = ["to_tensor"]
