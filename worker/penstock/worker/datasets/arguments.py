"""Checks of what a user gives."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import overload

from penstock.proto.errors import InvalidArgumentError

__all__ = ["at_least_one", "one_of", "whole"]


@overload
def whole(name: str, value: int) -> int: ...
@overload
def whole(name: str, value: int | None) -> int | None: ...
def whole(name: str, value: int | None) -> int | None:
    """As Python's own integer; one of numpy's would not be one in a state. Raises InvalidArgumentError for what is
    none."""
    try:
        return None if value is None else int(operator.index(value))
    except TypeError:
        raise InvalidArgumentError(f"{name}={value!r}: it must be a whole number") from None


def at_least_one(name: str, value: int) -> int:
    """A whole number that counts something. Raises InvalidArgumentError for what is none."""
    number = whole(name, value)
    if number is None or number < 1:
        raise InvalidArgumentError(f"{name}={number}: it must be at least 1")
    return number


def one_of(name: str, value: str, known: Sequence[str]) -> None:
    """Raises InvalidArgumentError for a word that means nothing."""
    if value not in known:
        raise InvalidArgumentError(f"{name}={value!r}: it is one of {', '.join(known)}")
