"""Command `penstock`, also as `python -m penstock.deploy`, for programs that start daemons with their own interpreter.
The imports take a good part of a second. A Ctrl-C during them ends the command with the exit code of an interrupt."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command `penstock`: the entry point of the package."""
    try:
        try:
            from penstock.runtime.process import linux_only  # noqa: F401
        except ImportError as error:
            sys.exit(f"penstock: {error}")
        from penstock.deploy.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
