"""Sample numbers of the index in `dataset[index]`: numbers and slices as of a list, lists as of a numpy array."""

from __future__ import annotations

import operator
from typing import Any


def one_number(index: Any, length: int, name: str, what: str = "a sample's number") -> int:
    """Return the sample number of an index; a negative one counts from the end. `name`, `what`: for errors."""
    number = at = operator.index(index)
    if at < 0:
        at += length
    if not 0 <= at < length:
        if not length:
            raise IndexError(f"{name} is empty: {what} {number} does not exist")
        raise IndexError(f"{name}: {what} must be at least {-length} and below {length}, got {number}")
    return at


def many_numbers(index: Any, length: int, name: str, what: str = "a sample's number") -> list[int] | None:
    """Return the sample numbers that a slice, range, list or array selects; None for any other index."""
    if isinstance(index, slice):
        return list(range(*index.indices(length)))
    if isinstance(index, range | list):
        values = list(index)
    elif hasattr(index, "tolist") and getattr(index, "ndim", 0) == 1:  # an array of numpy, or a tensor
        values = index.tolist()
    else:
        return None
    if values and type(values[0]) is bool:
        if len(values) != length:
            raise IndexError(f"{name}: a list of bools must have {length} entries, got {len(values)}")
        return [number for number, chosen in enumerate(values) if chosen]
    return [one_number(each, length, name, what) for each in values]
