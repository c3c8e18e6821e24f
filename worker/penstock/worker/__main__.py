"""Entry point of `python -m penstock.worker`, with which programs start a worker daemon. People use `penstock worker`.

Its options are the fields of DaemonSettings that are texts, numbers or flags, except NO_OPTIONS, and TLS files. The
exit status is 1 for a Penstock error, and 16 if the daemon refused to listen beyond this machine without TLS.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from dataclasses import MISSING, fields
from typing import Any

from penstock.proto.errors import PenstockError, UnsafeBindError
from penstock.proto.rpc.credentials.tokens import read_token
from penstock.proto.rpc.tls import load_tls
from penstock.runtime.process.memory_secrecy import keep_memory_private
from penstock.runtime.process.titles import name_process
from penstock.runtime.telemetry.logs import log_lines
from penstock.worker.daemon.serving import serve
from penstock.worker.daemon.worker_settings import DaemonSettings

UNSAFE_BIND = 16
"""Exit status for a refusal to listen beyond this machine without TLS; equals UNSAFE_BIND of the deploy package's
exit_codes."""
NO_OPTIONS = ("token", "embedded", "http", "http_tokens")
_KINDS: dict[str, dict[str, Any]] = {
    "str": {},
    "int": {"type": int},
    "float": {"type": float},
    "bool": {"action": "store_true"},
    "Sequence[str]": {"action": "append"},
}
"""Arguments of add_argument by a field's type."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m penstock.worker", argument_default=argparse.SUPPRESS)
    for field in fields(DaemonSettings):
        if field.type in _KINDS and field.name not in NO_OPTIONS:
            needed = field.default is MISSING
            parser.add_argument(f"--{field.name.replace('_', '-')}", required=needed, **_KINDS[str(field.type)])
    for what in ("ca", "cert", "key", "name"):
        parser.add_argument(f"--tls-{what}", default="")
    parser.add_argument("--ready-fd", type=int, default=-1)
    return parser


def main() -> int:
    options = vars(_parser().parse_args())
    tls_options = [options.pop(f"tls_{what}") for what in ("ca", "cert", "key", "name")]
    ready_fd = options.pop("ready_fd")
    keep_memory_private()
    name_process("penstock-worker")
    log_lines("penstock: %(message)s", logging.INFO)
    logging.getLogger("penstock.user").setLevel(logging.INFO)

    def ready(name: str) -> None:
        if ready_fd >= 0:
            os.write(ready_fd, f"{name}\n".encode())
            os.close(ready_fd)

    try:
        settings = DaemonSettings(token=read_token("worker"), tls=load_tls(*tls_options), **options)
        asyncio.run(serve(settings, ready))
    except PenstockError as error:
        print(f"penstock worker: {error}", file=sys.stderr)
        return UNSAFE_BIND if isinstance(error, UnsafeBindError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
