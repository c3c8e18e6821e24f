"""`penstock coordinator`."""

from __future__ import annotations

from penstock.deploy.console.common_options import quiet_grpc, tls_flags
from penstock.deploy.console.options import (
    BalanceAfter,
    Budget,
    ClientLease,
    CoordinatorHttp,
    CoordinatorInsecure,
    CoordinatorListen,
    Debug,
    Lease,
    LogFormat,
    Otel,
    ParentPid,
    ReadyFile,
    StateDir,
    TlsCa,
    TlsCert,
    TlsKey,
    TlsName,
    TokenFile,
)

__all__ = ["coordinator"]


def coordinator(
    listen: CoordinatorListen = None,
    state_dir: StateDir = None,
    http: CoordinatorHttp = None,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_name: TlsName = None,
    insecure: CoordinatorInsecure = None,
    lease: Lease = None,
    client_lease: ClientLease = None,
    log_format: LogFormat = None,
    otel: Otel = None,
    balance_after: BalanceAfter = None,
    budget: Budget = None,
    ready_file: ReadyFile = None,
    parent_pid: ParentPid = None,
    debug: Debug = False,
) -> None:
    """Run the coordinator: it hands out the work and keeps the cluster state.

    Prints the address that it listens on as one line once it is ready. Without a token it makes one, in
    STATE_DIR/token. A dashboard for browsers is at http://127.0.0.1:7071 (see --http). Ends on SIGTERM or Ctrl-C;
    started again on the same directory it goes on where it was.

    \b
    Examples:
      penstock coordinator --state-dir ~/penstock                           for this machine alone
      penstock coordinator --state-dir ~/penstock --listen 0.0.0.0:7070 \\
          --tls-cert cert.pem --tls-key key.pem --tls-ca ca.pem             for others; see docs/security.md
    """
    quiet_grpc()
    from penstock.deploy.operations.run_daemon import run_coordinator

    flags = {
        "listen": listen,
        "state_dir": state_dir,
        "http": http,
        "insecure": insecure,
        "lease": lease,
        "client_lease": client_lease,
        "budget": budget,
        "balance_after": balance_after,
    }
    telemetry = {"log_format": log_format, "otel": otel}
    tls = tls_flags(tls_ca, tls_cert, tls_key, tls_name)
    run_coordinator(flags, tls, telemetry, token_file, ready_file, debug, parent_pid)
