"""Entry point of `python -m penstock.worker`, with which programs start a worker daemon. People use `penstock worker`.

The exit status is 1 for a Penstock error, and 16 if the daemon refused to listen beyond this machine without TLS.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys

from penstock.proto.errors import PenstockError, UnsafeBindError
from penstock.proto.rpc.channel import load_tls, read_token
from penstock.runtime.process.memory_secrecy import keep_memory_private
from penstock.runtime.process.titles import name_process
from penstock.runtime.telemetry.logs import log_lines
from penstock.worker.daemon.serving import serve
from penstock.worker.daemon.worker_settings import DaemonSettings
from penstock.worker.processes.fork_servers import START_DEADLINE_S

UNSAFE_BIND = 16
"""Exit status for a refusal to listen beyond this machine without TLS; equals UNSAFE_BIND of the deploy package's
exit_codes."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m penstock.worker")
    parser.add_argument("--coordinator", required=True)
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--allow", action="append", default=[])
    parser.add_argument("--listen", default="127.0.0.1:0")
    parser.add_argument("--name", default="")
    parser.add_argument("--runner-memory", type=int, default=0)
    parser.add_argument("--starts", type=int, default=0)
    parser.add_argument("--start-timeout", type=float, default=START_DEADLINE_S)
    parser.add_argument("--drain-s", type=float, default=0.0)
    parser.add_argument("--parent-pid", type=int, action="append", default=[])
    parser.add_argument("--runner-user", default="")
    parser.add_argument("--runner-processes", type=int, default=0)
    parser.add_argument("--no-sandbox", action="store_true")
    parser.add_argument("--insecure", action="store_true")
    for what in ("ca", "cert", "key", "name"):
        parser.add_argument(f"--tls-{what}", default="")
    parser.add_argument("--ready-fd", type=int)
    options = parser.parse_args()
    keep_memory_private()
    name_process("penstock worker")
    log_lines("penstock: %(message)s", logging.INFO)
    logging.getLogger("penstock.user").setLevel(logging.INFO)

    def ready(name: str) -> None:
        if options.ready_fd is not None:
            os.write(options.ready_fd, f"{name}\n".encode())
            os.close(options.ready_fd)

    try:
        settings = DaemonSettings(
            coordinator=options.coordinator,
            token=read_token("worker"),
            slots=options.slots,
            allow=options.allow,
            listen=options.listen,
            name=options.name,
            parent_pids=options.parent_pid,
            tls=load_tls(options.tls_ca, options.tls_cert, options.tls_key, options.tls_name),
            insecure=options.insecure,
            drain_s=options.drain_s,
            runner_memory=options.runner_memory,
            starts=options.starts,
            start_timeout_s=options.start_timeout,
            runner_user=options.runner_user,
            runner_processes=options.runner_processes,
            no_sandbox=options.no_sandbox,
        )
        asyncio.run(serve(settings, ready))
    except PenstockError as error:
        print(f"penstock worker: {error}", file=sys.stderr)
        return UNSAFE_BIND if isinstance(error, UnsafeBindError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
