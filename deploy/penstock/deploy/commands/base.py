"""What commands have in common."""

from __future__ import annotations

import os
from typing import Any

import typer
from typer.core import TyperGroup

from penstock.deploy.exits import EXIT_LINES

__all__ = ["CONTEXT", "EPILOG", "quiet_grpc", "subcommands", "tls_flags"]

EPILOG = f"\b\nExit codes:\n{EXIT_LINES}\n\n\b\nMore: docs/cli.md"
CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 120}


def subcommands(cls: type[TyperGroup] = TyperGroup, **settings: Any) -> typer.Typer:
    """A command that has commands of its own."""
    return typer.Typer(cls=cls, epilog=EPILOG, rich_markup_mode=None, context_settings=CONTEXT, **settings)


def quiet_grpc() -> None:
    """gRPC reports on standard error what our errors say better. Not in a worker: its runners would inherit this."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def tls_flags(ca: str | None, cert: str | None, key: str | None, name: str | None = None) -> dict[str, str | None]:
    """What was given on the command line, for settings.resolve."""
    return {"tls_ca": ca, "tls_cert": cert, "tls_key": key, "tls_name": name}
