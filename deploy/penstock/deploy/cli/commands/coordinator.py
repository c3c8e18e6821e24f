"""Command `penstock coordinator`."""

from __future__ import annotations

from typing import Annotated

from penstock.deploy.console.app import quiet_grpc
from penstock.deploy.console.options import Debug, Flags, ParentPid, ReadyFile, TokenFile
from penstock.deploy.console.settings import CoordinatorSettings


def coordinator(
    flags: Annotated[Flags, CoordinatorSettings],
    token_file: TokenFile = None,
    ready_file: ReadyFile = None,
    parent_pid: ParentPid = None,
    debug: Debug = False,
) -> None:
    """Run the coordinator. It assigns slots (logical workers of a job) to workers and keeps the cluster state.

    Prints its address as one line once it is ready. If no token is set, the coordinator makes one, in STATE_DIR/token.
    Started again on the same directory, it continues from its journal.

    \b
    Examples:
      penstock coordinator --state-dir ~/penstock                           for this machine alone
      penstock coordinator --state-dir ~/penstock --listen 0.0.0.0:7070 \\
          --tls-cert cert.pem --tls-key key.pem --tls-ca ca.pem             for other machines; see docs/security.md
    """
    quiet_grpc()
    from penstock.deploy.operations.run_daemon import run_coordinator

    run_coordinator(flags, token_file, ready_file, debug, parent_pid)
