"""`python -m penstock.worker`: the daemon as a child of the embedded mode. People use `penstock worker`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys

from penstock.proto.channel import read_token
from penstock.proto.errors import PenstockError
from penstock.worker.daemon import Settings, serve


def main() -> int:
    """Parse, serve, and turn our errors into one line and exit status 1."""
    parser = argparse.ArgumentParser(prog="python -m penstock.worker")
    parser.add_argument("--coordinator", required=True)
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--allow", action="append", default=[])
    parser.add_argument("--listen", default="127.0.0.1:0")
    parser.add_argument("--name", default="")
    parser.add_argument("--runner-memory", type=int, default=0)
    parser.add_argument("--lifeline-pid", type=int)
    parser.add_argument("--embedded", action="store_true")
    parser.add_argument("--ready-fd", type=int)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO if not options.embedded else logging.WARNING, format="penstock: %(message)s")
    logging.getLogger("penstock.user").setLevel(logging.INFO)

    def ready(name: str) -> None:
        if options.ready_fd is not None:
            os.write(options.ready_fd, f"{name}\n".encode())
            os.close(options.ready_fd)

    settings = Settings(
        coordinator=options.coordinator,
        token=read_token(),
        slots=options.slots,
        allow=options.allow,
        listen=options.listen,
        name=options.name,
        lifeline_pid=options.lifeline_pid,
        embedded=options.embedded,
        runner_memory=options.runner_memory,
    )
    try:
        asyncio.run(serve(settings, ready))
    except PenstockError as error:
        print(f"penstock worker: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
