"""`penstock status`."""

from __future__ import annotations

from penstock.deploy.commands.base import quiet_grpc, tls_flags
from penstock.deploy.options import (
    AsJson,
    Coordinator,
    Debug,
    TlsCa,
    TlsCert,
    TlsKey,
    TlsName,
    TokenFile,
)

__all__ = ["status"]


def status(
    coordinator: Coordinator = None,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_name: TlsName = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show runs, boxes, slots and workers: rates, and who waits for whom.

    \b
    Examples:
      penstock status
      penstock status --coordinator head:7070 --token-file ~/penstock/token
      penstock status --json | jq '.workers[] | select(.live | not) | .worker'
    """
    quiet_grpc()
    from penstock.deploy.status import show_status

    show_status(coordinator, tls_flags(tls_ca, tls_cert, tls_key, tls_name), token_file, as_json)
