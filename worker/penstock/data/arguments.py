"""Checks and conversions of arguments that users pass."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from numbers import Real
from typing import overload

from penstock.proto.errors import InvalidArgumentError

_BYTES = {"kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30, "tb": 1 << 40, "pb": 1 << 50, "b": 1}
_SAMPLES = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


@overload
def whole(name: str, value: int) -> int: ...
@overload
def whole(name: str, value: int | None) -> int | None: ...
def whole(name: str, value: int | None) -> int | None:
    """Return `value` as a Python int, because a state cannot contain a numpy integer."""
    try:
        return None if value is None else int(operator.index(value))
    except TypeError:
        raise InvalidArgumentError(f"{name} must be a whole number, got {value!r}") from None


def truth(name: str, value: bool) -> bool:
    """Return `value` if it is a bool: a text, for example, would count as True."""
    if not isinstance(value, bool):
        raise InvalidArgumentError(f"{name} must be True or False, got {value!r}")
    return value


def at_least_one(name: str, value: int) -> int:
    number = whole(name, value)
    if number is None or number < 1:
        raise InvalidArgumentError(f"{name} must be at least 1, got {number}")
    return number


def byte_count(name: str, value: int | str | None) -> int | None:
    """Return a number of bytes >= 1, given as such or as "64mb" (powers of 1024, as in mosaicml-streaming)."""
    number = whole(name, _counted(name, value, _BYTES, "100kb, 64mb or 1.5gb, in powers of 1024"))
    if number is not None and number < 1:
        raise InvalidArgumentError(f"{name} must be at least 1 byte, got {value!r}")
    return number


def sample_count(name: str, value: int | str | None) -> int | None:
    """Return a number of samples, given as such or as "100k" (powers of 1000). It may be negative."""
    return whole(name, _counted(name, value, _SAMPLES, "100k, 1.5m or 2b, in powers of 1000"))


def real_number(name: str, value: float | None) -> float | None:
    """Return `value` as a Python float, because a state cannot contain a numpy number."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InvalidArgumentError(f"{name} must be a number, got {value!r}")
    return float(value)


def seconds_count(name: str, value: float) -> float:
    """Return `value` if it is a number of seconds >= 0, or inf."""
    if isinstance(value, bool) or not isinstance(value, Real) or not value >= 0:
        raise InvalidArgumentError(f"{name} must be a number of seconds >= 0, or inf, got {value!r}")
    return float(value)


def _counted(name: str, value: int | str | None, units: Mapping[str, int], examples: str) -> int | None:
    if not isinstance(value, str):
        return value
    text = value.strip().lower()
    unit = next((unit for unit in units if text.endswith(unit)), "")
    digits = text.removesuffix(unit).strip()
    if not re.fullmatch(r"\d+(\.\d+)?", digits):
        raise InvalidArgumentError(f"{name} must be a whole number or a text such as {examples}, got {value!r}")
    return int(Fraction(digits) * units.get(unit, 1))


def apportioned(shares: Sequence[Fraction], total: int) -> list[int]:
    """Divide `total` by shares that sum up to 1. The largest remainders are rounded up."""
    exact = [total * share for share in shares]
    parts = [int(part) for part in exact]
    by_rest = sorted(range(len(parts)), key=lambda number: (parts[number] - exact[number], number))
    for number in by_rest[: total - sum(parts)]:
        parts[number] += 1
    return parts


def one_of(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise InvalidArgumentError(f"{name} must be one of {', '.join(known)}, got {value!r}")


def column_names(where: str, columns: Sequence[str] | None) -> tuple[str, ...] | None:
    """Return the names, which must be different; None: all columns. `where`: beginning of an error's text."""
    if columns is None:
        return None
    if isinstance(columns, str) or not columns or not all(isinstance(name, str) for name in columns):
        raise InvalidArgumentError(f"{where}columns must be a list of one or more names, got {columns!r}")
    if len(set(columns)) != len(columns):
        raise InvalidArgumentError(f"{where}columns must name each column once, got {', '.join(columns)}")
    return tuple(columns)
