"""Address and credentials of the coordinator that a command calls. Every such command has six options for them (see
penstock.deploy.console.common_options). Values that are not given as options come from variables and the settings
file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.deploy.console.daemon_settings import PeerSettings, TlsSettings, resolve

if TYPE_CHECKING:  # at run time gRPC is imported only when a command needs it
    from penstock.proto.rpc.calls import CoordinatorClient
    from penstock.proto.rpc.tls import Tls

__all__ = ["Peer"]


@dataclass(frozen=True)
class Peer:
    """Values of the options for a coordinator; None for those that were not given. Each method raises the errors of the
    options that it uses."""

    coordinator: str | None = None
    token_file: Path | None = None
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_name: str | None = None

    @property
    def address(self) -> str:
        """Return the coordinator's address, HOST:PORT."""
        return resolve(PeerSettings, coordinator=self.coordinator).coordinator

    def tls(self) -> Tls | None:
        """Return the TLS files of the command, read and checked; None without TLS."""
        files = {"tls_ca": self.tls_ca, "tls_cert": self.tls_cert, "tls_key": self.tls_key, "tls_name": self.tls_name}
        return resolve(TlsSettings, **files).load()

    def token(self) -> str:
        """Return the operator's credential token."""
        from penstock.deploy.console.command_token import peer_token

        return peer_token("admin", self.token_file)

    def client(self) -> CoordinatorClient:
        """Return a client of the coordinator."""
        from penstock.proto.rpc.calls import CoordinatorClient

        return CoordinatorClient(self.address, self.token(), tls=self.tls())
