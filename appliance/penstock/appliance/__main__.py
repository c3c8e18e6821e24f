"""Program `python -m penstock.appliance`: a coordinator without the command line `penstock`.

It imports little (no torch, no Typer), to be ready within half a second. The token comes from PENSTOCK_TOKEN or the
file PENSTOCK_TOKEN_FILE, never from an argument, which every user can read. A failed start writes one line to standard
error; its exit status is 2, or 16 if it was told to listen beyond this machine without TLS.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import logging
import os
import sys
from dataclasses import replace

# gRPC would also print a taken port on standard error; the coordinator reports it once, as an error.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

from penstock.appliance.limits import MEMORY_BUDGET, Limits
from penstock.appliance.server.server import IN_MEMORY, announcer, serve
from penstock.proto.errors import PenstockError, UnsafeBindError
from penstock.proto.rpc.channel import load_tls, read_tokens
from penstock.runtime.config.sizes import bytes_of
from penstock.runtime.process.memory_secrecy import keep_memory_private
from penstock.runtime.process.titles import name_process
from penstock.runtime.telemetry.logs import log_lines

UNSAFE_BIND = 16
"""Exit status for listening beyond this machine without TLS; the same as in penstock.deploy.console.exit_codes."""


def main() -> int:
    defaults = Limits()
    parser = argparse.ArgumentParser("python -m penstock.appliance", description="A Penstock coordinator.")
    parser.add_argument(
        "--listen",
        default="127.0.0.1:0",
        help="address to listen at: host:port (port 0: a free one) or unix:/path (default: %(default)s)",
    )
    parser.add_argument(
        "--state-dir", default=IN_MEMORY, help=f"directory for the cluster state, or {IN_MEMORY} (default: %(default)s)"
    )
    parser.add_argument("--parent-pid", type=int, help="pid of the parent process; the coordinator ends with it")
    parser.add_argument(
        "--ready-fd",
        type=int,
        help="file descriptor to which the coordinator writes its address as one line once it accepts calls "
        "(default: standard output)",
    )
    parser.add_argument("--insecure", action="store_true", help="permission to listen beyond this machine without TLS")
    for part, what in (
        ("ca", "file with the CA certificates that callers' certificates are checked against"),
        ("cert", "file with the coordinator's certificate"),
        ("key", "file with the coordinator's private key"),
        ("name", "name that the coordinator's certificate must carry"),
    ):
        parser.add_argument(f"--tls-{part}", default="", help=f"{what} (default: none)")
    parser.add_argument("--http", default="", help="host:port of the dashboard (default: no dashboard)")
    parser.add_argument(
        "--worker-lease-s",
        type=float,
        default=defaults.worker_lease_s,
        help="seconds of silence after which a worker counts as dead (default: %(default)s)",
    )
    parser.add_argument(
        "--client-lease-s",
        type=float,
        default=defaults.client_lease_s,
        help="seconds of silence after which a training process counts as dead (default: %(default)s)",
    )
    parser.add_argument(
        "--balance-after-s",
        type=float,
        default=defaults.balance_after_s,
        help="seconds that a slot stays on its worker before it may move to a faster one; 0: slots stay "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--budget",
        default=os.environ.get("PENSTOCK_COORDINATOR_BUDGET", ""),
        help="largest size of all snapshots and blobs, e.g. 4GiB (default: PENSTOCK_COORDINATOR_BUDGET, else "
        f"{defaults.budget >> 30} GiB, or {MEMORY_BUDGET >> 20} MiB with --state-dir {IN_MEMORY})",
    )
    given = parser.parse_args()
    keep_memory_private()
    name_process("penstock coord")
    faulthandler.enable()
    log_lines("penstock coordinator: %(message)s", logging.WARNING)
    if given.parent_pid is not None:  # the training job itself logs warnings about its slots
        logging.getLogger("penstock.appliance").setLevel(logging.ERROR)
    limits = replace(
        defaults,
        worker_lease_s=given.worker_lease_s,
        client_lease_s=given.client_lease_s,
        balance_after_s=given.balance_after_s,
        budget=bytes_of(given.budget) or (MEMORY_BUDGET if given.state_dir == IN_MEMORY else defaults.budget),
    )
    try:
        asyncio.run(
            serve(
                given.listen,
                given.state_dir,
                read_tokens(),
                tls=load_tls(given.tls_ca, given.tls_cert, given.tls_key, given.tls_name),
                insecure=given.insecure,
                parent_pid=given.parent_pid,
                ready=announcer(given.ready_fd),
                limits=limits,
                http=given.http,
            )
        )
    except PenstockError as error:
        print(f"penstock coordinator: {error}", file=sys.stderr)
        return UNSAFE_BIND if isinstance(error, UnsafeBindError) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
