"""Names of a conversion's arguments in messages: those of the Python function, or the options of the command."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ARGUMENTS", "ArgumentNames"]

_OPTIONS = {"types": "--as"}
"""Option of the command, by the name of the Python argument; only where the two names differ."""


@dataclass(frozen=True)
class ArgumentNames:
    """Names by which messages call the arguments of a conversion."""

    options: bool = False
    """True for the options of the command `penstock data convert`, False for the arguments of `convert_dataset`."""

    def of(self, argument: str) -> str:
        """Return the name of an argument as the user wrote it: "--size-limit" or "size_limit"."""
        return _OPTIONS.get(argument, "--" + argument.replace("_", "-")) if self.options else argument

    def column_type(self, column: str, kind: str) -> str:
        """Return the text with which the user gives a column a type: "--as COLUMN=KIND" or "types={'COLUMN':
        'KIND'}"."""
        return f"--as {column}={kind}" if self.options else f"types={{{column!r}: {kind!r}}}"


ARGUMENTS = ArgumentNames()
