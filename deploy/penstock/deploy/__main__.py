"""Command `penstock`, also as `python -m penstock.deploy`, for programs that start daemons with their own interpreter.
Ctrl-C during the imports (half a second) ends it with exit code 130."""

from __future__ import annotations

import sys


def main() -> None:
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
