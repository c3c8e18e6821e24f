"""Names of a conversion's arguments in messages: those of the function in Python, or the options of the command."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ARGUMENTS", "ArgumentNames"]

_OPTIONS = {"types": "--as"}
"""Options whose name is not the argument's."""


@dataclass(frozen=True)
class ArgumentNames:
    """Names of arguments in messages."""

    options: bool = False
    """True for the options of `penstock data convert`; False for the arguments of `convert_dataset`."""

    def of(self, argument: str) -> str:
        """Return the name of an argument."""
        return _OPTIONS.get(argument, "--" + argument.replace("_", "-")) if self.options else argument

    def column_type(self, column: str, kind: str) -> str:
        """Return the text that gives a column a type."""
        return f"--as {column}={kind}" if self.options else f"types={{{column!r}: {kind!r}}}"


ARGUMENTS = ArgumentNames()
