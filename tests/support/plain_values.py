"""A sample's values as JSON that keeps their types: two readers agree if what they read looks the same.

Imported by tests and, with mosaicml-streaming beside it, by tests/data/mds/make.py.
"""

from __future__ import annotations

import hashlib
from decimal import Decimal
from typing import Any

import numpy as np
from PIL import Image

__all__ = ["plain"]


def plain(value: Any) -> Any:
    kind = type(value).__name__
    if isinstance(value, np.generic):
        return [kind, value.tobytes().hex()]
    if isinstance(value, np.ndarray):
        return [kind, value.dtype.name, list(value.shape), _short(value.tobytes())]
    if isinstance(value, Image.Image):
        kind = next(base.__name__ for base in type(value).__mro__ if base.__module__.startswith("PIL."))
        return [kind, value.format, value.mode, list(value.size), _short(value.tobytes())]
    if isinstance(value, bytes):
        return [kind, _short(value)]
    if isinstance(value, dict):
        return [kind, {key: plain(item) for key, item in sorted(value.items())}]
    if isinstance(value, list | tuple):
        return [kind, [plain(item) for item in value]]
    if isinstance(value, float):
        return [kind, value.hex()]
    if value is None or isinstance(value, int | str | Decimal):
        return [kind, str(value)]
    raise TypeError(f"no plain form for {kind}")


def _short(data: bytes) -> str:
    return data.hex() if len(data) <= 64 else f"{len(data)} bytes, sha1 {hashlib.sha1(data).hexdigest()}"
