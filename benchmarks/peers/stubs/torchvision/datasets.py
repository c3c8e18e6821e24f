"""Base class of the image datasets of mosaicml-streaming."""

from __future__ import annotations

VisionDataset = object
