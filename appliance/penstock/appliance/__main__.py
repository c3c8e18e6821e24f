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

from penstock.appliance.limits import Limits
from penstock.appliance.server.server import IN_MEMORY, announcer, serve
from penstock.proto.errors import PenstockError, UnsafeBindError
from penstock.proto.rpc.credentials.tokens import read_tokens
from penstock.proto.rpc.tls import load_tls
from penstock.runtime.process.memory_secrecy import keep_memory_private
from penstock.runtime.process.titles import name_process
from penstock.runtime.telemetry.logs import log_lines

UNSAFE_BIND = 16
"""Exit status for listening beyond this machine without TLS; the same as in penstock.deploy.console.exit_codes."""

LEASES = ("worker_lease_s", "client_lease_s", "balance_after_s")


def main() -> int:
    defaults = Limits()
    parser = argparse.ArgumentParser("python -m penstock.appliance", description="A Penstock coordinator.")
    add = parser.add_argument
    add("--listen", default="127.0.0.1:0", help="address: host:port (port 0: a free one) or unix:/path")
    add("--state-dir", default=IN_MEMORY, help="directory for the cluster state (default: %(default)s)")
    add("--parent-pid", type=int, help="pid of the parent process; the coordinator ends with it")
    add("--ready-fd", type=int, help="descriptor to which the address is written once calls are accepted (default: 1)")
    add("--insecure", action="store_true", help="permission to listen beyond this machine without TLS")
    for part in ("ca", "cert", "key", "name"):
        add(f"--tls-{part}", default="", help="as for `penstock coordinator`, like all below")
    for name in LEASES:
        add(f"--{name.replace('_', '-')}", type=float, default=getattr(defaults, name))
    given = parser.parse_args()
    keep_memory_private()
    name_process("penstock-coord")
    faulthandler.enable()
    log_lines("penstock coordinator: %(message)s", logging.WARNING)
    if given.parent_pid is not None:  # the training job itself logs warnings about its slots
        logging.getLogger("penstock.appliance").setLevel(logging.ERROR)
    limits = replace(
        defaults,
        **{name: getattr(given, name) for name in LEASES},
        budget=0,
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
            )
        )
    except PenstockError as error:
        print(f"penstock coordinator: {error}", file=sys.stderr)
        return UNSAFE_BIND if isinstance(error, UnsafeBindError) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
