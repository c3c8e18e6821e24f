"""`penstock coordinator`."""

from __future__ import annotations

from penstock.deploy.commands.base import quiet_grpc, tls_flags
from penstock.deploy.options import (
    ClientLease,
    CoordinatorInsecure,
    CoordinatorListen,
    Debug,
    Lease,
    LifelinePid,
    ReadyFile,
    StateDir,
    TlsCa,
    TlsCert,
    TlsKey,
    TokenFile,
)

__all__ = ["coordinator"]


def coordinator(
    listen: CoordinatorListen = None,
    state_dir: StateDir = None,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    insecure: CoordinatorInsecure = None,
    lease: Lease = None,
    client_lease: ClientLease = None,
    ready_file: ReadyFile = None,
    lifeline_pid: LifelinePid = None,
    debug: Debug = False,
) -> None:
    """Run the coordinator: it hands out the work and keeps the books.

    Prints the address that it listens on as one line once it is ready. Without a token it makes one, in
    STATE_DIR/token. Ends on SIGTERM or Ctrl-C; started again on the same directory it goes on where it was.
    """
    quiet_grpc()
    from penstock.deploy.daemons import run_coordinator

    flags = {
        "listen": listen,
        "state_dir": state_dir,
        "insecure": insecure,
        "lease": lease,
        "client_lease": client_lease,
    }
    run_coordinator(flags, tls_flags(tls_ca, tls_cert, tls_key), token_file, ready_file, debug, lifeline_pid)
