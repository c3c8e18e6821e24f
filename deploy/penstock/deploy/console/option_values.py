"""Values of command-line options that are lists or pairs in one text."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.proto.errors import InvalidArgumentError

__all__ = ["listed", "pairs_of"]


def listed(option: str, text: str) -> list[str]:
    """Return the values in a text such as "A,B". Raises InvalidArgumentError if a value is empty."""
    values = [value.strip() for value in text.split(",")]
    if not all(values):
        raise InvalidArgumentError(
            f"{option} must be values separated by commas, none of them empty, got {text!r}. Give the values, or leave "
            "the option out"
        )
    return values


def pairs_of(option: str, texts: Sequence[str]) -> dict[str, str]:
    """Return values by name, from texts such as "NAME=VALUE". Raises InvalidArgumentError for other texts, and for a
    name that is given twice."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not (name and equals and value):
            raise InvalidArgumentError(
                f"{option} must have the form NAME=VALUE, got {text!r}. Put the name and = before the value"
            )
        if name in found:
            raise InvalidArgumentError(f"{option} must have each name once, got {name!r} twice. Leave one out")
        found[name] = value
    return found
