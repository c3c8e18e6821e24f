"""Rows of two readers made comparable: without numpy, order of rows, and other writings of the same moment."""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable
from typing import Any

import numpy as np


def comparable(rows: Iterable[dict[str, Any]]) -> list[str]:
    return sorted(repr({name: _plain(row[name]) for name in sorted(row)}) for row in rows)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, datetime.datetime) and value.tzinfo:
        return value.astimezone(datetime.UTC)
    return "nan" if isinstance(value, float) and math.isnan(value) else value
