"""Command `penstock`. `python -m penstock.deploy` is the same command, for programs that start daemons with their own
interpreter. The imports take about half a second; Ctrl-C in this time ends the command with exit code 130."""

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
